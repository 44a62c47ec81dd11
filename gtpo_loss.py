"""The GTPO objective (arXiv 2508.03772v5) as pure tensor functions: no trainer, no tokenizer, no I/O.

Shapes: B = P * G rows (P prompts, G completions each, the rows of a group adjacent), T completion tokens
(right-padded). Log-probabilities and entropies are in nats. Results are float32 (float64 for float64 inputs).

    mask = conflict_mask(completion_ids, completion_mask, advantages, group_size)  # M, Section 5.1
    weights = conflict_weights(mask, advantages)  # lambda, Eq. 9
    entropy = completion_entropy(token_entropy, completion_mask)  # <H>_i, Section 4.2
    keep = entropy_filter(entropy, advantages, initial_entropy)  # delta, Eq. 10
    loss, metrics = gtpo_loss(per_token_logps, entropy, completion_mask, advantages, weights, keep)  # Eq. 11

How the tokens of a step are weighted is TRL's ``loss_type``, for ``gtpo_loss`` and ``grpo_loss`` alike; w_i is the
weight of a token of completion i, and the default is the paper's (``docs/method.md`` derives the others from Eq. 11):

    grpo       w_i = 1 / (B |o_i|)     mean over a completion's tokens, then over the rows [Eq. 2, 11]
    dr_grpo    w_i = 1 / (B T_max)     T_max the maximum completion length, a constant [arXiv 2503.20783]
    dapo       w_i = 1 / sum_i |o_i|   all tokens of the step alike [arXiv 2503.14476, Eq. 8]
    bnpo       the same over the tokens of one micro-batch, so it depends on its size [TRL]

``gtpo.forward.head`` computes ``per_token_logps`` and ``token_entropy`` without the (B, T, V) logits.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

LN2, EPS = math.log(2.0), torch.finfo(torch.float32).eps
FILTER_MODES = ("auto", "on", "off", "negative_only")
CONFLICT_SPANS = ("anchored", "first_run", "common")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo")
BLOCK = 128  # places of a group that are compared at once: the memory for it is P * G * G * BLOCK bytes


def conflict_mask(
    completion_ids: Tensor, completion_mask: Tensor, advantages: Tensor, group_size: int, span: str = "anchored"
) -> Tensor:
    """The conflict mask M_fw OR M_bw of Section 5.1, bool (B, T); arguments and errors: see :func:`conflict_spans`."""
    forward, backward = conflict_spans(completion_ids, completion_mask, advantages, group_size, span)
    return forward | backward


def conflict_spans(
    completion_ids: Tensor, completion_mask: Tensor, advantages: Tensor, group_size: int, span: str = "anchored"
) -> tuple[Tensor, Tensor]:
    """The opening and closing conflict spans M_fw and M_bw of Section 5.1.

    A token is a conflict token at position p if completions with A > 0 and with A < 0 of one group both have it there.
    The forward span is the run of conflict tokens that starts at the first token; the backward span is the same with
    positions counted from the last token. A row with A = 0 causes no conflict, and where it is marked its weight is 1.

    Args:
        completion_ids: Token ids. Shape (B, T).
        completion_mask: 1 on tokens the policy generated, EOS included; 0 on padding. Shape (B, T).
        advantages: A_i. Shape (B,).
        group_size: G; rows k*G to (k+1)*G-1 are one group.
        span: Which run of conflict tokens counts, where the paper is ambiguous: "anchored", the run that starts at the
            first (last) token; "first_run", the first run from the left (right), wherever it starts; "common", the
            longest prefix (suffix) that all completions with A != 0 share.

    Returns:
        Forward and backward span. Bool, shape (B, T) each.

    Raises:
        ValueError: If the shapes disagree, B is not a multiple of G, or ``span`` is unknown.
    """
    if span not in CONFLICT_SPANS:
        raise ValueError(f"conflict span {span!r} is unknown: pick one of {', '.join(CONFLICT_SPANS)}.")
    _check_rows("conflict_mask", completion_mask, {"advantages": advantages}, completion_ids=completion_ids)
    if group_size < 1 or len(completion_ids) % group_size:
        raise ValueError(f"{len(completion_ids)} completions do not divide into groups of {group_size}.")
    by_group = advantages.view(-1, group_size)
    forward, backward = (
        _run(grouped_tokens(completion_ids, places, group_size), by_group, span).gather(1, places)
        for places in token_places(completion_mask.bool())
    )
    return forward, backward


def plain_opening_spans(group: list[list[int]], advantages: list[float]) -> list[list[bool]]:
    """M_fw of one group as in Section 5.1, M_bw with reversed rows: :func:`conflict_spans` for readers and tests."""
    spans = []
    for row in group:
        is_conflict = []
        for place, token in enumerate(row):
            rivals = [a for other, a in zip(group, advantages, strict=True) if other[place : place + 1] == [token]]
            is_conflict.append(max(rivals) > 0 > min(rivals))
        spans.append([all(is_conflict[: place + 1]) for place in range(len(row))])
    return spans


def rewards_at_mean(rewards: Tensor, group_size: int) -> Tensor:
    """Whether R_i is the mean of its group, but for rounding, so that A_i is 0. NaN: no reward. (B,) -> bool (B,)"""
    groups = rewards.float().view(-1, group_size)
    above = groups - groups.nan_to_num(nan=math.inf).amin(1, keepdim=True)  # exact where an offset is large
    spread, size = (part.nan_to_num().abs().amax(1, keepdim=True) for part in (above, groups))
    bound = torch.where(spread <= 2 * EPS * size, spread, (8 * EPS * size).minimum(spread / 100))
    return ((above - above.nanmean(1, keepdim=True)).abs() <= bound).flatten()


def token_places(valid: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each token in its row, counted from the first and from the last one; T on padding. (B, T) each"""
    count, width = valid.cumsum(1), valid.shape[1]
    return torch.where(valid, count - 1, width), torch.where(valid, count[:, -1:] - count, width)


