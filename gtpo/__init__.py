"""GTPO (arXiv 2508.03772) on TRL. Names are imported on first use: ``import gtpo`` loads neither torch nor trl.

    from gtpo import GRPOTrainer, GTPOConfig, GTPOTrainer, load_backend

With Unsloth, ``load_backend()`` comes first: it imports Unsloth before trl, transformers and peft.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpo.arguments import GTPOArguments as GTPOArguments
    from gtpo.models.backend import load_backend as load_backend
    from gtpo.training.record import Measured as Measured
    from gtpo.training.trainer import GRPOTrainer as GRPOTrainer
    from gtpo.training.trainer import GTPOConfig as GTPOConfig
    from gtpo.training.trainer import GTPOTrainer as GTPOTrainer

_MODULES = {
    **dict.fromkeys(("GRPOTrainer", "GTPOTrainer", "GTPOConfig", "Measured"), "gtpo.training.trainer"),
    "GTPOArguments": "gtpo.arguments",
    "load_backend": "gtpo.models.backend",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gtpo' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
