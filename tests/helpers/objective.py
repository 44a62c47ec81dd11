"""The functions of gtpo_loss.py composed as in the trainer: from token entropies to the loss."""

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
    old_per_token_logps: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    entropy = completion_entropy(token_entropy, completion_mask)
    keep = entropy_filter(entropy, advantages, initial_entropy, threshold, filter_mode)
    return gtpo_loss(
        per_token_logps,
        entropy,
        completion_mask,
        advantages,
        weights,
        keep,
        gamma=gamma,
        old_per_token_logps=old_per_token_logps,
    )
