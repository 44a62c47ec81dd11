"""SAPO (arXiv 2511.20347): a sigmoid around r_it = 1 instead of the clipping.

    f_it = 4 / tau sigmoid(tau (r_it - 1)),    tau = gate_positive if A_i > 0, else gate_negative
    loss = -1/B sum_i A_i / |o_i| sum_t f_it

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/sapo.py:SAPO

TRL: --loss_type sapo. f has the slope 1 at r_it = 1: with one update for a generation it is GRPO.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    gate_positive: float = field(default=1.0, metadata={"help": "tau where A_i > 0."})
    gate_negative: float = field(default=1.05, metadata={"help": "tau where A_i <= 0."})


class SAPO(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"][:, None]  # (b, 1)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        sampler = inputs.get("importance_sampling_ratio", 1.0)  # pi_old / pi of vLLM
        weights = sampler * mask / mask.sum(1, keepdim=True).clamp(min=1)  # 1 / |o_i|, (b, T)
        ratio = ((logps - old_logps) * mask).exp()  # r_it, (b, T)
        tau = torch.where(advantages > 0, self.settings.gate_positive, self.settings.gate_negative)
        gate = 4 / tau * (tau * (ratio - 1)).sigmoid()
        loss = -(gate * advantages * weights).sum(1).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
