"""Log-probabilities and entropy of the language-model head, tile by tile, without the (B, T, V) logits.

Shapes: N tokens, H hidden size, V vocabulary; R rows and C columns of a tile. Needs torch only.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)
Pair = tuple[Tensor, Tensor]

TILES = {"cpu": (1024, 4096), "cuda": (4096, 16384)}  # rows and columns of the largest block of logits in memory
MAX_LOGITS = 2**25  # elements, of some rows of a trained head
MIN_ROWS = 256  # of a tile of one of several CPU threads
CACHE_ELEMENTS = 2**17  # elements processed at once on a CPU: two float32 copies fit its cache
COMPILE = True  # on CUDA, the elementwise work between the two matmuls
MAX_EXCESS = 68.0  # e^68 ~ 3e29: a logit this far above the target's still sums in float32
MAX_DEFICIT = 1e4  # e^-1e4 = 0 in float64 too, and 0 * 1e4 is finite where 0 * inf is not


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
) -> Pair:
    """ln pi(target) and the entropy of pi = softmax(z), row by row, without storing the logits z.

        z = logit_scale * (hidden @ weight.T + bias) / temperature, or with a soft cap
        z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature

    The logits are computed tile by tile, relative to the target's own: with e_k = exp(z_k - z_y),
    so = sum_{k != y} e_k and sz = sum_{k != y} e_k (z_k - z_y),

        ln pi_y = -log1p(so),    H = log1p(so) - sz / (1 + so),    1 - pi_y = so / (1 + so),
        d ln pi_y / dh = (1 - pi_y) (c_y W_y - sum_{k != y} e_k c_k W_k / so),    c = dz / d(hidden @ weight.T),

    where nothing cancels for pi_y close to 1. With a frozen head (LoRA), the forward computes d ln pi_y / dh on the
    same tile (two matmuls in total) and the backward scales it. With a trainable ``weight`` or ``bias``, it is
    :func:`plain_logps_and_entropy` of some rows at a time, whose logits the backward computes again (four matmuls in
    total, in float32). Autocast has no effect: the matmuls run in the dtype of ``weight``, the sums in float32
    (float64).

    Args:
        hidden: Last hidden states of the tokens that predict the targets. Shape (N, H).
        weight: Rows of the language-model head. Shape (V, H).
        targets: Generated token ids. Shape (N,).
        temperature: Sampling temperature, > 0.
        bias: Bias of the head. Shape (V,).
        grad_rows: Bool, the rows that need a gradient (lambda != 0); the others get a zero gradient and, with a frozen
            head, skip the second matmul. None means all. Shape (N,).
        logit_scale: Factor on the logits, > 0: ``logit_scale`` of Cohere, 1 / ``logits_scaling`` of Granite.
        softcap: Soft cap of the logits, > 0: ``final_logit_softcapping`` of Gemma 2. None means no cap.

    Returns:
        Log-probabilities, with gradient, and entropies, without, in nats. Shape (N,) each.

    Raises:
        ValueError: If the shapes of ``hidden``, ``targets`` and ``grad_rows`` disagree.
    """
    head = _Head(weight, bias, weight.dtype, temperature, logit_scale, softcap)
    if grad_rows is None:
        grad_rows = torch.ones_like(targets, dtype=torch.bool)
    _check(head, hidden, targets, grad_rows)
    if weight.requires_grad or getattr(bias, "requires_grad", False):
        return _trainable_head(head, hidden, targets, grad_rows)
    return _FrozenHead.apply(hidden, targets, grad_rows, head)


def plain_logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    grad_rows: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Pair:
    """:func:`linear_logps_and_entropy` by the textbook formula: same arguments, same results, all (N, V) logits."""
    logits = hidden.to(weight.dtype) @ weight.T
    logits = logits.to(_sum_dtype(hidden))  # (N, V)
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_pi = torch.log_softmax(logits / temperature, dim=-1)
    logps = log_pi.gather(1, targets[:, None]).squeeze(1)
    if grad_rows is not None:
        logps = torch.where(grad_rows, logps, logps.detach())
    pi = log_pi.detach().exp()
    return logps, torch.special.entr(pi).sum(-1)


def _trainable_head(head: "_Head", hidden: Tensor, targets: Tensor, grad_rows: Tensor) -> Pair:
    """As many rows at a time as have MAX_LOGITS."""
    dtype = _sum_dtype(hidden)
    plain = partial(
        plain_logps_and_entropy,
        temperature=head.temperature,
        bias=None if head.bias is None else head.bias.to(dtype),
        logit_scale=head.logit_scale,
        softcap=head.softcap,
    )
    weight = head.weight.to(dtype)
    rows = max(1, MAX_LOGITS // len(weight))
    logps = []
    entropies = []
    with torch.autocast(hidden.device.type, enabled=False):
        for states, ids, wanted in zip(hidden.split(rows), targets.split(rows), grad_rows.split(rows), strict=True):
            pair = checkpoint(plain, states, weight, ids, grad_rows=wanted, use_reentrant=False)
            logps.append(pair[0])
            entropies.append(pair[1])
    return torch.cat(logps), torch.cat(entropies)


def _check(head: "_Head", hidden: Tensor, targets: Tensor, grad_rows: Tensor) -> None:
    tokens = len(targets)
    width = head.weight.shape[-1]
    expected = [(tokens, width), (tokens,), (tokens,)]
    shapes = [tensor.shape for tensor in (hidden, targets, grad_rows)]
    if shapes != expected:
        raise ValueError(
            f"expected hidden (N, {width}), targets (N,) and grad_rows (N,), got {shapes}: flatten the completion "
            "tokens first."
        )


class _FrozenHead(torch.autograd.Function):
    """Forward computes logp, entropy and d logp / d hidden in one pass over the tiles; backward scales."""

    @staticmethod
    def forward(ctx, hidden, targets, grad_rows, head):  # type: ignore[no-untyped-def]
        found = _scan(head, hidden, targets, grad_rows if ctx.needs_input_grad[0] else None)
        ctx.save_for_backward(found.direction, found.scale)
        ctx.mark_non_differentiable(found.entropy)
        return found.logps, found.entropy

    @staticmethod
    def backward(ctx, grad_logps, _):  # type: ignore[no-untyped-def]
        direction, scale = ctx.saved_tensors
        factor = grad_logps * scale
        return direction * factor[:, None], None, None, None  # autograd casts it


class _Head(NamedTuple):
    """The map from hidden states to logits: z = finish(hidden @ weight.T), the matmul in ``matmul_dtype``."""

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
        """hidden @ weight[columns].T minus ``base``, subtracted before rounding. Shape (R, H), (R,) -> (R, C)."""
        states = hidden.to(self.matmul_dtype)
        weight = self.weight[columns].to(self.matmul_dtype).T
        if base is not None:
            return torch.addmm(base[:, None], states, weight, beta=-1, out=out)
        if out is None or out.dtype == self.matmul_dtype:
            return torch.mm(states, weight, out=out)
        return torch.mm(states, weight, out_dtype=out.dtype, out=out)

    def finish(self, products: Tensor, tokens: slice | Tensor) -> Tensor:
        """hidden @ weight[tokens].T -> z, in place."""
        if self.bias is not None:
            products += self.bias[tokens].to(products.dtype)
        if self.softcap is None:
            return products.mul_(self.gain)
        products.mul_(self.logit_scale / self.softcap)
        return products.tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """dz / d(hidden @ weight.T), as a multiple of gain: 1 - tanh^2 with a soft cap; None stands for 1."""
        if self.softcap is None:
            return None
        return 1 - (z * (self.temperature / self.softcap)).clamp_(-1, 1).square_()

    def target_products(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden . weight[target], summed in float32 (float64). Shape (R, H), (R,) -> (R,)."""
        dtype = _sum_dtype(hidden)
        own_rows = self.weight[targets].to(dtype)
        products = hidden.to(dtype) * own_rows
        return products.sum(-1)


