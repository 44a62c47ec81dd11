"""A_i from the rewards of whole groups, as TRL's trainer computes it within a longer method."""

import math

from torch import Tensor
from trl.trainer.utils import nanstd

from gtpo_loss import rewards_at_mean

EPSILON = 1e-4  # TRL's, of the divisor


def group_advantages(rewards: Tensor, weights: Tensor, group_size: int, scale: str, aggregation: str) -> Tensor:
    """A_i = (R_i - mean R) / std R within each group [Section 3], or what TRL's settings make of it.

    Args:
        rewards: One column for each reward function, NaN where it has no reward. Shape (B, K).
        weights: Of the functions. Shape (K,).
        group_size: G; rows k*G to (k+1)*G-1 are one group.
        scale: ``scale_rewards``: group divides by the std of the group, batch by that of all rows, none does not.
        aggregation: ``multi_objective_aggregation``: sum_then_normalize, or normalize_then_sum, which is GDPO's
            [arXiv 2601.05242].

    Returns:
        Shape (B,); 0 for a row without a reward, and by sum_then_normalize for one at the mean of its group.
    """
    unscored = rewards.isnan().all(1)
    if aggregation == "normalize_then_sum":
        rewards = _normalized(rewards.unflatten(0, (-1, group_size)), 1).flatten(0, 1)
    sums = (rewards * weights).nansum(1).masked_fill(unscored, math.nan)  # (B,)
    if aggregation == "normalize_then_sum":
        return _normalized(sums, 0).nan_to_num(nan=0.0)
    groups = sums.unflatten(0, (-1, group_size))  # (P, G)
    advantages = groups - groups.nanmean(1, keepdim=True)
    if scale == "group":
        advantages = _normalized(groups, 1)
    elif scale == "batch":
        advantages = advantages / (nanstd(sums) + EPSILON)
    at_mean = rewards_at_mean(sums, group_size)  # but for rounding
    return advantages.flatten().masked_fill(at_mean, 0.0).nan_to_num(nan=0.0)


def _normalized(values: Tensor, dim: int) -> Tensor:
    centered = values - values.nanmean(dim, keepdim=True)
    return centered / (nanstd(values, dim=dim, keepdim=True) + EPSILON)