def grouped_tokens(ids: Tensor, places: Tensor, group_size: int) -> Tensor:
    """The ids by group and place, (P, G, T); padding is negative and only equals padding of its own row."""
    padding = (-1 - torch.arange(len(ids), device=ids.device) % group_size)[:, None].repeat(1, ids.shape[1] + 1)
    return padding.scatter(1, places, ids.long())[:, :-1].unflatten(0, (-1, group_size))  # without column T


def _run(tokens: Tensor, advantages: Tensor, span: str) -> Tensor:
    """The run of conflict tokens by place. Shapes (P, G, T), (P, G) -> bool (B, T + 1), False in the last column."""
    still_running = torch.ones_like(advantages, dtype=torch.bool).view(-1, 1)  # (B, 1)
    not_started = torch.full_like(still_running, span == "first_run")  # which may start anywhere
    runs = []
    for block in tokens.split(BLOCK, dim=2):
        conflict = _conflicts(block, advantages, span).flatten(0, 1)  # (B, C)
        not_started = not_started[:, -1:] & ~conflict.cummax(1).values
        run = (still_running & (conflict | not_started)).cummin(1).values
        runs.append(run & conflict)
        still_running = run[:, -1:]
        if not still_running.any():
            break
    found = torch.cat(runs, 1)
    return pad(found, (0, 1 + tokens.shape[2] - found.shape[1]))


def _conflicts(tokens: Tensor, advantages: Tensor, span: str) -> Tensor:
    """Whether rows of both signs have the token at its place, for "common" all with a sign. Bool, (P, G, C)."""
    same = tokens[:, :, None] == tokens[:, None]  # (P, G, G, C): row i has the token of row j
    positive, negative = (advantages > 0)[:, None, :, None], (advantages < 0)[:, None, :, None]
    conflict = (same & positive).any(2) & (same & negative).any(2)  # Section 5.1
    if span == "common":
        conflict &= (same | ~(positive | negative)).all(2)
    return conflict


