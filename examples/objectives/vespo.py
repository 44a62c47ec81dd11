"""VESPO (arXiv 2602.10693): a smooth weight of the whole completion, without a gradient.

    W_i   = pi(o_i) / pi_old(o_i), not normalized by the length
    phi_i = W_i^power exp(decay (1 - W_i))
    loss  = -1 / sum_i |o_i| sum_i stop_gradient(phi_i) A_i ln pi(o_i)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/vespo.py:VESPO

TRL: --loss_type vespo. The values are those of Section 3.4.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    power_positive: float = field(default=2.0, metadata={"help": "Exponent of W_i where A_i >= 0."})
    power_negative: float = field(default=3.0, metadata={"help": "The same where A_i < 0."})
    decay_positive: float = field(default=3.0, metadata={"help": "Decay of phi_i where A_i >= 0."})
    decay_negative: float = field(default=2.0, metadata={"help": "The same where A_i < 0."})


class VESPO(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"][:, None]  # (b, 1)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        log_ratio = ((logps - old_logps).detach() * mask).clamp(-20, 20).sum(1, keepdim=True)  # ln W_i, (b, 1)
        if "importance_sampling_ratio" in inputs:  # pi_old / pi of vLLM
            log_ratio += inputs["importance_sampling_ratio"].clamp(min=1e-8).log().sum(1, keepdim=True)
        log_ratio = log_ratio.clamp(math.log(1e-8), 20)
        power = torch.where(advantages >= 0, self.settings.power_positive, self.settings.power_negative)
        decay = torch.where(advantages >= 0, self.settings.decay_positive, self.settings.decay_negative)
        weights = (power * log_ratio + decay * (1 - log_ratio.exp())).exp()  # phi_i, (b, 1)
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.losses()  # of the step, for the mean of its losses
        loss = -(weights * advantages * logps * mask).sum() / tokens
        return loss, Measured(completion_entropy(token_entropy, mask))
