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
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

LN2 = math.log(2.0)
FILTER_MODES = ("auto", "on", "off", "negative_only")
CONFLICT_SPANS = ("anchored", "first_run", "common")

# The head's logits are made in tiles of rows x columns: the largest that is ever held.
_TILES = {"cpu": (1024, 4096), "cuda": (4096, 16384)}
_CACHE_ELEMENTS = 2**17  # of a tile that are worked on at once on a CPU: two copies in float32 fit its cache
_COMPILE = True  # on CUDA, the work between the two matmuls
_MAX_EXCESS = 68.0  # e^68 ~ 3e29: a logit this far above the target's still leaves room to sum in float32
_MAX_DEFICIT = 1e4  # e^-1e4 = 0 in float64 too, and 0 * 1e4 is a number where 0 * inf is none


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
    in_group = torch.arange(group_size, device=ids.device)[:, None]
    tokens = ids.view(-1, group_size, ids.shape[1])  # (P, G, T)
    tokens = torch.where(valid.view_as(tokens), tokens, -1 - in_group)  # padding equals nothing but its own row
    sign = advantages.sign().view(-1, group_size, 1)
    positive, negative = sign > 0, sign < 0
    in_positive, in_negative = torch.zeros(2, *tokens.shape, dtype=torch.bool, device=ids.device)
    common = torch.ones_like(in_positive)
    for other in range(group_size):  # one (P, G, T) comparison at a time: memory does not grow with G * G
        same = tokens == tokens[:, other, None]
        in_positive |= same & positive[:, other, None]
        in_negative |= same & negative[:, other, None]
        if span == "common":
            common &= same | (sign[:, other, None] == 0)
    conflict = (in_positive & in_negative).view_as(valid)
    if span == "first_run":
        gap = (conflict.cummax(-1).values & ~conflict).cummax(-1).values  # after the first run has ended
        return conflict & ~gap
    if span == "common":
        conflict &= common.view_as(valid)  # padding differs from the other rows
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
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """ln pi(target) and the entropy of pi = softmax(z), row by row, without ever holding the logits z.

        z = logit_scale * (hidden @ weight.T + bias) / temperature, or with a soft cap
        z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature

    The logits are made tile by tile, and each is measured from the target's own: with e_k = exp(z_k - z_y),
    so = sum_{k != y} e_k and sz = sum_{k != y} e_k (z_k - z_y),

        ln pi_y = -log1p(so),    H = log1p(so) - sz / (1 + so),    1 - pi_y = so / (1 + so),
        d ln pi_y / dh = (1 - pi_y) (c_y W_y - sum_{k != y} e_k c_k W_k / so),    c = dz / d(hidden @ weight.T),

    in which nothing cancels when pi_y is close to 1. Where the head is frozen (LoRA), d ln pi_y / dh is formed on the
    same tile in the forward (two matmuls in all) and scaled in the backward. Where ``weight`` or ``bias`` is trainable,
    the backward makes the tiles again (four matmuls in all, in float32: right, and slower). Autocast changes nothing:
    the matmuls run in the dtype of ``weight``, the sums in float32 (float64).

    Args:
        hidden: Last hidden states of the tokens that predict the targets. Shape (N, H).
        weight: Rows of the language-model head. Shape (V, H).
        targets: Token ids that were generated. Shape (N,).
        temperature: Sampling temperature, > 0.
        bias: Bias of the head. Shape (V,).
        grad_rows: Bool, the rows whose gradient is wanted (lambda != 0); the others get a zero gradient and, with a
            frozen head, skip their share of the second matmul. None means all. Shape (N,).
        logit_scale: The model's factor on its logits, > 0: Cohere's ``logit_scale``, or 1 / ``logits_scaling`` of
            Granite.
        softcap: The model's cap on its logits, > 0: ``final_logit_softcapping`` of Gemma 2. None means no cap.

    Returns:
        Log-probabilities, with gradient, and entropies, without, in nats. Shape (N,) each.

    Raises:
        ValueError: If the shapes disagree or the temperature, the scale or the cap is not positive.
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
    if not logit_scale > 0 or (softcap is not None and not softcap > 0):
        raise ValueError(f"logit_scale {logit_scale} and softcap {softcap} have to be positive (softcap or None).")
    if grad_rows is None:
        grad_rows = torch.ones_like(targets, dtype=torch.bool)
    elif grad_rows.shape != targets.shape:
        raise ValueError(f"expected grad_rows of shape {tuple(targets.shape)}, got {tuple(grad_rows.shape)}.")
    trainable_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    function = _TrainableHead if trainable_head else _FrozenHead
    logps, entropy = function.apply(hidden, weight, bias, targets, grad_rows, temperature, logit_scale, softcap)
    return logps, entropy


class _FrozenHead(torch.autograd.Function):
    """Forward makes logp, entropy and d logp / d hidden on one pass over the tiles; backward scales."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, grad_rows, *settings):  # type: ignore[no-untyped-def]
        head = _Head(weight, bias, weight.dtype, *settings)
        with torch.autocast(hidden.device.type, enabled=False):
            wanted = grad_rows if ctx.needs_input_grad[0] else None
            logps, entropy, direction, length = _scan(head, hidden, targets, wanted)
        ctx.save_for_backward(direction, length)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        direction, length = ctx.saved_tensors
        grad_hidden, factor = torch.empty_like(direction), grad_logps * length
        for rows in _blocks(direction):
            grad_hidden[rows] = direction[rows] * factor[rows, None]
        return grad_hidden, *[None] * 7


