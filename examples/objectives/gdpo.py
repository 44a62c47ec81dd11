"""GDPO (arXiv 2601.05242): each reward function is normalized within the group before the rewards are added.

    A_i^k = (R_i^k - mean of the group) / std of the group     for each reward function k
    S_i   = sum_k w_k A_i^k
    A_i   = (S_i - mean of the batch) / std of the batch

    python train_grpo.py --model tiny --dataset arithmetic --objective examples/objectives/gdpo.py:GDPO

The loss is GRPO's. TRL's name for these advantages is --multi_objective_aggregation normalize_then_sum.
"""

from torch import Tensor
from trl.trainer.utils import nanstd

from gtpo import GRPOTrainer

EPSILON = 1e-4  # of the divisors, as in TRL


class GDPO(GRPOTrainer):
    fixed = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:  # (B, K) -> (B,)
        groups = rewards.unflatten(0, (-1, group_size))  # (P, G, K)
        centered = groups - groups.nanmean(1, keepdim=True)
        scaled = (centered / (nanstd(groups, dim=1, keepdim=True) + EPSILON)).flatten(0, 1)
        sums = (scaled * self.reward_weights.to(rewards.device)).nansum(1)
        sums = sums.masked_fill(rewards.isnan().all(1), float("nan"))
        return (sums - sums.nanmean()) / (nanstd(sums) + EPSILON)
