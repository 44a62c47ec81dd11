"""GMPO (arXiv 2507.20673): the geometric mean of the ratios, each clipped before.

    l_it = ln r_it, clipped to clip_log where that makes r_it A_i smaller: from above if A_i > 0, else from below
    loss = -1/B sum_i A_i exp(1/|o_i| sum_t l_it)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/gmpo.py:GMPO

TRL: trl.experimental.gmpo. The width 0.4 is that of Section 4. The ratio of vLLM is not corrected, as in TRL.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    clip_log: float = field(default=0.4, metadata={"help": "ln r_it is clipped to this distance from 0."})


class GMPO(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"]  # (b,)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        log_ratio = (logps - old_logps) * mask  # (b, T)
        from_above = log_ratio.clamp(max=self.settings.clip_log)
        from_below = log_ratio.clamp(min=-self.settings.clip_log)
        clipped = torch.where(advantages[:, None] > 0, from_above, from_below)
        ratio = (clipped.sum(1) / mask.sum(1).clamp(min=1)).exp()  # (b,)
        loss = -(ratio * advantages).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
