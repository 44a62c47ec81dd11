"""The GTPO objective (arXiv 2508.03772v5) as pure tensor functions: no trainer, no tokenizer, no I/O.

Shapes: B = P * G rows (P prompts, G completions each, the rows of a group adjacent), T completion tokens
(right-padded), N tokens, H hidden size, V vocabulary. Log-probabilities and entropies are in nats. Results are float32
(float64 where the input is float64), whatever the dtype of the policy.

    mask = conflict_mask(completion_ids, completion_mask, advantages, group_size)  # M, Section 5.1
    weights = conflict_weights(mask, advantages)  # lambda, Eq. 9
    logps, entropy = linear_logps_and_entropy(hidden, lm_head.weight, targets)  # ln pi and H_it
    loss, metrics = gtpo_loss(logps, entropy, completion_mask, advantages, weights, initial_entropy=h_ini)  # Eq. 10, 11
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LN2 = math.log(2.0)
FILTER_MODES = ("auto", "on", "off", "negative_only")
CONFLICT_SPANS = ("anchored", "first_run", "common")

_TILE_ROWS, _TILE_COLUMNS = 1024, 4096  # the largest logits tile ever held, in elements of the head's matmul
_MAX_EXCESS = 68.0  # e^68 ~ 3e29: a logit this far above the target's still leaves room to sum in float32
_MAX_EXCESS_HALF = 10.0  # e^10 ~ 2e4: float16 ends at 65504


def conflict_mask(
    completion_ids: Tensor, completion_mask: Tensor, advantages: Tensor, group_size: int, span: str = "anchored"
) -> Tensor:
    """The opening and closing conflict spans M = M_fw OR M_bw of Section 5.1.

    A token is in conflict at position p if a completion with A > 0 and one with A < 0 of the same group both have it
    there; the forward span is the run of conflict tokens that starts at the first token. The backward span is the same
    with positions counted from the last token of each completion. A row with A = 0 makes no conflict; it is marked
    where it has the token of one, and its weight stays 1 there.

    Args:
        completion_ids: Token ids. Shape (B, T).
        completion_mask: 1 on tokens the policy generated, EOS included; 0 on the padding to their right. Shape (B, T).
        advantages: A_i. Shape (B,).
        group_size: G; rows k*G to (k+1)*G-1 are one group.
        span: Which run of conflict tokens is meant, where the paper leaves it open: "anchored", the run that starts at
            the first (last) token; "first_run", the first run met from the left (right), wherever it starts; "common",
            the longest prefix (suffix) that all completions with A != 0 share.

    Returns:
        Bool, shape (B, T).

    Raises:
        ValueError: If the shapes disagree, B is no multiple of G, or ``span`` is unknown.
    """
    if span not in CONFLICT_SPANS:
        raise ValueError(f"conflict span {span!r} is unknown: pick one of {', '.join(CONFLICT_SPANS)}.")
    _check_rows("conflict_mask", completion_mask, advantages, completion_ids=completion_ids)
    if group_size < 1 or len(completion_ids) % group_size:
        raise ValueError(
            f"{len(completion_ids)} completions do not divide into groups of {group_size}: pass whole groups, "
            "their rows adjacent."
        )
    valid = completion_mask.bool()
    if not valid.numel():
        return valid
    forward = _conflict_run(completion_ids, valid, advantages, group_size, span)
    # Counted from the end: position r of the flipped row is token |o_i| - 1 - r.
    flip = valid.sum(-1, keepdim=True) - 1 - torch.arange(valid.shape[1], device=valid.device)
    flip = flip.clamp(min=0)
    backward = _conflict_run(completion_ids.gather(1, flip), valid, advantages, group_size, span)
    return forward | (backward.gather(1, flip) & valid)


def _conflict_run(ids: Tensor, valid: Tensor, advantages: Tensor, group_size: int, span: str) -> Tensor:
    """The run of conflict tokens counted from the first column. Shapes (B, T), (B, T), (B,) -> bool (B, T)."""
    grouped_ids = ids.view(-1, group_size, ids.shape[1])  # (P, G, T)
    grouped_valid = valid.view_as(grouped_ids)
    sign = advantages.sign().view(-1, group_size, 1)
    in_positive, in_negative = torch.zeros_like(grouped_valid), torch.zeros_like(grouped_valid)
    common = grouped_valid.clone()
    for other in range(group_size):  # one (P, G, T) comparison at a time: memory does not grow with G * G
        same = (grouped_ids == grouped_ids[:, other, None]) & grouped_valid[:, other, None] & grouped_valid
        in_positive |= same & (sign[:, other, None] > 0)
        in_negative |= same & (sign[:, other, None] < 0)
        common &= same | (sign[:, other, None] == 0)
    conflict = (in_positive & in_negative).view_as(valid)
    if span == "first_run":
        gap = (conflict.cummax(-1).values & ~conflict).cummax(-1).values  # after the first run has ended
        return conflict & ~gap
    if span == "common":
        conflict &= common.view_as(valid)
    return conflict.cummin(-1).values


def conflict_weights(mask: Tensor, advantages: Tensor, positive_weight: float = 2.0) -> Tensor:
    """lambda of Eq. 9: 1 off the mask; on it 0 where A_i < 0, 2 where A_i > 0 and 1 where A_i = 0.

    Args:
        mask: Conflict mask M. Bool, shape (B, T).
        advantages: A_i. Shape (B,).
        positive_weight: The 2 of Eq. 9.

    Returns:
        Shape (B, T), in the dtype of the advantages.
    """
    _check_rows("conflict_weights", mask, advantages)
    on_mask = torch.where(advantages > 0, positive_weight, torch.where(advantages < 0, 0.0, 1.0)).to(advantages.dtype)
    return torch.where(mask, on_mask[:, None], torch.ones_like(on_mask)[:, None])


def completion_entropy(token_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    """Mean token entropy of each completion, <H>_i of Section 4.2, in nats.

        <H>_i = 1/|o_i| * sum_t H_it,    H_it = -sum_v pi(v | s_it) ln pi(v | s_it)

    It weighs the gradient and carries none (Eq. 28, 30), so the result is detached.

    Args:
        token_entropy: H_it. Shape (B, T); what stands on padding is ignored.
        completion_mask: 1 on the completion's tokens. Shape (B, T).

    Returns:
        Shape (B,). A completion without tokens gets 0.

    Raises:
        ValueError: If the shapes disagree.
    """
    if token_entropy.shape != completion_mask.shape:
        raise ValueError(
            f"completion_entropy: token_entropy has shape {tuple(token_entropy.shape)} but the mask covers "
            f"(B, T) = {tuple(completion_mask.shape)}."
        )
    return _completion_mean(_promote(token_entropy.detach()), completion_mask)


def entropy_filter(
    entropy: Tensor,
    advantages: Tensor,
    initial_entropy: float | None,
    threshold: float = LN2,
    mode: str = "auto",
) -> Tensor:
    """delta of Eq. 10: 0 for a completion that is filtered out, 1 for one that is kept.

    Args:
        entropy: <H>_i in nats. Shape (B,). Exactly the threshold is kept.
        advantages: A_i. Shape (B,).
        initial_entropy: <H>_ini in nats, of the policy before training; only mode "auto" reads it.
        threshold: Above it a completion is filtered, in nats.
        mode: "auto" filters if <H>_ini < ln 2 (the paper), "on" always, "off" never, "negative_only" always but spares
            completions with A >= 0 (Fig. 4c).

    Returns:
        Shape (B,), 0.0 or 1.0 in the dtype of ``entropy``.

    Raises:
        ValueError: If the mode is unknown, is "auto" without ``initial_entropy``, or the shapes disagree.
    """
    if mode not in FILTER_MODES:
        raise ValueError(f"entropy filter mode {mode!r} is unknown: pick one of {', '.join(FILTER_MODES)}.")
    if mode == "auto" and initial_entropy is None:
        raise ValueError(
            "the entropy filter in mode 'auto' needs initial_entropy, the mean entropy of the untrained policy: "
            "measure it before training, give it, or choose mode on, off or negative_only."
        )
    if entropy.shape != advantages.shape:
        raise ValueError(
            f"entropy_filter: expected entropy and advantages of one shape (B,), got {tuple(entropy.shape)} and "
            f"{tuple(advantages.shape)}."
        )
    dropped = entropy > threshold
    if mode == "off" or (mode == "auto" and not initial_entropy < LN2):  # type: ignore[operator]  # None is refused above
        dropped = torch.zeros_like(dropped)
    elif mode == "negative_only":
        dropped = dropped & (advantages < 0)
    return (~dropped).to(entropy.dtype)


def gtpo_loss(
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
    """The GTPO loss, -J of Eq. 11, averaged over the rows that are passed.

        J = 1/G * sum_i delta_i (A_i - gamma <H>_i) / |o_i| * sum_t r_it lambda_it

    Args:
        per_token_logps: ln pi(o_it), with gradient. Shape (B, T).
        token_entropy: H_it in nats; no gradient flows into it. Shape (B, T).
        completion_mask: 1 on the completion's tokens. Shape (B, T).
        advantages: A_i. Shape (B,).
        weights: lambda_it of :func:`conflict_weights`; ones switch the conflict correction off. Shape (B, T).
        initial_entropy: <H>_ini in nats, see :func:`entropy_filter`.
        gamma: Strength of the entropy penalty; 0 switches it off.
        threshold: Threshold of the entropy filter in nats.
        filter_mode: Mode of :func:`entropy_filter`.
        old_per_token_logps: ln pi_old(o_it); None on the first iteration, where r_it = 1 with gradient. Shape (B, T).

    Returns:
        The loss, and detached 0-d tensors: ``entropy`` (mean <H>_i, nats) and ``filtered_fraction`` (share of rows with
        delta = 0).
    """
    _check_rows(
        "gtpo_loss",
        completion_mask,
        advantages,
        per_token_logps=per_token_logps,
        token_entropy=token_entropy,
        weights=weights,
        old_per_token_logps=old_per_token_logps,
    )
    entropy = completion_entropy(token_entropy, completion_mask)  # (B,)
    delta = entropy_filter(entropy, advantages, initial_entropy, threshold, filter_mode)  # (B,)
    ratio = _ratio(per_token_logps, old_per_token_logps, completion_mask)  # (B, T)
    per_completion = _completion_mean(ratio * _promote(weights), completion_mask)  # (B,)
    objective = delta * (_promote(advantages) - gamma * entropy) * per_completion
    return -objective.mean(), {"entropy": entropy.mean(), "filtered_fraction": (delta == 0).to(entropy.dtype).mean()}


def grpo_loss(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss, -J of Eq. 1 and 2, averaged over the rows that are passed.

    The KL term is the estimator of GRPO's paper (arXiv 2402.03300, Eq. 4): exp(d) - d - 1 with d = ln pi_ref - ln pi.

    Args:
        per_token_logps: ln pi(o_it), with gradient. Shape (B, T).
        completion_mask: 1 on the completion's tokens. Shape (B, T).
        advantages: A_i. Shape (B,).
        epsilon_low: The ratio is clipped below at 1 - epsilon_low.
        epsilon_high: The ratio is clipped above at 1 + epsilon_high.
        beta: Weight of the KL term; 0 needs no reference.
        ref_per_token_logps: ln pi_ref(o_it). Shape (B, T).
        old_per_token_logps: ln pi_old(o_it); None on the first iteration. Shape (B, T).

    Returns:
        The loss, and detached 0-d tensors: ``kl`` (nats, mean over all tokens) where beta != 0.

    Raises:
        ValueError: If shapes disagree, or beta != 0 comes without ``ref_per_token_logps``.
    """
    _check_rows(
        "grpo_loss",
        completion_mask,
        advantages,
        per_token_logps=per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        old_per_token_logps=old_per_token_logps,
    )
    valid = completion_mask.bool()
    ratio = _ratio(per_token_logps, old_per_token_logps, completion_mask)  # (B, T)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    signed = _promote(advantages)[:, None]
    per_token = torch.min(ratio * signed, clipped * signed)  # (B, T)
    metrics = {}
    if beta != 0.0:
        if ref_per_token_logps is None:
            raise ValueError(f"beta = {beta} needs ref_per_token_logps, the log-probabilities of the reference policy.")
        log_ratio = (_promote(ref_per_token_logps) - _promote(per_token_logps)).masked_fill(~valid, 0.0)
        kl = log_ratio.exp() - log_ratio - 1  # (B, T), 0 on padding
        per_token = per_token - beta * kl
        metrics["kl"] = kl.detach().sum() / valid.sum().clamp(min=1)
    return -_completion_mean(per_token, completion_mask).mean(), metrics


