"""Generation with Transformers: the arguments and the distribution of ``model.generate``, in less time.

* Each distinct prompt is encoded once; its KV cache is repeated for its completions.
* The cache has room for all tokens from the start: a token is written in place, where ``DynamicCache`` copies all.
* A LoRA adapter is merged while generating, into copies of the weights. On a CPU large weights are packed.
* Finished completions leave the batch. The random numbers of a completion do not depend on the others.

``model.generate`` handles everything else: beam search, settings that are not in ``_SETTINGS``, other caches (sliding
windows, states), positions that depend on the longest row, models with their own generation inputs.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from gtpo.errors import UsageError
from gtpo.forward.hidden_states import Forward, cache_name, positions_depend_on_length

Linear = Callable[[Tensor], Tensor]

LARGE = 2**18  # entries of a weight

# Fields of a GenerationConfig that may differ from Transformers' defaults.
_SETTINGS = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "pad_token_id",
    "bos_token_id", "eos_token_id", "disable_compile", "transformers_version", "_from_model_config",
}  # fmt: skip


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation_config: GenerationConfig,
    streamer: Any = None,
) -> Tensor:
    """The prompts and their completions, as ``model.generate`` returns them.

    Args:
        model: A CausalLM of Transformers with whole weights, without the wrapper of PEFT.
        input_ids: Prompts, padded to the left. Shape (B, P).
        attention_mask: 1 on the tokens of a prompt. Shape (B, P).
        generation_config: How to sample.
        streamer: Gets the prompts, then the next token of each row; padding of a row that is finished.

    Returns:
        Shape (B, P + T), rows padded to the right.

    Raises:
        UsageError: If the model trains with gradient checkpointing: Transformers then disables the cache, in silence.
    """
    if model.training and model.is_gradient_checkpointing:
        raise UsageError("gradient checkpointing disables the cache: call model.eval() before generate.")
    config, _ = model._prepare_generation_config(generation_config)
    if not _is_supported(model, config):
        return model.generate(
            input_ids, attention_mask=attention_mask, generation_config=generation_config, streamer=streamer
        )
    model._prepare_special_tokens(config, device=input_ids.device)
    with fast_layers(model, len(input_ids)):
        return _decode(model, input_ids, attention_mask, config, streamer)


def _is_supported(model: Any, config: GenerationConfig) -> bool:
    accepted = inspect.signature(model.forward).parameters
    defaults = config._get_default_generation_params()
    given = config.to_diff_dict()
    settings = {name for name, value in given.items() if (value or None) != (defaults.get(name) or None)}
    return (
        settings <= _SETTINGS
        and model.device.type != "mps"  # it has no float64, which _sample draws with
        and config.max_new_tokens is not None
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and accepted.keys() >= {"attention_mask", "position_ids", "logits_to_keep"}
        and bool(cache_name(accepted))
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
        and not positions_depend_on_length(model)
    )


def _decode(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    config: GenerationConfig,
    streamer: Any,
) -> Tensor:
    """The prompts and their completions, token by token."""
    batch = _Batch(model, input_ids, attention_mask, config)
    processors = model._get_logits_processor(
        config, batch.end, input_ids, None, LogitsProcessorList(), device=input_ids.device, model_kwargs={}
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    logits = batch.read_prompts()
    while True:
        scores = processors(batch.open_tokens, logits.float())
        if config.do_sample:
            draws = torch.rand(len(input_ids), dtype=torch.float64, device=scores.device)  # also for finished rows
            tokens = _sample(scores, draws[batch.open])
        else:
            tokens = scores.argmax(-1)
        batch.append(tokens)
        if streamer is not None:
            streamer.put(batch.tokens[:, batch.end - 1].cpu())
        if batch.is_finished:
            break
        logits = batch.read_last()
    if streamer is not None:
        streamer.end()
    return batch.tokens[:, : batch.end]


class _Batch:
    """The rows while they are generated, and what the model has read of those that are not finished.

    B rows of at most L = P + ``max_new_tokens`` tokens; O of them are open, fewer with each end token.

    Attributes:
        tokens: Prompts, completions, and padding after them. Shape (B, L).
        end: How many columns of them are written.
        open: The rows that are open, ascending. Shape (O,).
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor, config: GenerationConfig) -> None:
        rows, self.end = input_ids.shape
        self.length = self.end + config.max_new_tokens
        self.tokens = input_ids.new_full((rows, self.length), config.pad_token_id or 0)
        self.tokens[:, : self.end] = input_ids
        self.open = torch.arange(rows, device=input_ids.device)
        self.end_ids = config._eos_token_tensor
        self.mask = attention_mask.new_ones(rows, self.length)  # (O, L)
        self.mask[:, : self.end] = attention_mask
        self.is_padded = not attention_mask.all()
        self.positions = attention_mask.sum(-1)  # of the next tokens, (O,)
        self.cache = DynamicCache(config=model.config)
        self.cache.layers = [_RoomyLayer(self.length) for _ in self.cache.layers]
        name = cache_name(inspect.signature(model.forward).parameters)
        self.forward = partial(model, **{name: self.cache}, use_cache=True, logits_to_keep=1, return_dict=True)

    @property
    def open_tokens(self) -> Tensor:
        """Prompts and completions of the open rows so far. Shape (O, ``end``)."""
        return self.tokens[self.open, : self.end]

    @property
    def is_finished(self) -> bool:
        """Whether no row is open, or no column is left."""
        return len(self.open) == 0 or self.end == self.length

    def read_prompts(self) -> Tensor:
        """Logits after the prompts, (B, V)."""
        width = self.end
        return _prefill(self.forward, self.cache, self.tokens[:, :width], self.mask[:, :width])

    def append(self, tokens: Tensor) -> None:
        """The next token of each open row, (O,). Those with an end token are finished, and leave."""
        self.tokens[self.open, self.end] = tokens
        self.end += 1
        if self.end_ids is None:
            return
        is_open = ~torch.isin(tokens, self.end_ids)
        if not is_open.all():
            kept = is_open.nonzero()[:, 0]
            self.open = self.open[kept]
            self.mask = self.mask[kept]
            self.positions = self.positions[kept]
            self.cache.batch_select_indices(kept)

    def read_last(self) -> Tensor:
        """Logits after the last token of each open row, (O, V)."""
        output = self.forward(
            input_ids=self.tokens[self.open, self.end - 1 : self.end],
            attention_mask=self.mask[:, : self.end] if self.is_padded else None,
            position_ids=self.positions[:, None],
        )
        self.positions = self.positions + 1
        return output.logits[:, -1]


