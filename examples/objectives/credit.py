"""GTPO's correction on shared tokens by credit: where the completions that hold a token do not lose on average.

    python train_grpo.py --model tiny --dataset arithmetic --G 8 --objective examples/objectives/credit.py:Credit

J = J of GRPO + 1/G Σ_i |A_i| / |o_i| Σ over the credited conflict tokens of r_it

Eq. 8 and 9 of GTPO (arXiv 2508.03772) on the tokens of M whose holders, the completions of the group that have it at
that place, have a mean A_i of at least 0; no clipping. The planned comparison results/holders does not recommend it: it
gains a quarter of the formatting that the correction on tags gains, and keeps most of the price in solved problems.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gtpo import GRPOTrainer, Measured
from gtpo.training.batch import gather_rollouts
from gtpo_loss import completion_entropy, conflict_spans, conflict_weights, grouped_tokens, gtpo_loss, token_places


class Credit(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch with the credited conflict mask of whole groups, (b, T)."""
        batch = super()._generate_and_score_completions(inputs)
        size = self.num_generations if self.model.training else self.num_generations_eval
        whole = gather_rollouts(self, batch, self.accelerator.gather(batch["advantages"]), size)
        mask = credited_mask(whole.ids, whole.valid, whole.advantages, size)
        batch["conflict_mask"] = mask[batch["row"], : batch["completion_ids"].shape[1]]
        return batch

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Measured]:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        weights = conflict_weights(inputs["conflict_mask"], advantages)
        entropy = completion_entropy(token_entropy, mask)  # measured alone
        keep = torch.ones_like(entropy)
        old = inputs.get("old_per_token_logps")
        loss, metrics = gtpo_loss(logps, entropy, mask, advantages, weights, keep, gamma=0.0, old_per_token_logps=old)
        return loss, Measured(entropy, weights, metrics=metrics)


def credited_mask(ids: Tensor, valid: Tensor, advantages: Tensor, group_size: int) -> Tensor:
    """The tokens of either span whose holders have a mean A_i of at least 0. (B, T), (B, T), (B,) -> bool (B, T)"""
    credited = torch.zeros_like(valid, dtype=torch.bool)
    spans = conflict_spans(ids, valid, advantages, group_size)
    for span, places in zip(spans, token_places(valid.bool()), strict=True):
        tokens = grouped_tokens(ids, places, group_size)  # (P, G, T)
        same = tokens[:, :, None] == tokens[:, None]  # (P, G, G, T): row i has the token of row j
        held = advantages.view(-1, 1, group_size, 1) * same
        gains = held.sum(2) >= -1e-5 * held.abs().sum(2)  # a sum of 0, but for rounding
        credited |= span & pad(gains.flatten(0, 1), (0, 1)).gather(1, places)  # padding has place T
    return credited
