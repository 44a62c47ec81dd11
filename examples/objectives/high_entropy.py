"""The 80/20 rule (arXiv 2506.01939): only the tokens of highest entropy are trained.

    H_min = the quantile 1 - entropy_share of the H_it of a micro-batch, in all processes
    loss  = -1/B sum_i 1/|o_i| sum_t [H_it >= H_min] min(r_it A_i, clip(r_it, 1 - epsilon, 1 + epsilon_high) A_i)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/high_entropy.py:HighEntropy

TRL: --top_entropy_quantile 0.2 --loss_type grpo. The paper has the token weights of DAPO; |o_i| counts all tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    entropy_share: float = field(default=0.2, metadata={"help": "Share of the tokens that are trained."})


class HighEntropy(GRPOTrainer):
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
        entropies = self.accelerator.pad_across_processes(token_entropy[mask.bool()], pad_index=float("nan"))
        lowest = self.accelerator.gather(entropies).nanquantile(1 - self.settings.entropy_share)  # H_min
        per_token = torch.min(ratio * advantages, clipped * advantages) * (token_entropy >= lowest)
        loss = -(per_token * weights).sum(1).mean()
        return loss, Measured(completion_entropy(token_entropy, mask))
