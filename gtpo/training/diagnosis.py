"""What is measured of the tokens of a group: how many are conflicts, and how many clipping cuts."""

from torch import Tensor

from gtpo.training.batch import Metrics, Numbers, Rollouts


def conflict_counts(whole: Rollouts) -> Numbers:
    """Conflict tokens per completion and their share."""
    forward, backward = whole.spans
    conflicts = (forward | backward).sum()
    tokens = whole.valid.sum().clamp(min=1)
    return {
        "conflict_tokens": (conflicts / len(whole.ids)).item(),
        "conflict_fraction": (conflicts / tokens).item(),
    }


def clip_ratios(
    ratio: Tensor, completion_mask: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Metrics:
    """Shares of tokens that GRPO's clipping cuts, as TRL's ``clip_ratio/*``. 0-d tensors.

    ``ratio``: r_it, shape (B, T); ``advantages``: A_i, shape (B,). ``low_min`` and ``high_max`` are over completions.
    """
    valid = completion_mask.bool()
    advantages = advantages[:, None]
    low = (ratio < 1 - epsilon_low) & (advantages < 0) & valid  # (B, T)
    high = (ratio > 1 + epsilon_high) & (advantages > 0) & valid
    lengths = valid.sum(1)
    tokens = valid.sum().clamp(min=1)
    return {
        "clip_ratio/low_mean": low.sum() / tokens,
        "clip_ratio/high_mean": high.sum() / tokens,
        "clip_ratio/region_mean": (low | high).sum() / tokens,
        "clip_ratio/low_min": (low.sum(1) / lengths).nan_to_num(nan=1.0).amin(),  # NaN without tokens
        "clip_ratio/high_max": (high.sum(1) / lengths).nan_to_num(nan=0.0).amax(),
    }