def _ratio(logps: Tensor, old_logps: Tensor | None, completion_mask: Tensor) -> Tensor:
    """r_it = pi / pi_old, with gradient; 1 on padding, where neither value nor gradient may leak. Shape (B, T)."""
    logps = _promote(logps)
    old_logps = logps.detach() if old_logps is None else _promote(old_logps)
    return (logps - old_logps).masked_fill(~completion_mask.bool(), 0.0).exp()


def _completion_mean(per_token: Tensor, completion_mask: Tensor) -> Tensor:
    """1/|o_i| * sum_t over the completion's tokens. Shape (B, T) -> (B,); a completion without tokens gets 0."""
    valid = completion_mask.bool()
    return per_token.masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


def _promote(tensor: Tensor) -> Tensor:
    """float32 for half precision, whose sums are off by 1e-2; float32 and float64 as they are."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _check_rows(name: str, reference: Tensor, advantages: Tensor, **tensors: Tensor | None) -> None:
    for key, tensor in tensors.items():
        if tensor is not None and tensor.shape != reference.shape:
            raise ValueError(
                f"{name}: {key} has shape {tuple(tensor.shape)} but the mask covers (B, T) = {tuple(reference.shape)}."
            )
    if reference.dim() != 2 or advantages.shape != reference.shape[:1]:
        raise ValueError(
            f"{name}: expected a mask (B, T) and advantages (B,), got {tuple(reference.shape)} and "
            f"{tuple(advantages.shape)}."
        )


def linear_logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    grad_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ln pi(target) and the entropy of pi = softmax((hidden @ weight.T + bias) / temperature), row by row.

    The logits are made tile by tile and never held, and each is measured from the target's own: with
    e_k = exp(z_k - z_y), so = sum_{k != y} e_k and sz = sum_{k != y} e_k (z_k - z_y),

        ln pi_y = -log1p(so),    H = log1p(so) - sz / (1 + so),    1 - pi_y = so / (1 + so),
        d ln pi_y / dh = -(sum_{k != y} e_k W_k - so W_y) / ((1 + so) * temperature),

    in which nothing cancels when pi_y is close to 1. Where the head is frozen (LoRA), d ln pi_y / dh is formed on the
    same tile in the forward (two matmuls in all) and scaled in the backward. Where ``weight`` or ``bias`` is trainable,
    the backward makes the tiles again (four matmuls in all).

    Args:
        hidden: Last hidden states of the tokens that predict the targets. Shape (N, H).
        weight: Rows of the language-model head. Shape (V, H).
        targets: Token ids that were generated. Shape (N,).
        temperature: Sampling temperature, > 0.
        bias: Bias of the head. Shape (V,).
        grad_rows: Bool, the rows whose gradient is wanted (lambda != 0); the others get a zero gradient and, with a
            frozen head, skip their share of the second matmul. None means all. Shape (N,).

    Returns:
        Log-probabilities, with gradient, and entropies, without, in nats. Shape (N,) each.

    Raises:
        ValueError: If the shapes disagree or the temperature is not positive.
    """
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"expected hidden (N, H), weight (V, H) and targets (N,), got {tuple(hidden.shape)}, {tuple(weight.shape)} "
            f"and {tuple(targets.shape)}: flatten the completion tokens first."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected a bias of shape ({len(weight)},), got {tuple(bias.shape)}.")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not positive: sampling temperature 0 has no log-probabilities.")
    if grad_rows is None:
        grad_rows = torch.ones_like(targets, dtype=torch.bool)
    elif grad_rows.shape != targets.shape:
        raise ValueError(f"expected grad_rows of shape {tuple(targets.shape)}, got {tuple(grad_rows.shape)}.")
    trainable_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    function = _TrainableHead if trainable_head else _FrozenHead
    logps, entropy = function.apply(hidden, weight, targets, temperature, bias, grad_rows)
    return logps, entropy


