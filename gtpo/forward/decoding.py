"""The next token of a Llama: the operations of Transformers' modules, without most of what they cost in Python.

With a small model, or few rows, the modules of a layer take longer than its arithmetic.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from gtpo.forward.attention import SHARED_KEYS

Linear = Callable[[Tensor], Tensor]


def supports(model: Any) -> bool:
    """Whether :func:`next_logits` computes what a model does: Llama or Qwen2 in float32 on a CPU, unchanged but for
    adapters of its linear layers."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM):
        return False
    body = model.model
    parts = [model, body, body.norm, body.rotary_emb]
    for layer in body.layers:
        parts += [layer, layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm]
    for part in parts:
        is_hooked = "forward" in part.__dict__  # by accelerate
        if is_hooked or type(part).__module__ != type(model).__module__:
            return False
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    return (
        all(parameter.dtype == torch.float32 for parameter in model.parameters())
        and model.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and model.config._attn_implementation in ("sdpa", SHARED_KEYS)
        and model.config.hidden_act == "silu"
        and body.rotary_emb.rope_type in ("default", "linear", "llama3")  # others depend on the length
        and not (model.training and model.config.attention_dropout)
    )


def next_logits(model: Any, cache: Any, length: int) -> Callable[..., Tensor]:
    """A function of one token per row (B,), its positions (B,) and the mask (B, L) of the cache and it: logits (B, V).

    ``model`` is one that :func:`supports` accepts; its weights are copied. ``cache`` has keys and values of the tokens
    before and is extended. ``length`` is more than any position.
    """
    body = model.model
    config = model.config
    width = body.layers[0].self_attn.head_dim
    half = width // 2
    queries = config.num_attention_heads
    keys = config.num_key_value_heads
    positions = torch.arange(length)[None]
    cos, sin = (table[0, :, None] for table in body.rotary_emb(body.norm.weight, positions))
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)  # rotate_half is a roll with signs
    last_norm = _norm(body.norm)
    head = _joined(model.lm_head)
    layers = []
    for layer, past in zip(body.layers, cache.layers, strict=True):
        attention = layer.self_attn
        mlp = layer.mlp
        operations = (
            _norm(layer.input_layernorm),
            _joined(attention.q_proj, attention.k_proj, attention.v_proj),
            _joined(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            _joined(mlp.gate_proj, mlp.up_proj),
            _joined(mlp.down_proj),
            past.update,
        )
        layers.append(operations)

    def logits_of(tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        hidden = body.embed_tokens(tokens)
        rows = len(tokens)
        cos_here = cos[positions]
        sin_here = sin[positions]
        if mask is not None:
            mask = mask[:, None, None].bool()
        for first_norm, qkv, out, second_norm, gate_up, down, extend in layers:
            heads = qkv(first_norm(hidden)).view(rows, -1, width)
            turned, values = heads.split([queries + keys, keys], dim=1)
            turned = turned * cos_here + turned.roll(half, -1) * sin_here
            past_keys, past_values = extend(turned[:, queries:, None], values[:, :, None])
            attended = functional.scaled_dot_product_attention(
                turned[:, :queries, None],
                past_keys,
                past_values,
                attn_mask=mask,
                enable_gqa=queries > keys,
            )
            hidden = hidden + out(attended.reshape(rows, -1))
            gate, up = gate_up(second_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + down(functional.silu(gate) * up)
        return head(last_norm(hidden))

    return logits_of


def _norm(layer: Any) -> Linear:
    shape = layer.weight.shape
    weight = layer.weight
    epsilon = layer.variance_epsilon
    return lambda hidden: torch.rms_norm(hidden, shape, weight, epsilon)


def _joined(*layers: nn.Module) -> Linear:
    """Linear layers of one input as one product. Transposed in memory a small weight takes half the time at 8 rows."""
    pairs: list[Any] = [_weight_and_bias(layer) for layer in layers]
    if None in pairs:
        return lambda hidden: torch.cat([layer(hidden) for layer in layers], dim=-1)
    weights, biases = zip(*pairs, strict=True)
    weight = torch.cat(weights).t().contiguous()
    if biases[0] is None:  # Llama's and Qwen2's layers of one input: all or none
        return lambda hidden: hidden.mm(weight)
    bias = torch.cat(biases)
    return lambda hidden: torch.addmm(bias, hidden, weight)


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Of a linear layer as it is called now; None where it is something else."""
    forward = layer.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is functional.linear:
        return forward.keywords["weight"], forward.keywords["bias"]
    if type(layer) is nn.Linear and forward is None:
        return layer.weight, layer.bias
    return None
