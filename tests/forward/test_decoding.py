"""The logits of a decoding step are those of the model; models that compute something else are not covered."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch, mark
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gtpo.forward import generation
from gtpo.forward.decoding import next_logits, supports
from gtpo.forward.generation import fast_layers
from gtpo.forward.hidden_states import cache_name

VOCABULARY = 24
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def llama(**config: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | config))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
        elif "norm" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    return model.eval()


def with_lora(model: Any, **lora: Any) -> Any:
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | lora)
    return get_peft_model(model, config).get_base_model()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "own head width": lambda: llama(head_dim=12),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "one head of keys": lambda: llama(num_key_value_heads=1),
    "as many keys": lambda: llama(num_key_value_heads=4),
    "llama3 positions": lambda: llama(rope_parameters=LLAMA3),
    "tied": lambda: llama(tie_word_embeddings=True),
    "epsilon of the norms": lambda: llama(rms_norm_eps=0.1),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval(),
    "lora": lambda: with_lora(llama()),
    "lora of some layers": lambda: with_lora(llama(attention_bias=True), target_modules=["q_proj", "down_proj"]),
    "lora that is not merged": lambda: with_lora(llama(), use_dora=True),
}


@mark.parametrize("large", [generation.LARGE, 1, 800], ids=["unpacked", "packed", "some packed"])
@mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_three_tokens_are_those_of_the_model(name: str, large: int, monkeypatch: MonkeyPatch) -> None:
    """Two prompts, one of them padded; the expected logits are from whole rows without a cache."""
    monkeypatch.setattr(generation, "LARGE", large)
    model = MODELS[name]()
    assert supports(model)
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    name = cache_name(inspect.signature(model.forward).parameters)
    model(input_ids=ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], **{name: cache})
    with fast_layers(model, rows=2):
        step = next_logits(model, cache, length=8)
        for place in (5, 6, 7):
            found = step(ids[:, place], positions[:, place], mask[:, : place + 1])
            assert (found - expected[:, place]).abs().max() < 2e-5 * expected.abs().max()


class Other(LlamaForCausalLM):
    """A subclass may compute something else."""


def changed(change: Callable[[Any], object]) -> Any:
    model = llama()
    change(model)
    return model


@mark.parametrize(
    "model",
    [
        lambda: Other(LlamaConfig(**SHAPE)),
        lambda: MistralForCausalLM(MistralConfig(**SHAPE)),
        lambda: llama(attn_implementation="eager"),
        lambda: llama(hidden_act="gelu"),
        lambda: llama(rope_parameters=DYNAMIC),
        lambda: llama().bfloat16(),
        lambda: llama(attention_dropout=0.1).train(),
        lambda: changed(lambda model: model.model.layers[1].register_forward_hook(print)),
        lambda: changed(lambda model: model.model.layers[1].self_attn.register_forward_pre_hook(print)),
        lambda: changed(lambda model: setattr(model.model.layers[1].mlp, "forward", print)),
        lambda: changed(lambda model: setattr(model.model, "norm", nn.LayerNorm(32))),
        lambda: with_lora(llama(), modules_to_save=["norm"]),
    ],
)
def test_what_computes_something_else_is_not_covered(model: Callable[[], Any]) -> None:
    assert not supports(model())


def test_autocast_is_not_covered() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not supports(llama())