class _FrozenHead(torch.autograd.Function):
    """Forward makes logp, entropy and d logp / d hidden on one pass over the tiles; backward scales."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, bias, grad_rows):  # type: ignore[no-untyped-def]
        wanted = grad_rows if ctx.needs_input_grad[0] else torch.zeros_like(grad_rows)
        direction = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None  # d logp / d hidden, (N, H)
        logits = _Logits(hidden, weight, targets, temperature, bias, weight.dtype)
        logps, entropy = _scan(logits, wanted, direction)
        ctx.save_for_backward(direction)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        (direction,) = ctx.saved_tensors
        return (direction * grad_logps[:, None]).to(direction.dtype), None, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """Forward as with a frozen head, without the gradient; backward makes each tile of logits once more.

    The logits are float32 (float64) here: the backward's have to agree with those that the forward normalised.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, bias, grad_rows):  # type: ignore[no-untyped-def]
        logits = _Logits(hidden, weight, targets, temperature, bias, _sum_dtype(hidden))
        logps, entropy = _scan(logits, torch.zeros_like(grad_rows), None)
        ctx.save_for_backward(hidden, weight, targets, bias, grad_rows, logps)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        hidden, weight, targets, bias, grad_rows, logps = ctx.saved_tensors
        logits = _Logits(hidden, weight, targets, ctx.temperature, bias, logps.dtype)
        upstream = torch.where(grad_rows, grad_logps, 0.0) / ctx.temperature
        grad_hidden = torch.zeros(hidden.shape, dtype=logps.dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=logps.dtype, device=weight.device)
        grad_bias = torch.zeros(len(weight), dtype=logps.dtype, device=weight.device)
        for rows in _chunks(len(hidden), _TILE_ROWS):
            target_logit = logits.of_targets(rows)
            for columns in _chunks(len(weight), _TILE_COLUMNS):
                excess, is_target = logits.tile(rows, columns, target_logit)
                # d logp / dz_k = -pi_k; for the target 1 - pi_y, as -expm1(logp) so that nothing cancels.
                grad_logits = -(excess + logps[rows, None]).clamp(max=0.0).exp()
                grad_logits = (
                    torch.where(is_target, -torch.expm1(logps[rows, None]), grad_logits) * upstream[rows, None]
                )
                grad_hidden[rows] += grad_logits @ weight[columns].to(logps.dtype)
                grad_weight[columns] += grad_logits.T @ hidden[rows].to(logps.dtype)
                grad_bias[columns] += grad_logits.sum(0)
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            grad_bias.to(bias.dtype) if bias is not None and ctx.needs_input_grad[4] else None,
            None,
        )


