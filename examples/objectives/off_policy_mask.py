"""Off-policy masking (DeepSeek-V3.2, arXiv 2512.02556, Eq. 9): penalized completions that drifted are left out.

    M_i  = 0 if A_i < 0 and 1/|o_i| sum_t ln(pi_old(o_it) / pi(o_it)) > drift_max, else 1
    loss = -1/B sum_i M_i / |o_i| sum_t min(r_it A_i, clip(r_it, 1 - epsilon, 1 + epsilon_high) A_i)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/off_policy_mask.py:OffPolicyMask

TRL: --off_policy_mask_threshold 0.5. With vLLM pi_old is the sampler. The paper gives no value of drift_max.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    drift_max: float = field(default=0.5, metadata={"help": "Mean of ln pi_old - ln pi, in nats, above which M_i = 0."})


class OffPolicyMask(GRPOTrainer):
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
        sampled = inputs.get("sampling_per_token_logps", old_logps)
        drift = ((sampled - logps.detach()) * mask).sum(1) / mask.sum(1).clamp(min=1)  # (b,)
        keep = (inputs["advantages"] >= 0) | (drift <= self.settings.drift_max)  # M_i
        per_token = torch.min(ratio * advantages, clipped * advantages) * keep[:, None]
        loss = -(per_token * weights).sum(1).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