class _TrainableHead(torch.autograd.Function):
    """Forward as with a frozen head, without the gradient; backward makes each tile of logits once more.

    The matmuls are float32 (float64) here: the backward's logits have to agree with those that the forward normalised.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, grad_rows, *settings):  # type: ignore[no-untyped-def]
        head = _Head(weight, bias, _sum_dtype(hidden), *settings)
        with torch.autocast(hidden.device.type, enabled=False):
            logps, entropy, _, _ = _scan(head, hidden, targets, None)
        ctx.save_for_backward(hidden, weight, bias, targets, grad_rows, logps)
        ctx.settings = settings
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, grad_rows, logps = ctx.saved_tensors
        head = _Head(weight, bias, logps.dtype, *ctx.settings)
        upstream = torch.where(grad_rows, grad_logps, 0.0) * head.gain
        grad_hidden = torch.zeros(hidden.shape, dtype=logps.dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=logps.dtype, device=weight.device)
        grad_bias = torch.zeros(len(weight), dtype=logps.dtype, device=weight.device)
        tile_rows, tile_columns = _tile_size(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(len(hidden), tile_rows):
                surprise = -torch.expm1(logps[rows, None])  # 1 - pi_y: nothing cancels
                z_y = head.finish(head.target_products(hidden[rows], targets[rows]), targets[rows])
                for columns in _chunks(len(weight), tile_columns):
                    z = head.finish(head.products(hidden[rows], columns), columns)
                    pi = (z - (z_y - logps[rows])[:, None]).clamp_(max=0.0).exp_()
                    is_target = targets[rows, None] == torch.arange(columns.start, columns.stop, device=targets.device)
                    grad = _times(torch.where(is_target, surprise, -pi) * upstream[rows, None], head.slope(z))
                    grad_hidden[rows] += grad @ weight[columns].to(logps.dtype)
                    grad_weight[columns] += grad.T @ hidden[rows].to(logps.dtype)
                    grad_bias[columns] += grad.sum(0)
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


class _Head(NamedTuple):
    """What turns hidden states into logits: z = finish(hidden @ weight.T), the matmul in ``matmul_dtype``."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    matmul_dtype: torch.dtype
    temperature: float
    logit_scale: float
    softcap: float | None

    @property
    def gain(self) -> float:
        return self.logit_scale / self.temperature

    @property
    def is_linear(self) -> bool:
        """z = gain * (hidden @ weight.T)."""
        return self.bias is None and self.softcap is None

    def products(self, hidden: Tensor, columns: slice, base: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """hidden @ weight[columns].T, less ``base`` before the result is rounded. Shape (R, H), (R,) -> (R, C)."""
        factors = hidden.to(self.matmul_dtype), self.weight[columns].to(self.matmul_dtype).T
        if base is not None:
            return torch.addmm(base[:, None], *factors, beta=-1, out=out)
        if out is None or out.dtype == self.matmul_dtype:
            return torch.mm(*factors, out=out)
        return torch.mm(*factors, out_dtype=out.dtype, out=out)

    def finish(self, products: Tensor, tokens: slice | Tensor) -> Tensor:
        """hidden @ weight[tokens].T -> z, in place."""
        if self.bias is not None:
            products += self.bias[tokens].to(products.dtype)
        if self.softcap is None:
            return products.mul_(self.gain)
        return products.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """dz / d(hidden @ weight.T), as a multiple of gain: 1 - tanh^2 with a soft cap; without, 1, said as None."""
        if self.softcap is None:
            return None
        return 1 - (z * (self.temperature / self.softcap)).clamp_(-1, 1).square_()

    def target_products(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden . weight[target], summed in float32 (float64). Shape (R, H), (R,) -> (R,)."""
        products = torch.empty(len(hidden), dtype=_sum_dtype(hidden), device=hidden.device)
        for rows in _blocks(hidden):
            products[rows] = (hidden[rows].to(products.dtype) * self.weight[targets[rows]].to(products.dtype)).sum(-1)
        return products


def _scan(
    head: _Head, hidden: Tensor, targets: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One pass over the tiles.

    Returns:
        logps (N,), entropy (N,) and, unless ``wanted`` is None, the gradient d logp / d hidden of the wanted rows (zero
        elsewhere) as direction (N, H) times length (N,). The length is 1 - pi_y: apart from it, the direction keeps
        its digits in float16 too, where p = 1 - 1e-7 would leave none.
    """
    dtype, device = _sum_dtype(hidden), hidden.device
    tile_rows, tile_columns = _tile_size(device)
    size = min(tile_rows, len(hidden)) * min(tile_columns, len(head.weight))
    wide = _wide_output(device) and head.matmul_dtype != dtype
    tile_buffer = torch.empty(size, dtype=dtype if wide else head.matmul_dtype, device=device)
    compiled = device.type == "cuda" and _COMPILE
    exponentials = _compiled_exponentials() if compiled else _exponentials
    apart = wide or compiled  # elsewhere the exponentials take the place of the logits
    e_buffer = torch.empty(size, dtype=head.matmul_dtype, device=device) if apart else tile_buffer
    rounds = tile_buffer.dtype != dtype
    first = tile_columns // 16 if rounds else 0  # a narrow tile, in float32, shows about where a row's mass lies
    column_tiles = [slice(0, min(first, len(head.weight)))] if first else []
    column_tiles += _chunks(len(head.weight), tile_columns, start=first)

    so, sz = torch.zeros(2, len(hidden), dtype=dtype, device=device)
    direction = None if wanted is None else torch.zeros_like(hidden)
    for rows, with_gradient in _row_tiles(wanted, len(hidden), tile_rows, device):
        states, own = hidden[rows], targets[rows]
        product = head.target_products(states, own)  # (R,)
        origin = product if head.is_linear else head.finish(product.clone(), own)  # z_y, or z_y / gain
        sums = torch.zeros(2, len(rows), dtype=dtype, device=device)  # so and sz
        others = torch.zeros(states.shape, dtype=dtype, device=device)  # sum_{k != y} e_k c_k W_k / gain, (R, H)
        for columns in column_tiles:
            shape = len(rows), columns.stop - columns.start
            tile, e = (buffer[: shape[0] * shape[1]].view(shape) for buffer in (tile_buffer, e_buffer))
            base = torch.zeros_like(product)
            if not rounds:
                head.products(states, columns, out=tile)
            elif columns.start == 0:
                tile = head._replace(matmul_dtype=dtype).products(states, columns)
            else:  # half precision has its digits near 0: put that where the row's mass lies, as far as is known
                base = product + torch.log1p(sums[0]) / head.gain
                base = base.clamp(0.0, torch.finfo(tile.dtype).max).to(tile.dtype)  # it hardly ever lies below 0
                head.products(states, columns, base, out=tile)
            if head.is_linear:
                z, start, gain = tile, origin - base, head.gain
            else:
                z, start, gain = head.finish(tile.to(dtype).add_(base[:, None]), columns), origin, 1.0
            _leave_out(z, own - columns.start)
            slope = head.slope(z) if with_gradient else None
            part = torch.cat([exponentials(z[few], start[few], gain, e[few]) for few in _blocks(z)], dim=1)
            sums += part
            if with_gradient:
                divisor = part[0] if e.dtype == torch.float16 else None
                _add_product(others, _times(e, slope), head.weight[columns], divisor)
        so[rows], sz[rows] = sums
        if direction is not None and with_gradient:
            slope = head.slope(origin)
            for few in _blocks(others):
                own_row = _times(head.weight[own[few]].to(dtype), None if slope is None else slope[few, None])
                mean_row = others[few] / sums[0, few, None].clamp(min=torch.finfo(dtype).tiny)
                direction[rows[few]] = ((own_row - mean_row) * head.gain).to(direction.dtype)
    logps, entropy = -torch.log1p(so), torch.log1p(so) - sz / (1 + so)
    length = None if wanted is None else torch.where(wanted, so / (1 + so), 0.0)

    unlikely = (so > math.exp(_MAX_EXCESS) / 2).nonzero().squeeze(1)  # rare: there e_k saturates
    for few in _split(unlikely, max(1, tile_rows * tile_columns // len(head.weight))):
        logps[few], entropy[few], exact = _unlikely_rows(head._replace(matmul_dtype=dtype), hidden[few], targets[few])
        if direction is not None and length is not None and wanted is not None:
            direction[few], length[few] = (exact * wanted[few, None]).to(direction.dtype), 1.0
    return logps, entropy, direction, length


def _row_tiles(wanted: Tensor | None, rows: int, size: int, device: torch.device) -> list[tuple[Tensor, bool]]:
    """Indices of up to ``size`` rows that want a gradient, True; then those of the others, False."""
    if wanted is None:
        parts = [(torch.arange(rows, device=device), False)]
    else:
        parts = [(wanted.nonzero().squeeze(1), True), ((~wanted).nonzero().squeeze(1), False)]
    return [(tile, flag) for part, flag in parts for tile in _split(part, size)]


def _leave_out(z: Tensor, target: Tensor) -> None:
    """Writes -inf at each row's target, whose exponential is then 0; a target outside the tile is left alone."""
    inside = (target >= 0) & (target < z.shape[1])
    at = torch.arange(len(z), device=z.device), target.clamp(0, z.shape[1] - 1)
    z.index_put_(at, z[at].masked_fill(inside, -math.inf))


def _exponentials(z: Tensor, origin: Tensor, gain: float, out: Tensor) -> Tensor:
    """e_k = exp(gain * (z_k - origin)) into ``out``, and sum e_k and sum e_k ln e_k. Shape (R, C) -> (2, R).

    In float16, which holds 6e-8 to 65504, ``out`` is divided by its row's sum.
    """
    excess = z - origin[:, None] if z.dtype == origin.dtype else z.to(origin.dtype).sub_(origin[:, None])
    if gain != 1.0:
        excess *= gain
    excess.clamp_(-_MAX_DEFICIT, _MAX_EXCESS)
    e = torch.exp(excess, out=out) if out.dtype == excess.dtype else excess.exp()
    so = e.sum(-1)
    if e is not out:
        out.copy_(e / so[:, None].clamp(min=torch.finfo(e.dtype).tiny) if out.dtype == torch.float16 else e)
    return torch.stack((so, excess.mul_(e).sum(-1)))


@cache
def _compiled_exponentials() -> Callable[..., Tensor]:
    """The above as one kernel; where there is no compiler, PyTorch warns once and runs it as it is."""
    return torch._dynamo.config.patch(suppress_errors=True)(torch.compile(_exponentials, dynamic=True))


def _add_product(total: Tensor, e: Tensor, weight: Tensor, factor: Tensor | None) -> None:
    """total += factor[:, None] * (e @ weight), summed in the dtype of ``total``."""
    if factor is not None:
        total += (e @ weight) * factor[:, None]
    elif e.dtype == total.dtype:
        total.addmm_(e, weight)
    elif _wide_output(total.device):
        torch.addmm(total, e, weight, out_dtype=total.dtype, out=total)
    else:
        product = e @ weight
        for rows in _blocks(total):
            total[rows] += product[rows]


def _unlikely_rows(head: _Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, d logp / d hidden) in float32 by the textbook: for targets far below the largest logit."""
    tiles = _chunks(len(head.weight), _tile_size(hidden.device)[1])
    z = torch.cat([head.finish(head.products(hidden, columns), columns) for columns in tiles], dim=-1)
    log_pi = z.log_softmax(-1)  # (few, V), no larger than a tile
    pi = log_pi.exp()
    entropy = -(pi * log_pi.clamp(min=-_MAX_DEFICIT)).sum(-1)
    pi.neg_().scatter_add_(1, targets[:, None], torch.ones_like(pi[:, :1]))
    grad = _times(pi, head.slope(z)) * head.gain  # d logp / d(hidden @ weight.T)
    direction = torch.zeros(hidden.shape, dtype=pi.dtype, device=pi.device)
    for columns in tiles:
        direction += grad[:, columns] @ head.weight[columns].to(pi.dtype)
    return log_pi.gather(1, targets[:, None]).squeeze(1), entropy, direction


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32 (those of bfloat16 are off by 1e-2 nats)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide_output(device: torch.device) -> bool:
    """Whether a matmul of half-precision factors can leave its float32 sums unrounded."""
    return device.type == "cuda" and torch.version.hip is None


def _tile_size(device: torch.device) -> tuple[int, int]:
    return _TILES["cuda" if device.type == "cuda" else "cpu"]


def _times(tensor: Tensor, slope: Tensor | None) -> Tensor:
    return tensor if slope is None else tensor.mul_(slope)


def _blocks(tensor: Tensor) -> list[slice]:
    """Rows to work on at once: as many as a CPU's cache holds through several operations; elsewhere all."""
    cached = max(1, _CACHE_ELEMENTS // max(1, tensor.shape[1])) if tensor.device.type == "cpu" else len(tensor)
    return _chunks(len(tensor), max(1, cached))


def _split(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    return rows.split(size) if len(rows) else ()


def _chunks(length: int, size: int, start: int = 0) -> list[slice]:
    return [slice(at, min(at + size, length)) for at in range(start, length, size)]
