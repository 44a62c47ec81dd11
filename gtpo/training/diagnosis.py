"""What a group says about its tokens: conflicts, the push of the objective on them, and what clipping cuts."""

import math

import torch
from torch import Tensor

from gtpo.training.batch import Metrics, Numbers, Pair, Rollouts, Spans
from gtpo_loss import conflict_weights, token_places


def conflict_counts(whole: Rollouts) -> Numbers:
    """Conflict tokens per completion and their share."""
    forward, backward = whole.spans
    conflicts = (forward | backward).sum()
    tokens = whole.valid.sum().clamp(min=1)
    return {
        "conflict_tokens": (conflicts / len(whole.ids)).item(),
        "conflict_fraction": (conflicts / tokens).item(),
    }


def push_metrics(whole: Rollouts, weights_of_rows: Tensor, positive_weight: float = 2.0) -> Numbers:
    """The push on conflict tokens by name; a span without one has none.

    ``weights_of_rows``: w_i, shape (B,). With A_i > 0 lambda is ``positive_weight``.
    """
    forward, backward = whole.spans
    advantages = whole.advantages
    strength = (advantages * weights_of_rows).float()
    weights = conflict_weights(forward | backward, advantages.float(), positive_weight)
    pushes = conflict_push(whole.ids, whole.valid, whole.spans, strength, weights, whole.group_size)
    found: Numbers = {}
    by_span = torch.stack(pushes, 1).tolist()  # one transfer to the host
    for span, (push, corrected) in zip(("", "_opening", "_closing"), by_span, strict=True):
        if not math.isnan(push):
            found[f"conflict_push{span}"] = push
            found[f"conflict_push_corrected{span}"] = corrected
    return found


def weights_of_rows(completion_mask: Tensor, normalizer: Tensor | float | None) -> Tensor:
    """1 / ``normalizer`` for each of B rows, without one 1 / (B |o_i|); 0 for a row without tokens. Shape (B,)."""
    lengths = completion_mask.bool().sum(-1).float()  # |o_i|
    if normalizer is None:
        normalizer = len(lengths) * lengths
    return (lengths > 0) / torch.as_tensor(normalizer, device=lengths.device).clamp(min=1)


def clip_ratios(
    ratio: Tensor, completion_mask: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Metrics:
    """Shares of tokens that GRPO's clipping cuts, as TRL's ``clip_ratio/*``. 0-d tensors.

    ``ratio``: r_it, shape (B, T); ``advantages``: A_i, shape (B,). ``low_min`` and ``high_max`` are over completions.
    """
    valid = completion_mask.bool()
    advantages = advantages[:, None]
    low = (ratio < 1 - epsilon_low) & (advantages < 0) & valid  # (B, T)
    high = (ratio > 1 + epsilon_high) & (advantages > 0) & valid
    lengths = valid.sum(1)
    tokens = valid.sum().clamp(min=1)
    return {
        "clip_ratio/low_mean": low.sum() / tokens,
        "clip_ratio/high_mean": high.sum() / tokens,
        "clip_ratio/region_mean": (low | high).sum() / tokens,
        "clip_ratio/low_min": (low.sum(1) / lengths).nan_to_num(nan=1.0).amin(),  # NaN without tokens
        "clip_ratio/high_max": (high.sum(1) / lengths).nan_to_num(nan=0.0).amax(),
    }


def conflict_push(
    completion_ids: Tensor,
    completion_mask: Tensor,
    spans: Spans,
    strength: Tensor,
    weights: Tensor,
    group_size: int,
) -> Pair:
    """The net weight with which a group pushes its conflict tokens, before and after lambda.

        push = sum_i w_i A_i,    corrected = sum_i w_i lambda_ip A_i,    over the i that have token v at position p

    Positive raises the probability of a token that G+ and G- share, negative lowers it, and 0 is a conflict that
    cancels. A token (p, v) of a span counts once, however many completions have it; positions are counted from the
    first token in the forward span, from the last one in the backward span. Without delta and gamma.

    Args:
        completion_ids, completion_mask, group_size: As for :func:`gtpo_loss.conflict_spans`. Shape (B, T).
        spans: M_fw and M_bw. Bool, shape (B, T) each.
        strength: w_i A_i, with w_i as :func:`weights_of_rows` has it. Shape (B,).
        weights: lambda_it of :func:`conflict_weights`. Shape (B, T).

    Returns:
        push and corrected: means over the conflict tokens of all groups, over those of the forward spans, and over
        those of the backward spans; NaN where there are none. Shape (3,) each.
    """
    valid = completion_mask.bool()
    rows, width = valid.shape
    groups = torch.arange(rows, device=valid.device)[:, None] // group_size  # (B, 1)
    before = strength[:, None].expand_as(weights)
    after = strength[:, None] * weights
    tokens_at_all = completion_ids.max() + 1
    totals = []
    counts = []
    for span, places in zip(spans, token_places(valid), strict=True):
        slots = groups * (width + 1) + places
        tokens = slots * tokens_at_all + completion_ids  # equal for the same token, place and group
        distinct, which = tokens.unique(return_inverse=True)
        values = torch.stack([before, after, span.to(before.dtype)])
        values = (values * valid).flatten(1)  # (3, B T)
        sums = values.new_zeros(3, len(distinct))
        sums.index_add_(1, which.flatten(), values)
        is_conflict = sums[2] > 0
        totals.append((sums[:2] * is_conflict).sum(1))
        counts.append(is_conflict.sum())
    total = torch.stack([sum(totals), *totals], 1)
    push, corrected = total / torch.stack([sum(counts), *counts])
    return push, corrected
