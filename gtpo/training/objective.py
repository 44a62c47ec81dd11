"""A user's objective in the train script: ``train_grpo.py --objective file.py:Class``."""

from collections.abc import Sequence
from typing import Any

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.errors import UsageError
from gtpo.grading.user_functions import import_named
from gtpo.training.refusals import uses_unsloth


def load_objective(name: str | None, base: Any, others: Sequence[type]) -> tuple[Any, list[type]]:
    """The trainer class that ``--objective`` names, and the dataclass ``Settings`` of that class, if it has one.

    It has to be that of the command line: a stored configuration may be a stranger's.

    Args:
        name: file.py:Class.
        base: gtpo.GRPOTrainer, which is the class without the flag.
        others: Dataclasses of settings; a field of ``Settings`` has another name than theirs.
    """
    if name is None:
        return base, []
    if uses_unsloth():
        raise UsageError("--objective is not supported with Unsloth: add --backend transformers.")
    if ".py:" not in name:
        raise UsageError(f"--objective {name}: expected file.py:Class.")
    kind: Any = import_named(name, {}, "objective")
    is_trainer = isinstance(kind, type) and issubclass(kind, base)
    if not is_trainer:
        raise UsageError(f"--objective {name}: expected a subclass of gtpo.GRPOTrainer.")
    kind._name = kind.__name__  # of bar and card
    kind._paper = {}
    if kind.Settings is object:
        return kind, []
    taken = fields_of([*others, GTPOArguments]).keys() & fields_of([kind.Settings])
    if taken:
        raise UsageError(f"--objective {name}: Settings has {min(taken)}, which is a setting already: rename it.")
    return kind, [kind.Settings]
