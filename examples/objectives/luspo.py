"""LUSPO (arXiv 2602.05261): GSPO, with each completion weighted by its length.

    s_i  = (pi(o_i) / pi_old(o_i))^(1/|o_i|)
    loss = -1/B sum_i |o_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/luspo.py:LUSPO

TRL: --loss_type luspo --importance_sampling_level sequence. The widths are those of Section 5.1. The gradient is about
|o_i| times that of GSPO: the learning rate is not comparable.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    clip_low: float = field(default=2e-3, metadata={"help": "Lowest s_i: 1 - clip_low."})
    clip_high: float = field(default=2.5e-3, metadata={"help": "Highest s_i: 1 + clip_high."})


class LUSPO(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"]  # (b,)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        log_ratio = ((logps - old_logps) * mask).sum(1) / mask.sum(1).clamp(min=1)
        ratio = log_ratio.exp()  # s_i, (b,)
        clipped = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        per_row = torch.min(ratio * advantages, clipped * advantages)
        weights = inputs.get("importance_sampling_ratio", 1.0) * mask  # pi_old / pi of vLLM, (b, T)
        loss = -(per_row * weights.sum(1)).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
