"""Attention with padding on a CPU, where several query heads share a key.

Transformers repeats keys and values for it, because PyTorch's kernels for GPUs take no mask there. Those for CPUs do.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHARED_KEYS = "sdpa_shared_keys"  # its name in Transformers


def share_keys(model: Any) -> None:
    """Let a model on a CPU use it, where it has the attention ``sdpa``."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(SHARED_KEYS, attention)
        AttentionMaskInterface.register(SHARED_KEYS, sdpa_mask)
        model.set_attn_implementation(SHARED_KEYS)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' ``sdpa_attention_forward`` of repeated keys and values, bit-identical, without repeating them.

    Query (B, heads, T, D), keys and values (B, key heads, S, D), mask (B, 1, T, S) -> (B, T, heads, D).
    """
    is_covered = (
        query.device.type == "cpu"
        and attention_mask is not None
        and options.get("position_bias") is None
        and query.shape[1] != key.shape[1]
    )
    if not is_covered:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=True,
    )
    return attended.transpose(1, 2).contiguous(), None
