"""Generation with Transformers: the arguments and the distribution of ``model.generate``, in less time.

* Each distinct prompt is encoded once; its KV cache is repeated for its completions.
* The cache has room for all tokens from the start: a token is written in place, where ``DynamicCache`` copies all.
* A LoRA adapter is merged while generating. The base layers get other tensors and then their own back, bit for bit.
* Finished completions leave the batch. The draws of a completion do not depend on the others.

Anything else goes to ``model.generate``: beam search, settings that are not in ``_SETTINGS``, caches of another kind
(sliding windows, states), models with their own inputs for generation, weights that are spread over processes.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.pytorch_utils import Conv1D

# Fields of a GenerationConfig that may differ from Transformers' defaults.
_SETTINGS = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "pad_token_id", "bos_token_id", "eos_token_id", "disable_compile", "transformers_version", "_from_model_config",
}  # fmt: skip


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation_config: GenerationConfig,
    streamer: Any = None,
    **inputs: Any,
) -> Tensor:
    """The prompts and their completions, as ``model.generate`` returns them.

    Args:
        model: A CausalLM of Transformers, without the wrapper of PEFT.
        input_ids: Prompts, padded to the left. Shape (B, P).
        attention_mask: 1 on the tokens of a prompt. Shape (B, P).
        generation_config: How to sample.
        streamer: Gets the prompts, then the next token of each row; padding of a row that is finished.
        inputs: Further inputs of the model; ``model.generate`` then.

    Returns:
        Shape (B, P + T), rows padded to the right.
    """
    config, _ = model._prepare_generation_config(generation_config)
    if inputs or not _is_covered(model, config):
        arguments = {"attention_mask": attention_mask, "generation_config": generation_config, "streamer": streamer}
        return type(model).generate(model, input_ids, **arguments, **inputs)
    model._prepare_special_tokens(config, device=input_ids.device)
    with merged_adapter(model):
        return _decode(model, input_ids, attention_mask, config, streamer)


def _is_covered(model: Any, config: GenerationConfig) -> bool:
    accepted = inspect.signature(model.forward).parameters
    defaults = config._get_default_generation_params()
    settings = {
        name for name, value in config.to_diff_dict().items() if (value or None) != (defaults.get(name) or None)
    }
    return (
        settings <= _SETTINGS
        and config.max_new_tokens is not None
        and not model.config.is_encoder_decoder
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and accepted.keys() >= {"attention_mask", "position_ids", "past_key_values", "logits_to_keep"}
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
        and not is_deepspeed_zero3_enabled()
        and not is_fsdp_managed_module(model)
        and all(type(parameter.data) is Tensor for parameter in model.parameters())  # no DTensor
    )


def _decode(model: Any, input_ids: Tensor, attention_mask: Tensor, config: GenerationConfig, streamer: Any) -> Tensor:
    rows, width = input_ids.shape
    length = width + config.max_new_tokens
    end_ids = torch.tensor([], device=input_ids.device) if config.eos_token_id is None else config._eos_token_tensor
    processors = model._get_logits_processor(
        config, width, input_ids, None, LogitsProcessorList(), device=input_ids.device, model_kwargs={}
    )
    output = input_ids.new_full((rows, length), 0 if config.pad_token_id is None else config.pad_token_id)
    output[:, :width] = input_ids
    mask = attention_mask.new_ones(rows, length)
    mask[:, :width] = attention_mask
    is_padded = not bool(attention_mask.all())
    next_positions = attention_mask.sum(-1, keepdim=True)
    if streamer is not None:
        streamer.put(input_ids.cpu())

    prompt_of_row, first_row = _distinct(input_ids, attention_mask)
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoomyLayer(length) for _ in cache.layers]
    call = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
    logits = model(
        input_ids=input_ids[first_row],
        attention_mask=attention_mask[first_row] if is_padded else None,
        position_ids=(attention_mask[first_row].cumsum(-1) - 1).clamp(min=0),
        **call,
    ).logits[prompt_of_row, -1]
    cache.batch_select_indices(prompt_of_row)

    open_rows = torch.arange(rows, device=input_ids.device)
    for end in range(width, length):
        scores = processors(output[open_rows, :end], logits.float())
        if config.do_sample:
            draws = torch.rand(rows, dtype=torch.float64, device=scores.device)  # also for the rows that are finished
            tokens = _sample(scores, draws[open_rows])
        else:
            tokens = scores.argmax(-1)
        output[open_rows, end] = tokens
        if streamer is not None:
            streamer.put(output[:, end].cpu())
        is_open = ~torch.isin(tokens, end_ids)
        if not is_open.all():
            kept = is_open.nonzero()[:, 0]
            open_rows, tokens, mask, next_positions = open_rows[kept], tokens[kept], mask[kept], next_positions[kept]
            cache.batch_select_indices(kept)
        if len(open_rows) == 0 or end == length - 1:
            break
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=mask[:, : end + 1] if is_padded else None,
            position_ids=next_positions,
            **call,
        ).logits[:, -1]
        next_positions = next_positions + 1
    if streamer is not None:
        streamer.end()
    return output[:, : end + 1]


def _distinct(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[int]]:
    """For each row the number of its prompt, shape (B,), and for each distinct prompt its first row."""
    keys = [tuple(row) for row in torch.cat([input_ids, attention_mask], dim=1).tolist()]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], device=input_ids.device), [keys.index(key) for key in numbers]


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
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [s.new_empty(*s.shape[:2], self.room, s.shape[-1]) for s in (key_states, value_states)]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : start + states.shape[-2]] = states
        return self._show(start + key_states.shape[-2])

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        for number, buffer in enumerate(self.buffers):
            self.buffers[number] = buffer.new_empty(len(indices), *buffer.shape[1:])
            self.buffers[number][:, :, :length] = buffer[indices, :, :length]
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)
        return self.keys, self.values


@contextmanager
def merged_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the base layers contain the active adapter and LoRA adds nothing; afterwards all is as before, exactly.

    Where merging is not exact to float32's rounding the adapter stays as it is: quantized or 16-bit base weights (a
    small update is rounded away), DoRA, dropout, several active adapters, weights shared with another layer.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    if not all(_can_merge(layer) and owners[id(layer.base_layer.weight)] == 1 for layer in layers):
        yield
        return
    weights = [(layer, layer.base_layer.weight, layer.base_layer.weight.data) for layer in layers]
    try:
        for layer, weight, _ in weights:
            [name] = layer.active_adapters
            if name in layer.lora_A:
                weight.data = weight.data + layer.get_delta_weight(name)
            layer.forward = layer.base_layer.forward  # without the Python of LoRA's
        yield
    finally:
        for layer, weight, data in weights:
            weight.data = data
            layer.__dict__.pop("forward", None)


def _can_merge(layer: Any) -> bool:
    return (
        type(layer) is lora.Linear
        and type(layer.base_layer) in (nn.Linear, Conv1D)
        and layer.base_layer.weight.dtype == torch.float32
        and len(layer.active_adapters) == 1
        and not layer.disable_adapters
        and not layer.merged
        and not layer.lora_variant  # DoRA and others
        and not any(layer.lora_bias.values())
        and not any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in layer.lora_dropout.values())
    )