class TilePlan(NamedTuple):
    """How the logits are cut into tiles, and by which operations a tile is computed."""

    rows: int  # of a tile, at most
    columns: list[slice]  # of each tile of a row
    elements: int  # of a tile, at most
    sum_dtype: torch.dtype
    tile_dtype: torch.dtype  # of the logits; half precision rounds them
    exponentials: Callable[..., Tensor]  # _exponentials, on CUDA compiled
    is_wide: bool  # on CUDA, matmuls of half-precision factors return their float32 sums

    @property
    def is_portable(self) -> bool:
        """Whether every device has the operations; the exponentials then overwrite the logits."""
        return self.exponentials is _exponentials and not self.is_wide


def _plan(head: _Head, hidden: Tensor, is_portable: bool) -> TilePlan:
    """The plan for hidden states (N, H); a portable one has no operation that CUDA alone has."""
    sum_dtype = _sum_dtype(hidden)
    vocabulary = len(head.weight)
    rows, width = _tile_size(hidden.device)
    if hidden.device.type == "cpu":  # the tiles of all threads together are as large as one
        rows = min(rows, max(MIN_ROWS, rows // torch.get_num_threads()))
    is_wide = not is_portable and _wide_output(hidden.device) and head.matmul_dtype != sum_dtype
    tile_dtype = sum_dtype if is_wide else head.matmul_dtype
    columns = _chunks(vocabulary, width)
    if tile_dtype != sum_dtype:
        first = max(width // 16, 1)  # a narrow float32 tile estimates where a row's mass lies
        columns = [slice(0, min(first, vocabulary)), *_chunks(vocabulary, width, start=first)]
    elements = min(rows, len(hidden)) * min(width, vocabulary)
    is_compiled = not is_portable and COMPILE and hidden.device.type == "cuda"
    exponentials = _compiled_exponentials() if is_compiled else _exponentials
    return TilePlan(
        rows,
        columns,
        elements,
        sum_dtype,
        tile_dtype,
        exponentials,
        is_wide,
    )


class _Scan(NamedTuple):
    """Of N tokens; where no gradient is needed, the direction is empty."""

    logps: Tensor  # (N,)
    entropy: Tensor  # (N,)
    direction: Tensor  # d logp / d hidden = direction * scale; 0 in rows that need no gradient. (N, H)
    scale: Tensor  # 1 - pi_y: without it the direction keeps its precision in float16, where p = 1 - 1e-7. (N,)


def _scan(head: _Head, hidden: Tensor, targets: Tensor, needs_grad: Tensor | None) -> _Scan:
    """One pass over the tiles; where an operation of CUDA raises, by those that every device has."""
    plan = _plan(head, hidden, is_portable=False)
    with torch.autocast(hidden.device.type, enabled=False):
        try:
            return _one_pass(plan, head, hidden, targets, needs_grad)
        except Exception as error:  # a driver, GPU or PyTorch without these operations raises various errors
            if plan.is_portable or isinstance(error, torch.OutOfMemoryError):
                raise
            message = f"{type(error).__name__}: {error}"
            _warn_once(message.splitlines()[0])
        plan = _plan(head, hidden, is_portable=True)
        return _one_pass(plan, head, hidden, targets, needs_grad)


@cache
def _warn_once(reason: str) -> None:
    logger.warning("the CUDA path of the LM head failed; the portable one is used instead: %s", reason)


def _one_pass(
    plan: TilePlan,
    head: _Head,
    hidden: Tensor,
    targets: Tensor,
    needs_grad: Tensor | None,
) -> _Scan:
    """Tile by tile; ``needs_grad``: bool, the rows that need a gradient, None where none does. Shape (N,)."""
    device = hidden.device
    so, sz = hidden.new_zeros(2, len(hidden), dtype=plan.sum_dtype)  # (N,) each
    direction = hidden.new_zeros(hidden.shape if needs_grad is not None else 0)

    def work(row_tiles: Any) -> None:
        logits = hidden.new_empty(plan.elements, dtype=plan.tile_dtype)
        e = logits if plan.is_portable else torch.empty_like(logits, dtype=head.matmul_dtype)
        for rows, with_gradient in row_tiles:
            sums, others = _scan_rows(plan, head, hidden[rows], targets[rows], with_gradient, (logits, e))
            so[rows], sz[rows] = sums
            if with_gradient:
                direction[rows] = others.to(hidden.dtype)

    wanted = torch.zeros_like(targets, dtype=torch.bool) if needs_grad is None else needs_grad
    _in_threads(work, _row_tiles(wanted, plan.rows), device)
    logps = -torch.log1p(so)
    entropy = torch.log1p(so) - sz / (1 + so)
    scale = torch.where(wanted, so / (1 + so), 0.0)
    unlikely = (so > math.exp(MAX_EXCESS) / 2).nonzero().squeeze(1)  # rare: e_k saturates
    exact_head = head._replace(matmul_dtype=plan.sum_dtype)
    most = max(1, plan.elements // len(head.weight))
    for rows in _split(unlikely, most):
        logps[rows], entropy[rows], exact = _unlikely_rows(exact_head, hidden[rows], targets[rows])
        if needs_grad is not None:
            direction[rows] = (exact * needs_grad[rows, None]).to(hidden.dtype)
            scale[rows] = 1.0
    return _Scan(logps, entropy, direction, scale)


def _scan_rows(
    plan: TilePlan,
    head: _Head,
    hidden: Tensor,
    targets: Tensor,
    needs_grad: bool,
    buffers: Pair,
) -> Pair:
    """so and sz of the rows of a tile, (2, R), and their direction, (R, H), which is 0 without gradient."""
    product = head.target_products(hidden, targets)  # (R,)
    origin = product  # z_y / gain
    if not head.is_linear:
        origin = head.finish(product.clone(), targets)  # z_y
    sums = hidden.new_zeros(2, len(hidden), dtype=plan.sum_dtype)
    others = torch.zeros_like(hidden, dtype=plan.sum_dtype)  # sum_{k != y} e_k c_k W_k / gain
    for columns in plan.columns:
        shape = len(hidden), columns.stop - columns.start
        tile, e = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        mass = product + torch.log1p(sums[0]) / head.gain
        products, base = _products(plan, head, hidden, columns, tile, mass)
        if head.is_linear:
            z = products
            start = origin - base
            gain = head.gain
        else:
            products = products.to(plan.sum_dtype).add_(base[:, None])
            z = head.finish(products, columns)
            start = origin
            gain = 1.0
        _leave_out(z, targets - columns.start)
        slope = head.slope(z) if needs_grad else None
        parts = [plan.exponentials(z[block], start[block], gain, e[block]) for block in _blocks(z)]
        so_and_sz = torch.cat(parts, dim=1)  # of this tile
        sums += so_and_sz
        if needs_grad:
            divisor = so_and_sz[0] if e.dtype == torch.float16 else None
            _add_product(others, _times(e, slope), head.weight[columns], divisor, plan.is_wide)
    if needs_grad:
        _subtract_from_target(others, sums[0], head, targets, head.slope(origin))
    return sums, others


def _products(
    plan: TilePlan,
    head: _Head,
    hidden: Tensor,
    columns: slice,
    out: Tensor,
    mass: Tensor,
) -> Pair:
    """hidden @ weight[columns].T minus a base, (R, C), and the base, (R,).

    Half precision is most accurate near 0: the base is ``mass``, the product at which most of a row's mass lies. The
    first tile, which estimates it, is computed in the dtype of sums.
    """
    base = torch.zeros_like(mass)
    if plan.tile_dtype == plan.sum_dtype:
        return head.products(hidden, columns, out=out), base
    if columns.start == 0:
        exact_head = head._replace(matmul_dtype=plan.sum_dtype)
        return exact_head.products(hidden, columns), base
    largest = torch.finfo(out.dtype).max
    base = mass.clamp(0.0, largest).to(out.dtype)  # it is rarely below 0
    return head.products(hidden, columns, base, out=out), base


def _subtract_from_target(
    others: Tensor,
    so: Tensor,
    head: _Head,
    targets: Tensor,
    slope: Tensor | None,
) -> None:
    """sum_{k != y} e_k c_k W_k / gain -> (c_y W_y - that / so), in place. Shape (R, H)."""
    own_rows = head.weight[targets].to(others.dtype)
    if slope is not None:
        own_rows *= slope[:, None]
    others /= so[:, None].clamp(min=torch.finfo(so.dtype).tiny)
    torch.sub(own_rows, others, out=others)
    others *= head.gain


def _in_threads(work: Callable[..., None], items: list[Any], device: torch.device) -> None:
    """``work`` on the items; on a CPU in as many Python threads as PyTorch has, each of which takes the next free item.

    The operations on a tile are many and short. Threads of PyTorch that share each of them mostly wait for one another,
    most of all where another program uses a core.
    """
    allowed = torch.get_num_threads()
    threads = min(allowed, len(items)) if device.type == "cpu" else 1
    if threads <= 1:
        return work(items)
    remaining = iter(items)
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode(inference), torch.no_grad():  # a new thread starts with gradients on
            work(remaining)

    try:
        with ThreadPoolExecutor(threads) as pool:
            started = [pool.submit(run) for _ in range(threads)]
            for future in started:
                future.result()
    finally:
        torch.set_num_threads(allowed)  # of threads that are yet to start


def _row_tiles(needs_grad: Tensor, size: int) -> list[Any]:
    """Indices of up to ``size`` rows that need a gradient, True; then those of the others, False."""
    order = (~needs_grad).int().argsort(stable=True)
    count = int(needs_grad.sum())  # one wait for the device
    tiles = []
    for part, flag in ((order[:count], True), (order[count:], False)):
        tiles += [(tile, flag) for tile in _split(part, size)]
    return tiles


def _leave_out(z: Tensor, target: Tensor) -> None:
    """Write -inf at each row's target, whose exponential is then 0; targets outside the tile are ignored."""
    inside = (target >= 0) & (target < z.shape[1])
    at = torch.arange(len(z), device=z.device), target.clamp(0, z.shape[1] - 1)
    z.index_put_(at, z[at].masked_fill(inside, -math.inf))


def _exponentials(z: Tensor, origin: Tensor, gain: float, out: Tensor) -> Tensor:
    """e_k = exp(gain * (z_k - origin)) into ``out``, and sum e_k and sum e_k ln e_k. Shape (R, C) -> (2, R).

    In float16 (6e-8 to 65504) ``out`` is divided by its row's sum.
    """
    excess = z - origin[:, None]  # in the dtype of the origin
    if gain != 1.0:
        excess *= gain
    excess.clamp_(-MAX_DEFICIT, MAX_EXCESS)
    e = torch.exp(excess, out=out) if out.dtype == excess.dtype else excess.exp()
    so = e.sum(-1)
    sz = excess.mul_(e).sum(-1)
    if out.dtype == torch.float16:
        out.copy_(e / so[:, None].clamp(min=torch.finfo(e.dtype).tiny))
    elif e is not out:
        out.copy_(e)
    return torch.stack((so, sz))


@cache
def _compiled_exponentials() -> Callable[..., Tensor]:
    """:func:`_exponentials` as one kernel; without a compiler PyTorch warns once and runs it eagerly."""
    return torch._dynamo.config.patch(suppress_errors=True)(torch.compile(_exponentials, dynamic=True))


def _add_product(
    total: Tensor,
    e: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    is_wide: bool,
) -> None:
    """total += factor[:, None] * (e @ weight), summed in the dtype of ``total``."""
    if factor is not None:
        total += (e @ weight) * factor[:, None]
    elif e.dtype == total.dtype:
        total.addmm_(e, weight)
    elif is_wide:
        torch.addmm(total, e, weight, out_dtype=total.dtype, out=total)
    else:
        total += e @ weight


def _unlikely_rows(head: _Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, d logp / d hidden) by float32 log_softmax: for targets far below the largest logit."""
    _, width = _tile_size(hidden.device)
    tiles = _chunks(len(head.weight), width)
    z = torch.cat([head.finish(head.products(hidden, columns), columns) for columns in tiles], dim=-1)
    log_pi = z.log_softmax(-1)  # (R, V), no larger than a tile
    pi = log_pi.exp()
    entropy = -(pi * log_pi.clamp(min=-MAX_DEFICIT)).sum(-1)
    pi.neg_().scatter_add_(1, targets[:, None], torch.ones_like(pi[:, :1]))
    grad = _times(pi, head.slope(z)) * head.gain  # d logp / d(hidden @ weight.T)
    direction = pi.new_zeros(hidden.shape)
    for columns in tiles:
        direction += grad[:, columns] @ head.weight[columns].to(pi.dtype)
    logps = log_pi.gather(1, targets[:, None]).squeeze(1)
    return logps, entropy, direction


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32 (bfloat16 sums have errors of 1e-2 nats)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide_output(device: torch.device) -> bool:
    """Whether a matmul of half-precision factors can return its float32 sums."""
    return device.type == "cuda" and torch.version.hip is None


def _tile_size(device: torch.device) -> tuple[int, int]:
    return TILES["cuda" if device.type == "cuda" else "cpu"]


def _times(tensor: Tensor, slope: Tensor | None) -> Tensor:
    return tensor if slope is None else tensor.mul_(slope)


def _blocks(tensor: Tensor) -> list[slice]:
    """Rows to process at once: as many as fit the CPU cache; on other devices all."""
    size = len(tensor)
    if tensor.device.type == "cpu":
        size = CACHE_ELEMENTS // max(1, tensor.shape[1])
    return _chunks(len(tensor), max(1, size))


def _split(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """Equal parts of up to ``size``: threads that take one each end together."""
    if len(rows) == 0:
        return ()
    return rows.chunk(math.ceil(len(rows) / size))


def _chunks(length: int, size: int, start: int = 0) -> list[slice]:
    return [slice(at, min(at + size, length)) for at in range(start, length, size)]
