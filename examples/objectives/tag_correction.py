"""GTPO's correction on the tokens of the tags alone; other conflict tokens keep the update of GRPO.

    python train_grpo.py --model tiny --dataset arithmetic --G 8 \\
        --objective examples/objectives/tag_correction.py:TagCorrection

J = J of GRPO + 1/G Σ_i |A_i| / |o_i| Σ over the conflict tokens of the tags of r_it

Eq. 8 and 9 of GTPO (arXiv 2508.03772) with M AND tags instead of M; no clipping. What completions share may be a tag,
which is right for all of them, or a choice, which is not.
"""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gtpo import GRPOTrainer, Measured
from gtpo_loss import completion_entropy, conflict_weights, gtpo_loss


@dataclass
class Settings:
    corrected_tags: str = field(
        default="<reasoning> </reasoning> <answer> </answer>", metadata={"help": "Tags that the correction acts on."}
    )


class TagCorrection(GRPOTrainer):
    Settings = Settings

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Measured]:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        tags = self.in_tags(inputs["completion_ids"], mask)
        weights = conflict_weights(inputs["conflict_mask"] & tags, advantages)
        entropy = completion_entropy(token_entropy, mask)  # measured alone
        keep = torch.ones_like(entropy)
        old = inputs.get("old_per_token_logps")
        loss, metrics = gtpo_loss(logps, entropy, mask, advantages, weights, keep, gamma=0.0, old_per_token_logps=old)
        return loss, Measured(entropy, weights, metrics=metrics)

    def in_tags(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The tokens that touch an occurrence of a tag. (b, T) -> bool (b, T)"""
        tags = re.compile("|".join(map(re.escape, self.settings.corrected_tags.split())))
        found = torch.zeros_like(mask, dtype=torch.bool)
        for row, (tokens, length) in enumerate(zip(ids.tolist(), mask.sum(1).tolist(), strict=True)):
            pieces = [piece or "" for piece in self.processing_class.convert_ids_to_tokens(tokens[:length])]
            ends = [*accumulate(map(len, pieces))]
            for tag in tags.finditer("".join(pieces)):
                found[row, bisect_right(ends, tag.start()) : bisect_left(ends, tag.end()) + 1] = True
        return found
