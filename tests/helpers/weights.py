"""Weights by name: those of a saved adapter, and whether they are the same bits."""

from pathlib import Path

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


def adapter_of(directory: Path) -> Weights:
    """Of ``adapter/``, ``best/`` or a checkpoint."""
    return load_file(directory / "adapter_model.safetensors")


def same_weights(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
