"""Naive references: the paper's formulas, one token at a time, slow and obvious on purpose.

Nothing here imports gtpo_loss.py or shares code with it. Two kinds of function:

* naive: Python lists and floats, loops over tokens, gradients written out by hand. A completion is a list without
  padding, so padding has no effect.
* plain: the textbook formula in a few lines of torch, in the dtype of its inputs. In float64 it is the
  reference for larger shapes (autograd gives its gradient); in float32 and bfloat16 its error bounds the error of ours.

Equation numbers are those of arXiv 2508.03772v5.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LN2 = math.log(2.0)

Rows = list[list[float]]


def unpad(values: Tensor, completion_mask: Tensor) -> list[list]:
    """The tokens of each completion as a list, without padding."""
    return [
        [value for value, kept in zip(row, row_mask, strict=True) if kept]
        for row, row_mask in zip(values.tolist(), completion_mask.tolist(), strict=True)
    ]


def pad(rows: Sequence[Sequence], width: int, fill: float, dtype: torch.dtype) -> Tensor:
    """Rows of unequal length as one right-padded (B, width) tensor."""
    padded = [list(row) + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)


def length_mask(lengths: Sequence[int], width: int) -> Tensor:
    """1 on the first ``length`` positions of each row, 0 after. Shape (B, width), int64."""
    return pad([[1] * length for length in lengths], width, 0, torch.int64)


# --- section 5.1: conflict tokens and their weights ------------------------------------------------------------------


def naive_forward_spans(group: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    """M_fw of one group, row by row, for each reading of "the first contiguous span".

    anchored: the conflict tokens from the first token on, without a gap.
    first_run: skip to the first conflict token, mark it and those that follow without a gap.
    common: the conflict tokens of the prefix that all completions with A != 0 share.
    credited: of the anchored ones, those whose holders (rows with the same token there) have a mean A >= 0.
    """
    signed = [(row, score) for row, score in zip(group, advantages, strict=True) if score != 0]
    masks = []
    for row in group:
        conflict = []
        shared = []
        for position, token in enumerate(row):
            signs = [score > 0 for other, score in signed if other[position : position + 1] == [token]]
            conflict.append(True in signs and False in signs)
            shared.append(len(signs) == len(signed))
        mask = [False] * len(row)
        position = 0
        if span == "first_run":
            while position < len(row) and not conflict[position]:
                position += 1
        while position < len(row) and conflict[position] and (span != "common" or shared[position]):
            mask[position] = True
            position += 1
        if span == "credited":
            for position, token in enumerate(row):
                rows = zip(group, advantages, strict=True)
                held = [score for other, score in rows if other[position : position + 1] == [token]]
                mask[position] = mask[position] and round(math.fsum(held), 6) >= 0
        masks.append(mask)
    return masks


def naive_backward_spans(group: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    """M_bw of one group: the forward spans of the reversed completions, reversed."""
    masks = naive_forward_spans([row[::-1] for row in group], advantages, span)
    return [mask[::-1] for mask in masks]


def naive_conflict_mask(
    completions: list[list[int]], advantages: list[float], group_size: int, span: str = "anchored"
) -> list[list[bool]]:
    """M = forward OR backward (5.1), row by row, for consecutive groups."""
    masks = []
    for start in range(0, len(completions), group_size):
        group = completions[start : start + group_size]
        scores = advantages[start : start + group_size]
        forward = naive_forward_spans(group, scores, span)
        backward = naive_backward_spans(group, scores, span)
        for left, right in zip(forward, backward, strict=True):
            masks.append([a or b for a, b in zip(left, right, strict=True)])
    return masks


def naive_conflict_weights(masks: list[list[bool]], advantages: list[float], positive_weight: float = 2.0) -> Rows:
    """Lambda of Eq. 9; a completion with A = 0 is in neither set and has weight 1 everywhere."""
    weights = []
    for mask, advantage in zip(masks, advantages, strict=True):
        row = []
        for masked in mask:
            if masked and advantage > 0:
                row.append(positive_weight)
            elif masked and advantage < 0:
                row.append(0.0)
            else:
                row.append(1.0)
        weights.append(row)
    return weights


# --- sections 4.2 and 5.2: entropy and the filter --------------------------------------------------------------------


def naive_completion_entropy(token_entropy: Rows) -> list[float]:
    """<H>_i: the mean over the completion's tokens; a completion without tokens has 0."""
    return [math.fsum(row) / len(row) if row else 0.0 for row in token_entropy]


def naive_entropy_filter(
    entropy: list[float], advantages: list[float], initial_entropy: float | None, threshold: float, mode: str
) -> list[float]:
    """Delta of Eq. 10 and of the ablations, one condition per branch."""
    delta = []
    for h, advantage in zip(entropy, advantages, strict=True):
        dropped = False
        if (
            mode == "auto" and initial_entropy is not None and initial_entropy < LN2 and h > threshold
        ):  # the model is prone to collapse
            dropped = True
        if mode == "on" and h > threshold:
            dropped = True
        if mode == "negative_only" and advantage < 0 and h > threshold:
            dropped = True
        delta.append(0.0 if dropped else 1.0)
    return delta