class _Logits(NamedTuple):
    """The logits (hidden @ weight.T + bias) / temperature, made a tile at a time."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,)
    temperature: float
    bias: Tensor | None  # (V,)
    matmul_dtype: torch.dtype

    def of_targets(self, rows: slice | Tensor) -> Tensor:
        """z_y of these rows, summed in float32 (float64). Shape (R,)."""
        dtype = _sum_dtype(self.hidden)
        targets = self.targets[rows]
        logit = (self.hidden[rows].to(dtype) * self.weight[targets].to(dtype)).sum(-1)
        return (logit if self.bias is None else logit + self.bias[targets].to(dtype)) / self.temperature

    def tile(self, rows: slice | Tensor, columns: slice, origin: Tensor) -> tuple[Tensor, Tensor]:
        """z_k minus the row's origin, and which elements are targets. Shape (R, C) each."""
        logits = self.hidden[rows].to(self.matmul_dtype) @ self.weight[columns].to(self.matmul_dtype).T
        logits = logits.to(origin.dtype)
        if self.bias is not None:
            logits += self.bias[columns].to(logits.dtype)
        logits = logits.div_(self.temperature).sub_(origin[:, None])
        return logits, self.targets[rows, None] - columns.start == torch.arange(logits.shape[1], device=logits.device)


