"""Last hidden states of completion tokens, by one of three routes, which :class:`Route` chooses.

* By prompt: a group of GRPO repeats one prompt G times, and its keys and values do not depend on the completions. The
  prompt runs through the model once, its cache is repeated, and the completions use the cache. Gradients sum over the
  copies. Prefix Grouper (arXiv 2506.05433) splits the attention in the same way.
* Packed: rows one after the other, without padding, where the forward keeps them apart (Unsloth).
* By row: every row as a whole. Every model has it, and the other two are compared with it.
"""

import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gtpo.errors import UsageError, first_line
from gtpo.forward.dropout import dropouts_of
from gtpo.processes import any_process

logger = logging.getLogger(__name__)

UNSLOTH_SKIPS_HEAD = "UNSLOTH_RETURN_HIDDEN_STATES"  # at 1 its CausalLM returns hidden states as logits
PACKED_TOKENS = 16_384  # of one forward pass
NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
Forward = Callable[..., Any]  # a model; keyword arguments as in Transformers
Inputs = dict[str, Any]  # with these names: prompts (B, P) and completions (B, T)


class Route:
    """Which way the hidden states of a micro-batch are computed: by prompt or packed, where this equals by row.

    Args:
        parameters: Names of the arguments that the model's forward takes.
        may_share: Whether the model may be called more than once for a micro-batch, which the route by prompt does.
        may_pack: Whether its forward may keep packed rows apart.
    """

    def __init__(self, parameters: Collection[str], may_share: bool, may_pack: bool) -> None:
        self.parameters = parameters
        self.may_share = may_share
        self.is_verified = False  # once the first batch that shares prompts has shown that both ways agree
        self.packing = Packing(may_pack)

    def states(self, forward: Forward, causal_lm: Any, inputs: Inputs) -> Tensor:
        """The state that predicts each of the N completion tokens, row by row. Shape (N, H)."""
        decoder = causal_lm.get_decoder()
        if "logits_to_keep" in self.parameters:
            forward = partial(forward, logits_to_keep=1)
        if self._shares_prompts(forward, causal_lm, inputs):
            return hidden_states_by_prompt(forward, decoder, inputs)
        packed = self.packing.hidden_states(forward, decoder, inputs, causal_lm.config)
        if packed is None:
            return hidden_states_per_completion(forward, decoder, inputs)
        return packed

    def _shares_prompts(self, forward: Forward, causal_lm: Any, inputs: Inputs) -> bool:
        """Whether rows of the micro-batch share prompts, and the model takes the route by prompt."""
        # each time: gradient checkpointing may be enabled later
        if not self.may_share or not can_encode_prompts_once(causal_lm, self.parameters):
            return False
        ids = inputs["prompt_ids"]
        distinct, _, _ = distinct_prompts(inputs)
        if not any_process(len(distinct) < len(ids), ids.device):  # all call the model as often
            return False
        if not self.is_verified:
            self.is_verified = self.may_share = are_equal(forward, causal_lm.get_decoder(), inputs)
        return self.may_share


def hidden_states_per_completion(forward: Forward, decoder: Any, inputs: Inputs) -> Tensor:
    """The state that predicts each completion token, by running every row as a whole.

    Args:
        forward: The model.
        decoder: Its body, whose output is the last hidden states.
        inputs: ``prompt_ids``, ``prompt_mask`` (B, P), ``completion_ids``, ``completion_mask`` (B, T). The masks tell
            tokens from padding, on either side.

    Returns:
        Shape (N, H) for the N tokens of ``completion_mask``, row by row.
    """
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask, is_target = token_masks(inputs)
    longest = max(mask.sum(1).max(), 1)
    order = (~mask).argsort(axis=1, kind="stable")[:, :longest]  # (B, longest), padding to the right
    rows, places = np.take_along_axis(is_target, order, 1).nonzero()  # (N,) each
    padded_right = np.take_along_axis(mask, order, 1)
    arrays = order, padded_right, rows, places - 1
    order_, mask_, rows_, predicting = (torch.from_numpy(array).to(ids.device) for array in arrays)
    with _last_hidden_states_of(decoder) as hidden_states:
        forward(input_ids=ids.gather(1, order_), attention_mask=mask_.long(), use_cache=False)
    return hidden_states[0][rows_, predicting]