# --- the objectives --------------------------------------------------------------------------------------------------


def naive_token_weights(lengths: list[int], loss_type: str, longest: int) -> list[float]:
    """w_i of each row by the definitions of the papers; ``longest`` is T_max of Dr. GRPO."""
    if loss_type == "grpo":
        return [1 / len(lengths) / max(1, length) for length in lengths]
    tokens = longest * len(lengths) if loss_type == "dr_grpo" else sum(lengths)
    return [1 / tokens] * len(lengths)


def naive_gtpo_loss(
    logps: Rows,
    advantages: list[float],
    *,
    weights: Rows | None = None,
    token_entropy: Rows | None = None,
    gamma: float | None = None,
    delta: list[float] | None = None,
    old_logps: Rows | None = None,
    token_weights: list[float] | None = None,
    importance: Rows | None = None,
) -> tuple[float, Rows]:
    """-J of Eq. 11 and its gradient with respect to every log-probability.

    Omitting an argument removes its term: ``weights`` the conflict correction, ``gamma`` the entropy term,
    ``delta`` the filter, ``old_logps`` the ratio (then r = 1, and d r / d logp = 1), ``importance`` the correction of
    the sampler. ``token_weights`` is w_i, by default 1/|o_i| over the number of rows.
    """
    batch = len(logps)
    terms = []
    gradients = []
    for i, row in enumerate(logps):
        strength = advantages[i]
        if gamma is not None and token_entropy is not None:
            strength = strength - gamma * naive_completion_entropy([token_entropy[i]])[0]
        if delta is not None:
            strength = strength * delta[i]
        gradient = []
        for t, logp in enumerate(row):
            ratio = math.exp(logp - old_logps[i][t]) if old_logps is not None else 1.0
            weight = weights[i][t] if weights is not None else 1.0
            weight *= importance[i][t] if importance is not None else 1.0
            term = -strength * ratio * weight / len(row) / batch
            if token_weights is not None:
                term = -strength * ratio * weight * token_weights[i]
            terms.append(term)
            gradient.append(term)  # d exp(x) / d x = exp(x): the gradient equals the term
        gradients.append(gradient)
    return math.fsum(terms), gradients


def naive_grpo_loss(
    logps: Rows,
    advantages: list[float],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    ref_logps: Rows | None = None,
    old_logps: Rows | None = None,
    token_weights: list[float] | None = None,
    importance: Rows | None = None,
) -> tuple[float, Rows, float]:
    """-J of Eq. 1 and 2, its gradient, and the KL as a mean over all tokens (k3: x - ln x - 1 with x = ref / pi).

    ``token_weights`` and ``importance`` as for :func:`naive_gtpo_loss`; the KL term is not corrected.
    """
    batch = len(logps)
    terms = []
    gradients = []
    kls = []
    for i, row in enumerate(logps):
        gradient = []
        for t, logp in enumerate(row):
            ratio = math.exp(logp - old_logps[i][t]) if old_logps is not None else 1.0
            unclipped = ratio * advantages[i]
            clipped = min(max(ratio, 1.0 - epsilon_low), 1.0 + epsilon_high) * advantages[i]
            term, slope = (-unclipped, -unclipped) if unclipped <= clipped else (-clipped, 0.0)
            if importance is not None:
                term = term * importance[i][t]
                slope = slope * importance[i][t]
            if beta != 0.0 and ref_logps is not None:
                gap = ref_logps[i][t] - logp
                kl = math.exp(gap) - gap - 1.0
                kls.append(kl)
                term += beta * kl
                slope += beta * (1.0 - math.exp(gap))
            token_weight = token_weights[i] if token_weights is not None else 1 / len(row) / batch
            terms.append(term * token_weight)
            gradient.append(slope * token_weight)
        gradients.append(gradient)
    return math.fsum(terms), gradients, math.fsum(kls) / max(len(kls), 1)


def plain_gtpo_loss(
    logps: Tensor,
    token_entropy: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    weights: Tensor,
    delta: Tensor,
    gamma: float,
    old_logps: Tensor | None = None,
) -> Tensor:
    """-J of Eq. 11 in a few lines, differentiable, every operation in the dtype of ``logps``."""
    mask = completion_mask.to(logps.dtype)
    lengths = mask.sum(-1).clamp(min=1)
    entropy = ((token_entropy * mask).sum(-1) / lengths).detach()
    ratio = torch.exp(logps - (logps.detach() if old_logps is None else old_logps))
    per_row = (ratio * weights.to(logps.dtype) * mask).sum(-1) / lengths
    return -(delta.to(logps.dtype) * (advantages.to(logps.dtype) - gamma * entropy) * per_row).mean()


# --- the head --------------------------------------------------------------------------------------------------------


def plain_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The logits path: all (N, V) logits, log-softmax, gather; every operation in the dtype of ``hidden``.

    As in Transformers: scale, then cap; the sampling temperature comes last.
    """
    logits = (hidden @ weight.T if bias is None else hidden @ weight.T + bias) * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logps = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, targets[:, None]).squeeze(-1), entropy.detach()