def _scan(logits: _Logits, grad_rows: Tensor, direction: Tensor | None) -> tuple[Tensor, Tensor]:
    """One pass over the tiles: (logps, entropy), and d logp / d hidden of ``grad_rows`` written into ``direction``."""
    hidden, weight, dtype = logits.hidden, logits.weight, _sum_dtype(logits.hidden)
    largest = _MAX_EXCESS_HALF if weight.dtype == torch.float16 else _MAX_EXCESS
    logps = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logps)
    for rows in _chunks(len(hidden), _TILE_ROWS):
        wanted = grad_rows[rows].nonzero().squeeze(1)
        target_logit = logits.of_targets(rows)
        so, sz = torch.zeros_like(target_logit), torch.zeros_like(target_logit)  # (R,)
        others = torch.zeros(len(wanted), hidden.shape[1], dtype=dtype, device=hidden.device)  # sum_{k != y} e_k W_k
        for columns in _chunks(len(weight), _TILE_COLUMNS):
            excess, is_target = logits.tile(rows, columns, target_logit)
            e = excess.clamp(max=largest).exp().masked_fill(is_target, 0.0)  # (R, C)
            so += e.sum(-1)
            sz += (e * excess.clamp(min=-1e4)).sum(-1)  # a logit of -inf adds 0, not NaN
            if len(wanted):
                others += e[wanted].to(weight.dtype) @ weight[columns]
        logps[rows] = -torch.log1p(so)
        entropy[rows] = torch.log1p(so) - sz / (1 + so)
        if direction is not None and len(wanted):
            target_part = so[wanted, None] * weight[logits.targets[rows][wanted]].to(dtype)
            scaled = (target_part - others) / ((1 + so[wanted, None]) * logits.temperature)
            direction[rows.start + wanted] = scaled.to(direction.dtype)
        unlikely = (so > math.exp(largest) / 2).nonzero().squeeze(1)  # rare: there e_k saturates
        for few in unlikely.split(max(1, _TILE_ROWS * _TILE_COLUMNS // len(weight))):
            few = few + rows.start
            logps[few], entropy[few], exact = _unlikely_rows(logits._replace(matmul_dtype=dtype), few)
            if direction is not None:
                direction[few] = (exact * grad_rows[few, None]).to(direction.dtype)
    return logps, entropy


def _unlikely_rows(logits: _Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, d logp / d hidden) in float32 by the textbook: for targets far below the largest logit."""
    origin = torch.zeros(len(rows), dtype=logits.matmul_dtype, device=rows.device)
    tiles = [logits.tile(rows, columns, origin) for columns in _chunks(len(logits.weight), _TILE_COLUMNS)]
    is_target = torch.cat([tile[1] for tile in tiles], dim=-1)
    log_pi = torch.cat([tile[0] for tile in tiles], dim=-1).log_softmax(-1)  # (few, V), no larger than a tile
    pi = log_pi.exp()
    grad_logits = (is_target.to(pi.dtype) - pi) / logits.temperature
    direction = torch.zeros(len(rows), logits.hidden.shape[1], dtype=pi.dtype, device=pi.device)
    for columns in _chunks(len(logits.weight), _TILE_COLUMNS):
        direction += grad_logits[:, columns] @ logits.weight[columns].to(pi.dtype)
    return log_pi[is_target], -(pi * log_pi.clamp(min=-1e4)).sum(-1), direction


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32 (those of bfloat16 are off by 1e-2 nats)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
