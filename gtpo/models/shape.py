"""The shape of a base model: the numbers of its config.json that determine sizes, and what follows from them."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line
from gtpo.files import read_yaml
from gtpo.models.source import ModelSource


@dataclass(frozen=True)
class Shape:
    """The numbers that determine the size of a Llama-like decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @property
    def projections(self) -> int:
        """Parameters of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear().values())

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def outputs(self) -> int:
        """Outputs of all projections of a layer."""
        return sum(outputs for _, outputs in self.linear().values())

    @property
    def cached(self) -> int:
        """Numbers of the KV cache per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def lora(self, rank: int, modules: Collection[str]) -> int:
        """Parameters of an adapter on these projections, or on ``all-linear``."""
        size = 0
        for name, (inputs, outputs) in self.linear().items():
            if name in modules or "all-linear" in modules:
                size += inputs + outputs
        return self.layers * rank * size

    def linear(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the seven projections of a layer."""
        hidden = self.hidden_size
        wide = self.intermediate_size
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        return {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }


KNOWN = {alias: Shape(**sizes) for alias, sizes in read_yaml(Path(__file__).with_name("sizes.yaml")).items()}


def shape_of(source: ModelSource) -> Shape:
    """The shape of a base; of one without an alias its config.json is read."""
    if source.alias:
        return KNOWN[source.alias]
    return _shape_in(_read_config(source), source.name)


def known_shape(source: ModelSource) -> Shape | None:
    """:func:`shape_of`; None where it is not known."""
    with suppress(UsageError):
        return shape_of(source)
    return None


def scale_of(source: ModelSource) -> tuple[float, float]:
    """(parameters without embeddings, tokens of the context) of a base; infinite where not known."""
    parameters = context = math.inf
    with suppress(UsageError):
        config = _read_config(source)
        context = getattr(config, "max_position_embeddings", None) or context
        parameters = _shape_in(config, source.name).projections
    return parameters, context


def _read_config(source: ModelSource) -> Any:
    """The config.json of a base, that of its language model."""
    try:
        return source.config.get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config.json of {source.name!r}: {first_line(error)}") from error


def _shape_in(config: Any, model: str) -> Shape:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts or not hasattr(config, "intermediate_size") or not hasattr(config, "num_key_value_heads"):
        raise UsageError(f"{model} ({config.model_type}) has no estimate: expected a dense Llama-like model.")
    heads = config.num_attention_heads
    return Shape(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.tie_word_embeddings,
    )
