"""RLOO (arXiv 2402.14740): REINFORCE with the mean reward of the group's other completions as the baseline.

    A_i  = R_i - 1/(G - 1) sum over j != i of R_j
    loss = -1/B sum_i min(s_i A_i, clip(s_i) A_i),    s_i = pi(o_i) / pi_old(o_i), the product over its tokens

    python train_grpo.py --model tiny --dataset arithmetic --objective examples/objectives/rloo.py:RLOO

The clipped ratio is that of TRL's RLOOTrainer; the paper has one update for a generation, where s_i = 1. The gradient
is about |o_i| times that of GRPO: the learning rate is not comparable. The ratio of vLLM is not corrected, as in TRL.
RLOO is two changes of GRPO, and each is a class that trains alone: its advantages, and the ratio of whole completions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    clip: float = field(default=0.2, metadata={"help": "s_i is clipped to 1 - clip and 1 + clip."})


class LeaveOneOut(GRPOTrainer):
    """RLOO's advantages with GRPO's loss."""

    fixed = {"scale_rewards": "group"}

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:  # (B, K) -> (B,)
        summed = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        has_reward = ~rewards.isnan().all(1)
        groups, counted = summed.view(-1, group_size), has_reward.view(-1, group_size)  # (P, G)
        others = counted.sum(1, keepdim=True) - 1
        baseline = (groups.sum(1, keepdim=True) - groups) / others.clamp(min=1)
        return (groups - baseline).masked_fill(others == 0, 0.0).flatten()


class CompletionRatio(GRPOTrainer):
    """GRPO's advantages with RLOO's loss."""

    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        ratio = ((logps - old_logps) * mask).sum(1).exp()  # s_i, (b,)
        clipped = ratio.clamp(1 - self.settings.clip, 1 + self.settings.clip)
        loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))


class RLOO(LeaveOneOut, CompletionRatio):
    fixed = LeaveOneOut.fixed | CompletionRatio.fixed
