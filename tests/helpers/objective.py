"""The functions of gtpo_loss.py composed as in the trainer: from token entropies to the loss."""

from typing import Any

from torch import Tensor

from gtpo_loss import LN2, completion_entropy, entropy_filter, gtpo_loss


def composed_gtpo_loss(
    per_token_logps: Tensor,
    token_entropy: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    initial_entropy: float | None,
    gamma: float = 0.1,
    threshold: float = LN2,
    filter_mode: str = "auto",
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    entropy = completion_entropy(token_entropy, completion_mask)
    keep = entropy_filter(entropy, advantages, initial_entropy, threshold, filter_mode)
    return gtpo_loss(per_token_logps, entropy, completion_mask, advantages, weights, keep, gamma=gamma, **options)
