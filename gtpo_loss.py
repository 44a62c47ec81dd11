"""The GTPO objective (arXiv 2508.03772v5) as pure tensor functions: no trainer, no tokenizer, no I/O.

Shapes: B = P * G rows (P prompts, G completions each, the rows of a group adjacent), T completion tokens (right-padded),
N tokens, H hidden size, V vocabulary. Log-probabilities and entropies are in nats. Results are float32 (float64 where the
input is float64), whatever the dtype of the policy.

    mask    = conflict_mask(completion_ids, completion_mask, advantages, group_size)   # M,      Section 5.1
    weights = conflict_weights(mask, advantages)                                       # lambda, Eq. 9
    logps, entropy = linear_logps_and_entropy(hidden, lm_head.weight, targets)         # ln pi and H_it
    loss, metrics = gtpo_loss(logps, entropy, completion_mask, advantages, weights, initial_entropy=h_ini)   # Eq. 10, 11
"""

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)
FILTER_MODES = ("auto", "on", "off", "negative_only")

_TILE_ROWS, _TILE_COLUMNS = 1024, 4096  # the largest logits tile ever held, in elements of the head's matmul
_MAX_EXCESS = 68.0  # e^68 ~ 3e29: a logit this far above the target's still leaves room to sum in float32


def conflict_mask(completion_ids: Tensor, completion_mask: Tensor, advantages: Tensor, group_size: int) -> Tensor:
    """The opening and closing conflict spans M = M_fw OR M_bw of Section 5.1.

    A token is in conflict at position p if a completion with A > 0 and one with A < 0 of the same group both have it
    there; the forward span is the run of conflict tokens that starts at the first token. The backward span is the same
    with positions counted from the last token of each completion. Rows with A = 0 neither make nor have conflicts.

    Args:
        completion_ids: Token ids. Shape (B, T).
        completion_mask: 1 on tokens the policy generated, EOS included; 0 on the padding to their right. Shape (B, T).
        advantages: A_i. Shape (B,).
        group_size: G; rows k*G to (k+1)*G-1 are one group.

    Returns:
        Bool, shape (B, T).

    Raises:
        ValueError: If the shapes disagree or B is no multiple of G.
    """
    _check_rows("conflict_mask", completion_mask, advantages, completion_ids=completion_ids)
    if group_size < 1 or len(completion_ids) % group_size:
        raise ValueError(
            f"{len(completion_ids)} completions do not divide into groups of {group_size}: pass whole groups, "
            "their rows adjacent."
        )
    valid = completion_mask.bool()
    forward = _conflict_run(completion_ids, valid, advantages, group_size)
    # Counted from the end: position r of the flipped row is token |o_i| - 1 - r.
    flip = valid.sum(-1, keepdim=True) - 1 - torch.arange(valid.shape[1], device=valid.device)
    flip = flip.clamp(min=0)
    backward = _conflict_run(completion_ids.gather(1, flip), valid, advantages, group_size)
    return forward | (backward.gather(1, flip) & valid)


def _conflict_run(ids: Tensor, valid: Tensor, advantages: Tensor, group_size: int) -> Tensor:
    """The run of conflict tokens that starts at the first column. Shapes (B, T), (B, T), (B,) -> bool (B, T)."""
    grouped_ids = ids.view(-1, group_size, ids.shape[1])  # (P, G, T)
    grouped_valid = valid.view_as(grouped_ids)
    sign = advantages.sign().view(-1, group_size)
    opposite = sign[:, :, None] * sign[:, None, :] < 0  # (P, G, G)
    conflict = torch.zeros_like(grouped_valid)
    for other in range(group_size):  # one (P, G, T) comparison at a time: memory does not grow with G * G
        same = grouped_ids == grouped_ids[:, other, None]
        conflict |= same & grouped_valid[:, other, None] & opposite[:, :, other, None]
    conflict = (conflict & grouped_valid).view_as(valid)
    return conflict.cummin(-1).values if conflict.numel() else conflict


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
    """
    valid = completion_mask.bool()
    total = token_entropy.detach().masked_fill(~valid, 0.0).sum(-1)
    return total / valid.sum(-1).clamp(min=1)


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
        ValueError: If the mode is unknown, or is "auto" without ``initial_entropy``.
    """
    if mode not in FILTER_MODES:
        raise ValueError(f"entropy filter mode {mode!r} is unknown: pick one of {', '.join(FILTER_MODES)}.")
    if mode == "auto" and initial_entropy is None:
        raise ValueError(
            "the entropy filter in mode 'auto' needs initial_entropy, the mean entropy of the untrained policy: "
            "measure it before training, give it, or choose mode on, off or negative_only."
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
        The loss, and detached 0-d tensors: ``entropy`` (mean <H>_i, nats), ``filtered_fraction`` (share with delta = 0).
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
    per_completion = _completion_mean(ratio * weights, completion_mask)  # (B,)
    objective = delta * (advantages - gamma * entropy) * per_completion
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
    per_token = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])  # (B, T)
    metrics = {}
    if beta != 0.0:
        if ref_per_token_logps is None:
            raise ValueError(f"beta = {beta} needs ref_per_token_logps, the log-probabilities of the reference policy.")
        log_ratio = (ref_per_token_logps - per_token_logps).masked_fill(~valid, 0.0)
        kl = log_ratio.exp() - log_ratio - 1  # (B, T), 0 on padding
        per_token = per_token - beta * kl
        metrics["kl"] = kl.detach().sum() / valid.sum().clamp(min=1)
    return -_completion_mean(per_token, completion_mask).mean(), metrics


