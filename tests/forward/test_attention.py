"""Attention with padding and shared keys on a CPU: bit-identical to Transformers' with repeated keys and values."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pytest import mark
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from gtpo.forward import attention as attention_module
from gtpo.forward.attention import SHARED_KEYS, attention, share_keys
from gtpo.models.load import load_base
from gtpo.models.source import model_source


class Module:
    num_key_value_groups = 3
    is_causal = True


def drawn(tokens: int, past: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and a mask: causal, and the first row padded to the left."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, tokens, 16), (2, 2, past + tokens, 16), (2, 2, past + tokens, 16)]
    states = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    mask = torch.ones(2, 1, tokens, past + tokens, dtype=torch.bool).tril(past)
    mask[0, :, :, :2] = False
    mask[0, :, :2, 0] |= past == 0  # a row of padding sees something
    return states, mask


@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@mark.parametrize("scaling", [None, 0.3])
@mark.parametrize(("tokens", "past"), [(1, 40), (7, 33), (9, 0)])
def test_values_and_gradients_are_those_of_transformers(
    tokens: int, past: int, scaling: float | None, dtype: torch.dtype
) -> None:
    states, mask = drawn(tokens, past, dtype)
    query, key, value = states
    repeated = repeat_kv(key, 3), repeat_kv(value, 3)  # newer Transformers repeats none for one token
    expected, _ = sdpa_attention_forward(torch.nn.Module(), query, *repeated, mask, scaling=scaling)
    torch.testing.assert_close(sdpa_attention_forward(Module(), *states, mask, scaling=scaling)[0], expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), states)
    with mock.patch.object(sdpa_attention, "repeat_kv", side_effect=AssertionError("repeated")):
        found, nothing = attention(Module(), *states, mask, scaling=scaling)
    assert nothing is None and found.is_contiguous() and torch.equal(found, expected)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]  # the sum over heads that share a key
    for gradient, wanted in zip(torch.autograd.grad((found * weights).sum(), states), expected_gradients, strict=True):
        assert (gradient - wanted).abs().max() <= tolerance * wanted.abs().max()


STATES, MASK = drawn(5, 20)
NUMBERS = torch.zeros(MASK.shape).masked_fill(~MASK, -1e9) + 0.1 * torch.arange(25)


@mark.parametrize(
    ("change", "calls"),
    [
        ({"attention_mask": NUMBERS}, 0),  # which are added
        ({"dropout": 0.5}, 0),
        ({"attention_mask": None}, 1),
        ({"position_bias": torch.ones(1, 6, 5, 25)}, 1),
    ],
)
def test_options_act_as_in_transformers_or_are_left_to_it(change: dict[str, Any], calls: int) -> None:
    given = {"attention_mask": MASK, "dropout": 0.0, "scaling": 0.2, "position_bias": None, "is_causal": True} | change
    torch.manual_seed(0)
    expected, _ = sdpa_attention_forward(Module(), *STATES, **given)
    torch.manual_seed(0)
    with mock.patch.object(attention_module, "sdpa_attention_forward", wraps=sdpa_attention_forward) as called:
        assert torch.equal(attention(Module(), *STATES, **given)[0], expected)
    assert called.call_count == calls


def test_a_model_uses_it_where_a_prompt_is_padded() -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    ids = torch.randint(24, (2, 9))
    mask = torch.tensor([[0, 0, *[1] * 7], [1] * 9])
    expected = model(input_ids=ids, attention_mask=mask).logits
    share_keys(model)
    with mock.patch.object(sdpa_attention, "repeat_kv", side_effect=AssertionError("repeated")):
        found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found, expected)


def test_loaded_models_share_keys_and_others_keep_their_attention(tiny: Path) -> None:
    model, _ = load_base(model_source(tiny))
    assert model.config._attn_implementation == SHARED_KEYS and AttentionInterface()[SHARED_KEYS] is attention
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    eager = LlamaForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    share_keys(eager)
    assert eager.config._attn_implementation == "eager"


def test_a_saved_model_does_not_name_it(tiny: Path, tmp_path: Path) -> None:
    model, _ = load_base(model_source(tiny))
    model.save_pretrained(tmp_path)
    assert SHARED_KEYS not in (tmp_path / "config.json").read_text()