def tag_mask(pieces: Sequence[Sequence[str | None]], tags: Sequence[str], width: int) -> Tensor:
    """The tokens that touch a tag, bool (B, T = width). ``pieces``: of each row its tokens as text, without padding."""
    found = torch.zeros(len(pieces), width, dtype=torch.bool)
    pattern = "|".join(map(re.escape, tags))
    for row, tokens in zip(found, pieces, strict=True):
        texts = [piece or "" for piece in tokens]  # None: an id that the tokenizer does not have
        ends = [*accumulate(map(len, texts))]
        for tag in re.finditer(pattern, "".join(texts)):
            row[bisect_right(ends, tag.start()) : bisect_left(ends, tag.end()) + 1] = True
    return found


def conflict_weights(mask: Tensor, advantages: Tensor, positive_weight: float = 2.0) -> Tensor:
    """lambda of Eq. 9: 1 off the mask; on it 0 where A_i < 0, 2 where A_i > 0 and 1 where A_i = 0.

    Args:
        mask: Conflict mask M. Bool, shape (B, T).
        advantages: A_i. Shape (B,).
        positive_weight: The 2 of Eq. 9.

    Returns:
        Shape (B, T), in the dtype of the advantages.
    """
    _check_rows("conflict_weights", mask, {"advantages": advantages})
    on_mask = torch.where(advantages > 0, positive_weight, torch.where(advantages < 0, 0.0, 1.0)).to(advantages.dtype)
    return torch.where(mask, on_mask[:, None], torch.ones_like(on_mask)[:, None])


