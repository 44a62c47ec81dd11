"""Log-probabilities and entropy of the language-model head, tile by tile, without the (B, T, V) logits.

Shapes: N tokens, H hidden size, V vocabulary; R rows and C columns of a tile. Needs torch only.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

TILES = {"cpu": (1024, 4096), "cuda": (4096, 16384)}  # rows and columns of the largest block of logits in memory
MIN_ROWS = 256  # of a tile of one of several CPU threads
CACHE_ELEMENTS = 2**17  # elements processed at once on a CPU: two float32 copies fit its cache
COMPILE = True  # on CUDA, the elementwise work between the two matmuls
MAX_EXCESS = 68.0  # e^68 ~ 3e29: a logit this far above the target's still sums in float32
MAX_DEFICIT = 1e4  # e^-1e4 = 0 in float64 too, and 0 * 1e4 is finite where 0 * inf is not
_plain = False  # set once a fast CUDA route has raised: wide matmul outputs and the compiled kernel are then left out


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
    """ln pi(target) and the entropy of pi = softmax(z), row by row, without storing the logits z.

        z = logit_scale * (hidden @ weight.T + bias) / temperature, or with a soft cap
        z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature

    The logits are computed tile by tile, relative to the target's own: with e_k = exp(z_k - z_y),
    so = sum_{k != y} e_k and sz = sum_{k != y} e_k (z_k - z_y),

        ln pi_y = -log1p(so),    H = log1p(so) - sz / (1 + so),    1 - pi_y = so / (1 + so),
        d ln pi_y / dh = (1 - pi_y) (c_y W_y - sum_{k != y} e_k c_k W_k / so),    c = dz / d(hidden @ weight.T),

    where nothing cancels for pi_y close to 1. With a frozen head (LoRA), the forward computes d ln pi_y / dh on the
    same tile (two matmuls in total) and the backward scales it. With a trainable ``weight`` or ``bias``, the backward
    recomputes the tiles (four matmuls in total, in float32). Autocast has no effect: the matmuls run in the dtype of
    ``weight``, the sums in float32 (float64).

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
        ValueError: If the shapes disagree, or the temperature, scale or cap is not positive.
    """
    if grad_rows is None:
        grad_rows = torch.ones_like(targets, dtype=torch.bool)
    expected = (len(targets), weight.shape[-1]), (len(weight), hidden.shape[-1]), hidden.shape[:1], hidden.shape[:1]
    found = tuple(tensor.shape for tensor in (hidden, weight, targets, grad_rows))
    if found != expected or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            "expected hidden (N, H), weight (V, H), targets (N,), grad_rows (N,) and bias (V,), got "
            f"{', '.join(map(str, map(tuple, found)))} and {bias if bias is None else tuple(bias.shape)}: flatten the "
            "completion tokens first."
        )
    if not (temperature > 0 and logit_scale > 0 and (softcap is None or softcap > 0)):
        raise ValueError(
            f"temperature {temperature}, logit_scale {logit_scale} and softcap {softcap} must be positive."
        )
    trainable_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    function = _TrainableHead if trainable_head else _FrozenHead
    return function.apply(hidden, weight, bias, targets, grad_rows, temperature, logit_scale, softcap)


class _FrozenHead(torch.autograd.Function):
    """Forward computes logp, entropy and d logp / d hidden in one pass over the tiles; backward scales."""

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
    """Forward as with a frozen head, without the gradient; backward recomputes each tile of logits.

    The matmuls are float32 (float64): the logits of the backward must agree with those that the forward normalized.
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
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        head = _Head(weight, bias, logps.dtype, *ctx.settings)
        upstream = torch.where(grad_rows, grad_logps, 0.0) * head.gain
        zeros = partial(torch.zeros, dtype=logps.dtype, device=logps.device)
        grad_hidden, grad_bias = zeros(hidden.shape), zeros(len(weight))
        grad_weight = zeros(weight.shape) if trains_weight else zeros(0)
        tile_rows, tile_columns = _tile_size(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(len(hidden), tile_rows):
                surprise = -torch.expm1(logps[rows, None])  # 1 - pi_y without cancellation
                z_y = head.finish(head.target_products(hidden[rows], targets[rows]), targets[rows])
                for columns in _chunks(len(weight), tile_columns):
                    z = head.finish(head.products(hidden[rows], columns), columns)
                    pi = (z - (z_y - logps[rows])[:, None]).clamp_(-MAX_DEFICIT, 0.0).exp_()
                    is_target = targets[rows, None] == torch.arange(columns.start, columns.stop, device=targets.device)
                    grad = torch.where(is_target, surprise, -pi) * upstream[rows, None]
                    grad = _times(grad, head.slope(z))
                    grad_hidden[rows] += grad @ weight[columns].to(logps.dtype)
                    if trains_weight:
                        grad_weight[columns] += grad.T @ hidden[rows].to(logps.dtype)
                    grad_bias[columns] += grad.sum(0)
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype) if trains_weight else None,
            grad_bias.to(bias.dtype) if bias is not None and trains_bias else None,
            *[None] * 5,
        )


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
        """dz / d(hidden @ weight.T), as a multiple of gain: 1 - tanh^2 with a soft cap; None stands for 1."""
        if self.softcap is None:
            return None
        return 1 - (z * (self.temperature / self.softcap)).clamp_(-1, 1).square_()

    def target_products(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden . weight[target], summed in float32 (float64). Shape (R, H), (R,) -> (R,)."""
        products = torch.empty(len(hidden), dtype=_sum_dtype(hidden), device=hidden.device)
        for rows in _blocks(hidden):
            products[rows] = (hidden[rows].to(products.dtype) * self.weight[targets[rows]].to(products.dtype)).sum(-1)
        return products


Scan = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # logps, entropy, direction, length: see _one_pass


def _scan(head: _Head, hidden: Tensor, targets: Tensor, wanted: Tensor | None) -> Scan:
    """:func:`_one_pass`; once a fast CUDA route raises, by the operations that every device has."""
    global _plain
    try:
        return _one_pass(head, hidden, targets, wanted)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a driver, GPU or PyTorch without these operations raises various errors
        if not _wide_output(hidden.device) and not _compiled(hidden.device):
            raise
        _plain = True
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        logger.warning("the CUDA path of the LM head failed; the plain one is used from now on: %s", reason)
    return _one_pass(head, hidden, targets, wanted)


def _one_pass(head: _Head, hidden: Tensor, targets: Tensor, wanted: Tensor | None) -> Scan:
    """One pass over the tiles.

    Returns:
        logps (N,), entropy (N,) and, unless ``wanted`` is None, the gradient d logp / d hidden of the wanted rows (zero
        elsewhere) as direction (N, H) times length (N,). The length is 1 - pi_y: without it, the direction keeps its
        precision in float16 too, where p = 1 - 1e-7 would leave none.
    """
    dtype, device = _sum_dtype(hidden), hidden.device
    tile_rows, tile_columns = _tile_size(device)
    if device.type == "cpu":  # the tiles of all threads together are as large as one
        tile_rows = min(tile_rows, max(MIN_ROWS, tile_rows // torch.get_num_threads()))
    wide = _wide_output(device) and head.matmul_dtype != dtype
    tile_dtype = dtype if wide else head.matmul_dtype
    compiled = _compiled(device)
    exponentials = _compiled_exponentials() if compiled else _exponentials
    apart = wide or compiled  # otherwise the exponentials overwrite the logits
    rounds = tile_dtype != dtype
    first = tile_columns // 16 if rounds else 0  # a narrow float32 tile estimates where a row's mass lies
    column_tiles = [slice(0, min(first, len(head.weight)))] if first else []
    column_tiles += _chunks(len(head.weight), tile_columns, start=first)

    so, sz = torch.zeros(2, len(hidden), dtype=dtype, device=device)
    direction = None if wanted is None else torch.zeros_like(hidden)

    def scan(row_tiles: Iterable[tuple[Tensor, bool]]) -> None:
        size = min(tile_rows, len(hidden)) * min(tile_columns, len(head.weight))
        tile_buffer = torch.empty(size, dtype=tile_dtype, device=device)
        e_buffer = torch.empty(size, dtype=head.matmul_dtype, device=device) if apart else tile_buffer
        for rows, with_gradient in row_tiles:
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
                else:  # half precision is most accurate near 0: shift that to the row's mass
                    base = product + torch.log1p(sums[0]) / head.gain
                    base = base.clamp(0.0, torch.finfo(tile.dtype).max).to(tile.dtype)  # it is rarely below 0
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

    _in_threads(scan, _row_tiles(wanted, len(hidden), tile_rows, device), device)
    logps, entropy = -torch.log1p(so), torch.log1p(so) - sz / (1 + so)
    length = None if wanted is None else torch.where(wanted, so / (1 + so), 0.0)

    unlikely = (so > math.exp(MAX_EXCESS) / 2).nonzero().squeeze(1)  # rare: e_k saturates
    for few in _split(unlikely, max(1, tile_rows * tile_columns // len(head.weight))):
        logps[few], entropy[few], exact = _unlikely_rows(head._replace(matmul_dtype=dtype), hidden[few], targets[few])
        if direction is not None and length is not None and wanted is not None:
            direction[few], length[few] = (exact * wanted[few, None]).to(direction.dtype), 1.0
    return logps, entropy, direction, length


def _in_threads(work: Callable[[Iterable[Any]], None], items: Sequence[Any], device: torch.device) -> None:
    """``work`` on the items; on a CPU in as many Python threads as PyTorch has, each of which takes the next free item.

    The operations on a tile are many and short. Threads of PyTorch that share each of them mostly wait for one another,
    most of all where another program uses a core.
    """
    allowed = torch.get_num_threads()
    threads = min(allowed, len(items)) if device.type == "cpu" else 1
    if threads <= 1:
        return work(items)
    remaining, inference = iter(items), torch.is_inference_mode_enabled()

    def run() -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode(inference), torch.no_grad():  # a new thread starts with gradients on
            work(remaining)

    try:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(run) for _ in range(threads)]:
                done.result()
    finally:
        torch.set_num_threads(allowed)  # of threads that are yet to start


def _row_tiles(wanted: Tensor | None, rows: int, size: int, device: torch.device) -> list[tuple[Tensor, bool]]:
    """Indices of up to ``size`` rows that need a gradient, True; then those of the others, False."""
    if wanted is None:
        parts = [(torch.arange(rows, device=device), False)]
    else:
        order, count = (~wanted).int().argsort(stable=True), int(wanted.sum())  # one wait for the device
        parts = [(order[:count], True), (order[count:], False)]
    return [(tile, flag) for part, flag in parts for tile in _split(part, size)]


def _leave_out(z: Tensor, target: Tensor) -> None:
    """Write -inf at each row's target, whose exponential is then 0; targets outside the tile are ignored."""
    inside = (target >= 0) & (target < z.shape[1])
    at = torch.arange(len(z), device=z.device), target.clamp(0, z.shape[1] - 1)
    z.index_put_(at, z[at].masked_fill(inside, -math.inf))


def _exponentials(z: Tensor, origin: Tensor, gain: float, out: Tensor) -> Tensor:
    """e_k = exp(gain * (z_k - origin)) into ``out``, and sum e_k and sum e_k ln e_k. Shape (R, C) -> (2, R).

    In float16 (6e-8 to 65504) ``out`` is divided by its row's sum.
    """
    excess = z - origin[:, None] if z.dtype == origin.dtype else z.to(origin.dtype).sub_(origin[:, None])
    if gain != 1.0:
        excess *= gain
    excess.clamp_(-MAX_DEFICIT, MAX_EXCESS)
    e = torch.exp(excess, out=out) if out.dtype == excess.dtype else excess.exp()
    so = e.sum(-1)
    if e is not out:
        out.copy_(e / so[:, None].clamp(min=torch.finfo(e.dtype).tiny) if out.dtype == torch.float16 else e)
    return torch.stack((so, excess.mul_(e).sum(-1)))


@cache
def _compiled_exponentials() -> Callable[..., Tensor]:
    """:func:`_exponentials` as one kernel; without a compiler PyTorch warns once and runs it eagerly."""
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
    """(logps, entropy, d logp / d hidden) by float32 log_softmax: for targets far below the largest logit."""
    tiles = _chunks(len(head.weight), _tile_size(hidden.device)[1])
    z = torch.cat([head.finish(head.products(hidden, columns), columns) for columns in tiles], dim=-1)
    log_pi = z.log_softmax(-1)  # (few, V), no larger than a tile
    pi = log_pi.exp()
    entropy = -(pi * log_pi.clamp(min=-MAX_DEFICIT)).sum(-1)
    pi.neg_().scatter_add_(1, targets[:, None], torch.ones_like(pi[:, :1]))
    grad = _times(pi, head.slope(z)) * head.gain  # d logp / d(hidden @ weight.T)
    direction = torch.zeros(hidden.shape, dtype=pi.dtype, device=pi.device)
    for columns in tiles:
        direction += grad[:, columns] @ head.weight[columns].to(pi.dtype)
    return log_pi.gather(1, targets[:, None]).squeeze(1), entropy, direction


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32 (bfloat16 sums have errors of 1e-2 nats)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide_output(device: torch.device) -> bool:
    """Whether a matmul of half-precision factors can return its float32 sums."""
    return device.type == "cuda" and torch.version.hip is None and not _plain


def _compiled(device: torch.device) -> bool:
    return device.type == "cuda" and COMPILE and not _plain


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
    return rows.chunk(math.ceil(len(rows) / size)) if len(rows) else ()


def _chunks(length: int, size: int, start: int = 0) -> list[slice]:
    return [slice(at, min(at + size, length)) for at in range(start, length, size)]
