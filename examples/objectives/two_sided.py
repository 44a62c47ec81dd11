"""Two-sided clipping (INTELLECT-2, arXiv 2505.07291): the ratio of penalized tokens is bounded too.

    loss = -1/B sum_i 1/|o_i| sum_t min(min(r_it, ratio_max) A_i, clip(r_it, 1 - epsilon, 1 + epsilon_high) A_i)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/two_sided.py:TwoSided

TRL: --delta 4, the value of Section 4.1. GRPO has no bound where A_i < 0 and r_it is large.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    ratio_max: float = field(default=4.0, metadata={"help": "Highest r_it of any token."})


class TwoSided(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"][:, None]  # (b, 1)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        sampler = inputs.get("importance_sampling_ratio", 1.0)  # pi_old / pi of vLLM
        weights = sampler * mask / mask.sum(1, keepdim=True).clamp(min=1)  # 1 / |o_i|, (b, T)
        ratio = ((logps - old_logps) * mask).exp()  # r_it, (b, T)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        bounded = ratio.clamp(max=self.settings.ratio_max)
        per_token = torch.min(bounded * advantages, clipped * advantages)
        loss = -(per_token * weights).sum(1).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