def hidden_states_packed(forward: Forward, decoder: Any, inputs: Inputs) -> Tensor:
    """As :func:`hidden_states_per_completion`, with the rows one after the other in one row, without padding.

    For a forward that keeps the rows apart by Unsloth's ``packed_seq_lengths``. A call has up to ``PACKED_TOKENS``
    tokens, and one row at least.
    """
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask, is_target = token_masks(inputs)
    lengths = mask.sum(1)
    parts: list[list[int]] = []
    tokens = 0  # of the last part
    for row, length in enumerate(lengths):
        tokens += length
        if not parts or tokens > PACKED_TOKENS:
            parts.append([])
            tokens = length
        parts[-1].append(row)
    states = []
    for rows in parts:
        kept = mask[rows]
        positions = (kept.cumsum(1) - 1)[kept]
        predicting = np.flatnonzero(is_target[rows][kept]) - 1
        arrays = np.flatnonzero(kept), positions, predicting
        tokens_, positions_, predicting_ = (torch.from_numpy(array).to(ids.device) for array in arrays)
        flat_ids = ids[rows[0] : rows[-1] + 1].flatten()
        with _last_hidden_states_of(decoder) as hidden_states:
            forward(
                input_ids=flat_ids[tokens_][None],
                position_ids=positions_[None],
                packed_seq_lengths=torch.tensor(lengths[rows], dtype=torch.int32, device=ids.device),
                use_cache=False,  # with a cache Unsloth does not keep the rows apart
            )
        states.append(hidden_states[0][0, predicting_])
    return torch.cat(states)


class Packing:
    """:func:`hidden_states_packed` while the model's forward shows that it keeps the rows apart."""

    def __init__(self, possible: bool) -> None:
        self.possible = possible
        self.verified = 0  # tokens of the longest batch that was compared with single rows

    def hidden_states(self, forward: Forward, decoder: Any, inputs: Inputs, config: Any) -> Tensor | None:
        """The states, or None where the rows have to run as rows: the next call is the same.

        A sliding window counts from the start of the packed row: none that is shorter than a row of the batch.
        """
        mask, _ = token_masks(inputs)
        lengths = mask.sum(1)
        if not self.possible or len(lengths) < 2:
            return None
        window = getattr(config, "sliding_window", None)
        if window is not None and lengths.max() > window:
            return None
        try:
            if lengths.sum() > self.verified:
                self._verify(forward, decoder, inputs, lengths)
                self.verified = lengths.sum()
        except Exception as failure:  # out of memory, or a forward without packed_seq_lengths
            self.possible = False
            logger.warning("The completions of a micro-batch run as padded rows: %s.", first_line(failure))
            return None
        return hidden_states_packed(forward, decoder, inputs)  # too large for the gradient: padded rows are larger

    @torch.no_grad()
    def _verify(self, forward: Forward, decoder: Any, inputs: Inputs, lengths: Any) -> None:
        """Compare the longest row and the last one with the same rows, padded."""
        _, is_target = token_masks(inputs)
        targets = is_target.sum(1).tolist()  # tokens of each completion
        packed = hidden_states_packed(forward, decoder, inputs).split(targets)
        rows = [int(lengths.argmax()), -1]
        together = torch.cat([packed[row] for row in rows])
        if not _agree(together, hidden_states_per_completion(forward, decoder, _rows_of(inputs, rows))):
            raise UsageError("the model does not keep packed rows apart")


def host_masks(inputs: Inputs) -> Tensor:
    """``prompt_mask`` and ``completion_mask`` next to each other on the host. Bool, shape (B, P + T)."""
    return torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool().cpu()


def token_masks(inputs: Inputs) -> tuple[Any, Any]:
    """NumPy masks of all tokens and of the completions' tokens, (B, P + T); without a transfer with ``host_masks``."""
    on_host = inputs.get("host_masks")
    if on_host is None:
        on_host = host_masks(inputs)
    mask = on_host.numpy()
    is_target = mask.copy()
    is_target[:, : inputs["prompt_mask"].shape[1]] = False
    return mask, is_target