def _ratio(logps: Tensor, old_logps: Tensor | None, completion_mask: Tensor) -> Tensor:
    """r_it = pi / pi_old, with gradient; 1 on padding, where neither value nor gradient may leak. Shape (B, T)."""
    old_logps = logps.detach() if old_logps is None else old_logps
    return (logps - old_logps).masked_fill(~completion_mask.bool(), 0.0).exp()


def _completion_mean(per_token: Tensor, completion_mask: Tensor) -> Tensor:
    """1/|o_i| * sum_t over the completion's tokens. Shape (B, T) -> (B,); a completion without tokens gets 0."""
    valid = completion_mask.bool()
    return per_token.masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


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

    The logits are made tile by tile and never held, and every one is measured from the target's own: with
    e_k = exp(z_k - z_y), so = sum_{k != y} e_k and sz = sum_{k != y} e_k (z_k - z_y),

        ln pi_y = -log1p(so),    H = log1p(so) - sz / (1 + so),    1 - pi_y = so / (1 + so),
        d ln pi_y / dh = -(sum_{k != y} e_k W_k - so W_y) / ((1 + so) * temperature),

    in which nothing cancels when pi_y is close to 1. Where the head is frozen (LoRA), d ln pi_y / dh is formed on the same
    tile in the forward (two matmuls in all) and scaled in the backward. Where ``weight`` or ``bias`` is trainable, the
    backward makes the tiles again (four matmuls in all).

    Args:
        hidden: Last hidden states of the tokens that predict the targets. Shape (N, H).
        weight: Rows of the language-model head. Shape (V, H).
        targets: Token ids that were generated. Shape (N,).
        temperature: Sampling temperature, > 0.
        bias: Bias of the head. Shape (V,).
        grad_rows: Bool, the rows whose gradient is wanted (lambda != 0); the others get a zero gradient and, with a frozen
            head, skip their share of the second matmul. None means all. Shape (N,).

    Returns:
        Log-probabilities, with gradient, and entropies, without, in nats. Shape (N,) each.

    Raises:
        ValueError: If the shapes disagree or the temperature is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden (N, H), weight (V, H) and targets (N,), got {tuple(hidden.shape)}, {tuple(weight.shape)} and "
            f"{tuple(targets.shape)}: flatten the completion tokens first."
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
        logps, entropy = _scan(hidden, weight, targets, temperature, bias, wanted, direction)
        ctx.save_for_backward(direction)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        (direction,) = ctx.saved_tensors
        return (direction * grad_logps[:, None]).to(direction.dtype), None, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """Forward as with a frozen head, without the gradient; backward makes each tile of logits once more."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, bias, grad_rows):  # type: ignore[no-untyped-def]
        logps, entropy = _scan(hidden, weight, targets, temperature, bias, torch.zeros_like(grad_rows), None)
        ctx.save_for_backward(hidden, weight, targets, bias, grad_rows, logps)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        hidden, weight, targets, bias, grad_rows, logps = ctx.saved_tensors
        upstream = torch.where(grad_rows, grad_logps, 0.0) / ctx.temperature
        grad_hidden = torch.zeros(hidden.shape, dtype=logps.dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=logps.dtype, device=weight.device)
        grad_bias = torch.zeros(len(weight), dtype=logps.dtype, device=weight.device)
        for rows in _chunks(len(hidden), _TILE_ROWS):
            h, y, scale = hidden[rows], targets[rows], upstream[rows, None]
            target_logit = _target_logit(h, weight, y, bias, ctx.temperature)
            for columns in _chunks(len(weight), _TILE_COLUMNS):
                excess, is_target = _excess(h, weight, columns, y, bias, ctx.temperature, target_logit)
                # d logp / dz_k = -pi_k; for the target 1 - pi_y, as -expm1(logp) so that nothing cancels.
                grad_logits = -(excess + logps[rows, None]).exp()
                grad_logits = torch.where(is_target, -torch.expm1(logps[rows, None]), grad_logits) * scale
                tile = grad_logits.to(weight.dtype)
                grad_hidden[rows] += tile @ weight[columns]
                grad_weight[columns] += tile.T @ h.to(weight.dtype)
                grad_bias[columns] += grad_logits.sum(0)
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            grad_bias.to(bias.dtype) if bias is not None and ctx.needs_input_grad[4] else None,
            None,
        )


def _scan(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    grad_rows: Tensor,
    direction: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One pass over the tiles: (logps, entropy), and d logp / d hidden written into ``direction`` for ``grad_rows``."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32  # bfloat16 sums are off by 1e-2 nats
    logps = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logps)
    for rows in _chunks(len(hidden), _TILE_ROWS):
        h, y = hidden[rows], targets[rows]
        wanted = grad_rows[rows].nonzero().squeeze(1)
        target_logit = _target_logit(h, weight, y, bias, temperature)
        so, sz = torch.zeros_like(target_logit), torch.zeros_like(target_logit)  # (R,)
        others = torch.zeros(len(wanted), h.shape[1], dtype=dtype, device=h.device)  # sum_{k != y} e_k W_k
        for columns in _chunks(len(weight), _TILE_COLUMNS):
            excess, is_target = _excess(h, weight, columns, y, bias, temperature, target_logit)
            e = excess.clamp(max=_MAX_EXCESS).exp().masked_fill(is_target, 0.0)  # (R, C)
            so += e.sum(-1)
            sz += (e * excess.clamp(min=-1e4)).sum(-1)  # a logit of -inf adds 0, not NaN
            if len(wanted):
                others += e[wanted].to(weight.dtype) @ weight[columns]
        logps[rows] = -torch.log1p(so)
        entropy[rows] = torch.log1p(so) - sz / (1 + so)
        if direction is not None and len(wanted):
            target_part = so[wanted, None] * weight[y[wanted]].to(dtype)
            scaled = (target_part - others) / ((1 + so[wanted, None]) * temperature)
            direction[rows.start + wanted] = scaled.to(direction.dtype)
        unlikely = (so > math.exp(_MAX_EXCESS) / 2).nonzero().squeeze(1)  # rare: logp < -67, where e_k saturates
        for few in unlikely.split(max(1, _TILE_ROWS * _TILE_COLUMNS // len(weight))):
            few = few + rows.start
            step = _unlikely_rows(hidden[few], weight, targets[few], temperature, bias)
            logps[few], entropy[few] = step[:2]
            if direction is not None:
                direction[few] = step[2].to(direction.dtype) * grad_rows[few, None]
    return logps, entropy


def _unlikely_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, d logp / d hidden) measured from the largest logit: exact where the target is far below it."""
    zero = torch.zeros(len(hidden), dtype=_target_logit(hidden, weight, targets, bias, temperature).dtype)
    logits, is_target = _excess(hidden, weight, slice(0, len(weight)), targets, bias, temperature, zero.to(hidden.device))
    log_pi = logits.log_softmax(-1)  # (few, V)
    pi = log_pi.exp()
    entropy = -(pi * log_pi.clamp(min=-1e4)).sum(-1)
    grad_logits = is_target.to(pi.dtype) - pi
    direction = (grad_logits.to(weight.dtype) @ weight) / temperature
    return log_pi[is_target], entropy, direction


def _target_logit(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """z_y of each row in float32 (float64 for float64). Shape (R,)."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logit = (hidden.to(dtype) * weight[targets].to(dtype)).sum(-1)
    return (logit if bias is None else logit + bias[targets].to(dtype)) / temperature


def _excess(
    hidden: Tensor,
    weight: Tensor,
    columns: slice,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    target_logit: Tensor,
) -> tuple[Tensor, Tensor]:
    """z_k - z_y for one tile, and which element is the target. Shape (R, C) each."""
    logits = (hidden.to(weight.dtype) @ weight[columns].T).to(target_logit.dtype)
    if bias is not None:
        logits += bias[columns].to(logits.dtype)
    excess = logits.div_(temperature).sub_(target_logit[:, None])
    is_target = targets[:, None] - columns.start == torch.arange(excess.shape[1], device=excess.device)
    return excess, is_target


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