def _prefill(forward: Forward, cache: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits after each prompt, (B, V); each distinct prompt runs once, and the cache then has a row for each of B."""
    width = input_ids.shape[1]
    both = torch.cat([input_ids, attention_mask], dim=1)
    distinct, prompt_of_row = both.unique(dim=0, return_inverse=True)  # (D, 2 P), (B,)
    mask = distinct[:, width:]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = forward(
        input_ids=distinct[:, :width],
        attention_mask=None if mask.all() else mask,
        position_ids=positions,
    )
    cache.batch_select_indices(prompt_of_row)
    return output.logits[prompt_of_row, -1]


def _sample(scores: Tensor, draws: Tensor) -> Tensor:
    """One token per row, by inversion of the cumulative distribution. ``draws``: uniform in [0, 1), float64. (B,)"""
    cumulative = torch.softmax(scores, dim=-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not total.isfinite().all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")  # as torch.multinomial
    return torch.searchsorted(cumulative, draws[:, None] * total, right=True)[:, 0]


class _RoomyLayer(DynamicLayer):
    """A layer of the cache with room for ``room`` tokens."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = []
            for states in (key_states, value_states):
                rows, heads, _, width = states.shape
                self.buffers.append(states.new_empty(rows, heads, self.room, width))
        self._show(end)
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        for number, buffer in enumerate(self.buffers):
            self.buffers[number] = buffer.new_empty(len(indices), *buffer.shape[1:])
            self.buffers[number][:, :, :length] = buffer[indices, :, :length]
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


@contextmanager
def fast_layers(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, linear layers compute the same in less time; no weight changes, so nothing has to be restored.

    * A LoRA layer is one matmul with W + BA. Layers with quantized or 16-bit weights, which would round a small update
      away, with DoRA, dropout or several active adapters are not changed.
    * On a CPU large weights are packed for batches of ``rows``, as ``torch.compile`` does.

    Under autocast, which accelerate may put into ``model.forward``, nothing changes: weights are rounded in each call.
    """
    replaced: list[nn.Module] = []
    inside: set[nn.Module] = set()  # layers that another one replaces, or whose weight it changes in its forward
    device = next(model.parameters()).device.type
    autocast = "forward" in model.__dict__ or torch.is_autocast_enabled(device)
    try:
        for module in () if autocast else model.modules():
            forward = None
            if isinstance(module, BaseTunerLayer):
                if _can_merge(module):
                    forward = _fast_lora(module, rows)
                if forward or type(module) is not lora.Linear:
                    inside.add(module.get_base_layer())
            elif module not in inside:
                forward = _packed(module, rows)
            if forward is not None:
                replaced.append(module)
                module.forward = forward
        yield
    finally:
        for module in replaced:
            del module.forward


def _can_merge(layer: Any) -> bool:
    if type(layer) is not lora.Linear:
        return False
    base = layer.base_layer
    return (
        "forward" not in layer.__dict__
        and type(base) is nn.Linear
        and "forward" not in base.__dict__  # hooks of accelerate
        and base.weight.dtype == torch.float32
        and len(layer.active_adapters) == 1
        and not layer.disable_adapters
        and not layer.merged
        and not layer.lora_variant  # DoRA and others
        and not any(layer.lora_bias.values())
        and not any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in layer.lora_dropout.values())
    )


def _fast_lora(layer: Any, rows: int) -> Linear:
    [name] = layer.active_adapters
    weight = layer.base_layer.weight.data
    bias = layer.base_layer.bias
    if name in layer.lora_A:
        weight = weight + layer.get_delta_weight(name)
    return _linear(weight, bias, rows)


def _packed(module: nn.Module, rows: int) -> Linear | None:
    """The forward of a large linear layer without an adapter; None: as it is."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return None
    if not _is_large(module.weight):
        return None
    return _linear(module.weight.data, module.bias, rows)


def _linear(weight: Tensor, bias: Tensor | None, rows: int) -> Linear:
    """The forward of a linear layer with this weight, packed if it is large."""
    if not _is_large(weight):
        return partial(functional.linear, weight=weight, bias=bias)
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, rows)
    return lambda hidden: ops._linear_pointwise(hidden, packed, bias, "none", [], "")


def _is_large(weight: Tensor) -> bool:
    """Whether packing pays: below, calling the operator takes longer than it saves."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and weight.numel() >= LARGE
    )