def completion_places(inputs: Inputs) -> Tensor:
    """Where the N tokens of the completions are in their flattened (B, T) tensors. Shape (N,)."""
    _, is_target = token_masks(inputs)
    width = inputs["prompt_mask"].shape[1]
    places = np.flatnonzero(is_target[:, width:])
    return torch.from_numpy(places).to(inputs["completion_ids"].device)


def hidden_states_by_prompt(forward: Forward, decoder: Any, inputs: Inputs) -> Tensor:
    """As :func:`hidden_states_per_completion`, with each distinct prompt encoded once; every process has to call it."""
    prompts, prompt_mask, prompt_of = distinct_prompts(inputs)
    completion_mask = inputs["completion_mask"]
    prompt_lengths = prompt_mask.sum(-1)
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()  # of whole sequences: the mask alone applies a sliding window
    name = cache_name(inspect.signature(decoder.forward).parameters)
    with _last_hidden_states_of(decoder) as hidden_states:
        forward(
            input_ids=prompts,
            attention_mask=prompt_mask,
            position_ids=positions,
            use_cache=True,
            **{name: cache},
        )
    last_of_prompt = hidden_states[0][:, -1:]
    parts = []
    places = []
    for rows in _rows_of_similar_length(completion_mask, prompt_mask.numel()):
        mask = completion_mask[rows]
        prompt = prompt_of[rows]
        # The last token predicts nothing. One column at least, so that every process calls the model as often.
        longest = int(mask.sum(-1).max())
        width = max(longest - 1, 1)
        seen = torch.cat([prompt_mask[prompt], mask[:, :width]], dim=1)
        steps = torch.arange(width, device=mask.device)
        with _last_hidden_states_of(decoder) as hidden_states:
            forward(
                input_ids=inputs["completion_ids"][rows, :width],
                attention_mask=seen,
                position_ids=prompt_lengths[prompt, None] + steps,
                use_cache=True,
                **{name: _repeated(cache, prompt)},
            )
        row, position = mask.nonzero(as_tuple=True)
        states = torch.cat([last_of_prompt[prompt], hidden_states[0]], dim=1)
        parts.append(states[row, position])
        places.append(rows[row] * mask.shape[1] + position)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _repeated(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache with the given rows of another, some more than once; gradients flow to the other."""
    layers: list[Any] = []
    for layer in cache.layers:
        if layer.is_initialized:
            layers.append((layer.keys[rows], layer.values[rows]))
        else:
            layers.append((None, None))
    return DynamicCache(layers)


def _rows_of_similar_length(mask: Tensor, others: int) -> tuple[Tensor, ...]:
    """The rows in one batch, or in two by length where this saves a tenth of the tokens that the model sees.

    ``mask``: of the completions, padded to the right, shape (B, T). ``others``: number of other tokens.
    """
    lengths = mask.sum(-1)
    halves = lengths.argsort(stable=True).chunk(2)
    one_batch = others + len(mask) * int(lengths.max())
    two_batches = others
    for half in halves:
        two_batches += len(half) * int(lengths[half].max())
    if any_process(two_batches < 0.9 * one_batch, mask.device):
        return halves
    return (torch.arange(len(mask), device=mask.device),)


def distinct_prompts(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The different prompts (U, P) of the rows, padded to the left, their mask (U, P), and each row's prompt (B,).

    They are as wide as the longest one. The mask tells padding: an id equal to the pad id is a token.
    """
    mask = inputs["prompt_mask"]
    width = max(int(mask.sum(-1).max()), 1)
    order = mask.argsort(dim=1, stable=True)[:, -width:]
    ids = inputs["prompt_ids"].gather(1, order)
    mask = mask.gather(1, order)
    both, prompt_of = torch.cat([ids * mask, mask], dim=1).unique(dim=0, return_inverse=True)
    return both[:, :width], both[:, width:], prompt_of


def can_encode_prompts_once(causal_lm: Any, parameters: Collection[str]) -> bool:
    """Whether a model takes a cache while it trains.

    Not with gradient checkpointing, which disables the cache, nor with dropout, which samples a mask per completion.
    States (of convolutions, of linear attention) cannot be repeated. Positions must not depend on the other rows.
    ``parameters``: the names that its forward takes.
    """
    if "position_ids" not in parameters or not cache_name(parameters):
        return False
    if causal_lm.is_gradient_checkpointing or getattr(causal_lm, "_is_stateful", False):
        return False
    for layer in DynamicCache(config=causal_lm.config).layers:
        if not isinstance(layer, DynamicLayer):
            return False
    if dropouts_of(causal_lm):
        return False
    for module in causal_lm.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:  # that of LoRA is not in the config
            return False
    return not positions_depend_on_length(causal_lm)


def cache_name(parameters: Collection[str]) -> str:
    """The one of a forward's parameters that is its KV cache, renamed in Transformers 5.24; "" where none is."""
    return next((name for name in ("cache", "past_key_values") if name in parameters), "")


def positions_depend_on_length(model: torch.nn.Module) -> bool:
    """Whether the frequencies of the rotary positions follow the longest row of a batch (``dynamic``, ``longrope``)."""
    for module in model.modules():  # Gemma 3: one per kind of layer
        rope_type = str(getattr(module, "rope_type", ""))
        if "dynamic" in rope_type or "longrope" in rope_type:
            return True
    return False


@torch.no_grad()
def are_equal(forward: Forward, decoder: Any, inputs: Inputs) -> bool:
    """Whether both ways agree on a batch, up to rounding; every process has to call it.

    The test batch has the first and the last row once, and twice with half of their prompt. It contains shared prompts
    and prompts of different lengths.
    """
    batch = _rows_of(inputs, [0, -1, 0, -1, 0, -1])
    mask = batch["prompt_mask"]
    half = mask.sum(-1, keepdim=True) // 2
    half[:2] = 0
    batch["prompt_mask"] = mask * (mask.cumsum(-1) > half)
    plain = hidden_states_per_completion(forward, decoder, batch)
    reason = "the model's cache changes its hidden states"
    try:
        agrees = _agree(hidden_states_by_prompt(forward, decoder, batch), plain)
    except Exception as failure:  # a model that takes another cache raises various errors
        agrees = False
        reason = f"the model does not take the cache ({first_line(failure)})"
    if any_process(not agrees, plain.device):
        logger.warning("Each prompt is encoded once per completion: %s.", reason)
        return False
    return True


def _rows_of(inputs: Inputs, rows: list[int]) -> Inputs:
    return {name: inputs[name][rows] for name in NAMES}


def _agree(states: Tensor, plain: Tensor) -> bool:
    """Whether they are equal up to the rounding of the dtype that the model computes in; NaN is not."""
    device = plain.device.type
    dtype = plain.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    states, plain = states.float(), plain.float()
    return bool((states - plain).norm() < torch.finfo(dtype).eps ** 0.5 * plain.norm())


def hidden_states_and_logits(model: Forward, decoder: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden states (T, H) of one sequence of ids, shape (T,), and the logits (T, V) of the same pass."""
    with _last_hidden_states_of(decoder, skips_head=False) as hidden_states:
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits
    return hidden_states[0][0], logits[0]


@contextmanager
def _last_hidden_states_of(decoder: Any, skips_head: bool = True) -> Iterator[list[Tensor]]:
    """Collect the last hidden states (B, T, H) that the decoder returns in each of its calls; UsageError if none."""
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if isinstance(output, tuple):
            states = output[0]
        if states is not None:
            seen.append(states)

    hook = decoder.register_forward_hook(keep)
    before = os.environ.get(UNSLOTH_SKIPS_HEAD, "0")
    os.environ[UNSLOTH_SKIPS_HEAD] = str(int(skips_head))
    try:
        yield seen
    finally:
        os.environ[UNSLOTH_SKIPS_HEAD] = before
        hook.remove()
    if not seen:
        raise UsageError(
            f"the forward of this model does not return hidden states of its {type(decoder).__name__}, from which the "
            "loss is computed: train it with TRL's GRPOTrainer, or pick another model."
        )