def completion_entropy(token_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    """Mean token entropy of each completion, <H>_i of Section 4.2, in nats.

        <H>_i = 1/|o_i| * sum_t H_it,    H_it = -sum_v pi(v | s_it) ln pi(v | s_it)

    It weights the gradient and has none itself (Eq. 28, 30): the result is detached.

    Args:
        token_entropy: H_it. Shape (B, T); values on padding are ignored.
        completion_mask: 1 on the completion's tokens. Shape (B, T).

    Returns:
        Shape (B,). A completion without tokens gets 0.

    Raises:
        ValueError: If the shapes disagree.
    """
    _check_rows("completion_entropy", completion_mask, {}, token_entropy=token_entropy)
    return _completion_mean(_promote(token_entropy.detach()), completion_mask)


def filter_is_on(initial_entropy: float | None, mode: str = "auto") -> bool:
    """Whether the filter of Eq. 10 can drop a completion; arguments as for :func:`entropy_filter`.

    Raises:
        ValueError: If the mode is unknown, or is "auto" without ``initial_entropy``.
    """
    if mode not in FILTER_MODES:
        raise ValueError(f"entropy filter mode {mode!r} is unknown: pick one of {', '.join(FILTER_MODES)}.")
    if mode != "auto":
        return mode != "off"
    if initial_entropy is None:
        raise ValueError("entropy filter mode 'auto' needs initial_entropy, <H>_ini in nats.")
    return initial_entropy < LN2


def entropy_filter(
    entropy: Tensor,
    advantages: Tensor,
    initial_entropy: float | None,
    threshold: float = LN2,
    mode: str = "auto",
) -> Tensor:
    """delta of Eq. 10: 0 for a completion that is filtered out, 1 for one that is kept.

    Args:
        entropy: <H>_i in nats. Shape (B,). A value equal to the threshold is kept.
        advantages: A_i. Shape (B,).
        initial_entropy: <H>_ini in nats, of the policy before training; used by mode "auto" only.
        threshold: Completions above it are filtered, in nats.
        mode: "auto" filters if <H>_ini < ln 2 (the paper), "on" always, "off" never, "negative_only" always, but only
            completions with A < 0 (Fig. 4c).

    Returns:
        Shape (B,), 0.0 or 1.0 in the dtype of ``entropy``.

    Raises:
        ValueError: If the mode is unknown, is "auto" without ``initial_entropy``, or the shapes disagree.
    """
    is_on = filter_is_on(initial_entropy, mode)
    if entropy.shape != advantages.shape:
        shapes = f"{tuple(entropy.shape)} and {tuple(advantages.shape)}"
        raise ValueError(f"entropy_filter: expected entropy and advantages of one shape (B,), got {shapes}.")
    dropped = entropy > threshold
    if not is_on:
        dropped = torch.zeros_like(dropped)
    elif mode == "negative_only":
        dropped = dropped & (advantages < 0)
    return (~dropped).to(entropy.dtype)


def gtpo_loss(
    per_token_logps: Tensor,
    entropy: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    weights: Tensor,
    keep: Tensor,
    *,
    gamma: float | Tensor = 0.1,
    loss_type: str = "grpo",
    normalizer: Tensor | float | None = None,
    old_per_token_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GTPO loss, -J of Eq. 11, averaged over the rows.

        J = 1/G * sum_i delta_i (A_i - gamma <H>_i) / |o_i| * sum_t r_it lambda_it

    Without delta and gamma (Eq. 8) it is no policy gradient either: it is GRPO's J, unclipped, plus 1/G sum_i |A_i| /
    |o_i| times the sum of r_it over the conflict tokens, supervised training on the policy's own shared tokens.

    Another ``loss_type`` has the same delta, gamma and lambda, and its w_i instead of 1 / (G |o_i|).

    Args:
        per_token_logps: ln pi(o_it), with gradient. Shape (B, T).
        entropy: <H>_i of :func:`completion_entropy` in nats; no gradient flows into it. Shape (B,).
        completion_mask: 1 on the completion's tokens. Shape (B, T).
        advantages: A_i. Shape (B,).
        weights: lambda_it of :func:`conflict_weights`; ones disable the conflict correction. Shape (B, T).
        keep: delta_i of :func:`entropy_filter`; ones disable the filter. Shape (B,).
        gamma: Weight of the entropy penalty, or one per row, shape (B,); 0 disables it.
        loss_type: grpo (Eq. 11), dr_grpo, dapo or bnpo.
        normalizer: The count that the last three divide by: B T_max, or tokens. A caller that averages the losses of
            micro-batches and processes divides the count of the whole step by their number.
        old_per_token_logps: ln pi_old(o_it); None on the first iteration, where r_it = 1 with gradient. Shape (B, T).
        importance_weights: pi_old / pi_sampler as TRL computes it; None does not correct. Shape (B, T) or (B, 1).

    Returns:
        The loss, and detached 0-d tensors: ``entropy`` (mean <H>_i, nats), ``filtered_fraction`` (rows with delta = 0).

    Raises:
        ValueError: If the shapes disagree, ``loss_type`` is unknown, or it has no ``normalizer``.
    """
    _check_rows(
        "gtpo_loss",
        completion_mask,
        {"advantages": advantages, "entropy": entropy, "keep": keep},
        per_token_logps=per_token_logps,
        weights=weights,
        old_per_token_logps=old_per_token_logps,
    )
    entropy, keep = _promote(entropy.detach()), _promote(keep)  # (B,)
    ratio = _ratio(per_token_logps, old_per_token_logps, completion_mask)  # (B, T)
    per_token = _corrected(ratio * _promote(weights), importance_weights)  # (B, T)
    strength = keep * (_promote(advantages) - gamma * entropy)  # (B,)
    objective = _aggregate(per_token, completion_mask, loss_type, normalizer, strength)
    return -objective, {"entropy": entropy.mean(), "filtered_fraction": (keep == 0).to(entropy.dtype).mean()}


def grpo_loss(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    loss_type: str = "grpo",
    normalizer: Tensor | float | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss, -J of Eq. 1 and 2, averaged over the rows, or aggregated as Dr. GRPO, DAPO and BNPO do.

    The KL term is the estimator of GRPO's paper (arXiv 2402.03300, Eq. 4): exp(d) - d - 1 with d = ln pi_ref - ln pi.

    Args:
        per_token_logps, completion_mask, advantages: As for :func:`gtpo_loss`.
        epsilon_low, epsilon_high: The ratio is clipped to 1 - epsilon_low and 1 + epsilon_high; DAPO has 0.28.
        beta: Weight of the KL term; 0 needs no reference.
        loss_type, normalizer: As for :func:`gtpo_loss`.
        ref_per_token_logps: ln pi_ref(o_it). Shape (B, T).
        old_per_token_logps, importance_weights: As for :func:`gtpo_loss`; the KL term is not corrected.

    Returns:
        The loss, and detached 0-d tensors: ``kl`` (nats, mean over all tokens) where beta != 0.

    Raises:
        ValueError: As for :func:`gtpo_loss`, or if beta != 0 without ``ref_per_token_logps``.
    """
    _check_rows(
        "grpo_loss",
        completion_mask,
        {"advantages": advantages},
        per_token_logps=per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        old_per_token_logps=old_per_token_logps,
    )
    valid = completion_mask.bool()
    ratio = _ratio(per_token_logps, old_per_token_logps, completion_mask)  # (B, T)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    signed = _promote(advantages)[:, None]
    per_token = _corrected(torch.min(ratio * signed, clipped * signed), importance_weights)  # (B, T)
    metrics = {}
    if beta != 0.0:
        if ref_per_token_logps is None:
            raise ValueError(f"beta = {beta} needs ref_per_token_logps, the log-probabilities of the reference policy.")
        log_ratio = (_promote(ref_per_token_logps) - _promote(per_token_logps)).masked_fill(~valid, 0.0)
        kl = log_ratio.exp() - log_ratio - 1  # (B, T), 0 on padding
        per_token = per_token - beta * kl
        metrics["kl"] = kl.detach().sum() / valid.sum().clamp(min=1)
    return -_aggregate(per_token, completion_mask, loss_type, normalizer), metrics


def _aggregate(
    per_token: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    normalizer: Tensor | float | None,
    strength: Tensor | float = 1.0,
) -> Tensor:
    """sum_i w_i strength_i sum_t per_token_it, with the w_i of ``loss_type``. Shapes (B, T), (B, T), (B,) -> ()."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is unknown: pick one of {', '.join(LOSS_TYPES)}.")
    if loss_type == "grpo":
        return (strength * _completion_mean(per_token, completion_mask)).mean()
    if normalizer is None:
        raise ValueError(f"loss_type {loss_type!r} divides by a count of the whole step: pass normalizer.")
    return (strength * per_token.masked_fill(~completion_mask.bool(), 0.0).sum(-1)).sum() / normalizer


def _corrected(per_token: Tensor, importance_weights: Tensor | None) -> Tensor:
    """Times the importance weights. Shape (B, T)."""
    if importance_weights is None:
        return per_token
    if importance_weights.shape not in (per_token.shape, (len(per_token), 1)):
        shape, expected = tuple(importance_weights.shape), tuple(per_token.shape)
        raise ValueError(f"importance_weights has shape {shape}: expected (B, T) = {expected} or (B, 1).")
    return per_token * _promote(importance_weights)


def _ratio(logps: Tensor, old_logps: Tensor | None, completion_mask: Tensor) -> Tensor:
    """r_it = pi / pi_old, with gradient; 1 without gradient on padding. Shape (B, T)."""
    logps, old_logps = _promote(logps), _promote(logps.detach() if old_logps is None else old_logps)
    return (logps - old_logps).masked_fill(~completion_mask.bool(), 0.0).exp()


def _completion_mean(per_token: Tensor, completion_mask: Tensor) -> Tensor:
    """1/|o_i| * sum_t over the completion's tokens. Shape (B, T) -> (B,); a completion without tokens gets 0."""
    valid = completion_mask.bool()
    return per_token.masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


def _promote(tensor: Tensor) -> Tensor:
    """float32 for half precision, whose sums have errors of 1e-2; float32 and float64 unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _check_rows(name: str, mask: Tensor, per_row: dict[str, Tensor], **per_token: Tensor | None) -> None:
    """Raise ValueError unless ``mask`` is (B, T), every ``per_row`` tensor (B,) and every ``per_token`` one (B, T)."""
    for key, tensor in per_token.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name}: {key} has shape {tuple(tensor.shape)}, the mask (B, T) = {tuple(mask.shape)}.")
    for key, tensor in per_row.items():
        if mask.dim() != 2 or tensor.shape != mask.shape[:1]:
            shapes = f"{tuple(mask.shape)} and {tuple(tensor.shape)}"
            raise ValueError(f"{name}: expected a mask (B, T) and {key} (B,), got {shapes}.")
