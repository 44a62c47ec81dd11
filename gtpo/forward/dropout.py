"""The dropout of a model: numbers of its config, which its modules copy, and modules of PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

WORDS = ("dropout", "pdrop")  # attention_dropout of Llama, attn_pdrop of GPT-2


def dropouts_of(model: nn.Module) -> dict[str, float]:
    """The dropouts of a model's config that are not 0, by name."""
    found: dict[str, float] = {}
    for config in _configs_of(model):
        found |= {name: value for name, value in _numbers(config).items() if value}
    return found


def disable_dropout(model: nn.Module) -> dict[str, float]:
    """Set every dropout of a model to 0, in place, and return those of its config that were not."""
    found = dropouts_of(model)
    for part in (*_configs_of(model), *model.modules()):
        for name in _numbers(part):
            setattr(part, name, 0.0)
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return found


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, no dropout is drawn; afterwards the model is in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _configs_of(model: nn.Module) -> list[Any]:
    """The configs that the modules of a model read; of a model of several parts, that of the text too."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [*{id(config): config for config in configs if hasattr(config, "to_dict")}.values()]


def _numbers(part: Any) -> dict[str, float]:
    """The attributes of a config or a module that are a probability of dropout, by name."""
    found = {}
    for name, value in vars(part).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and any(word in name for word in WORDS):
            found[name] = value
    return found
