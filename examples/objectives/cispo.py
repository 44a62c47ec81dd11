"""CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5): the ratio is a weight, clipped and without a gradient.

    loss = -1 / sum_i |o_i| sum_it stop_gradient(min(r_it, ratio_max)) A_i ln pi(o_it)

    python train_grpo.py --model tiny --dataset arithmetic --num_iterations 4 \\
        --objective examples/objectives/cispo.py:CISPO

TRL: --loss_type cispo --epsilon_high 5. No token loses its gradient. ratio_max is that of ScaleRL (arXiv 2510.13786).
"""

from dataclasses import dataclass, field

from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy


@dataclass
class Settings:
    ratio_max: float = field(default=5.0, metadata={"help": "Highest weight r_it of a token."})


class CISPO(GRPOTrainer):
    Settings = Settings
    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "loss_type": "grpo"}

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict) -> tuple[Tensor, Measured]:  # (b, T) each
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"][:, None]  # (b, 1)
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        ratio = ((logps - old_logps) * mask).exp()  # r_it, (b, T)
        clipped = ratio.detach().clamp(max=self.settings.ratio_max)
        per_token = clipped * advantages * logps * inputs.get("importance_sampling_ratio", 1.0)  # of vLLM
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.losses()  # of the step, for the mean of its losses
        loss = -(per_token * mask).sum() / tokens
        return loss, Measured(completion_entropy(token_entropy, mask))
