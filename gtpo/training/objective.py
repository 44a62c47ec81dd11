"""A user's objective in the train script: ``train_grpo.py --objective file.py:Class``."""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.errors import RunError, UsageError, last_line
from gtpo.grading.user_functions import import_named, place_of
from gtpo.training.refusals import uses_unsloth


def load_objective(base: Any, others: Sequence[type]) -> tuple[Any, list[type]]:
    """The trainer class that ``--objective`` names, and the dataclass ``Settings`` of that class, if it has one.

    Only a flag of the command line is imported: a stored configuration may be a stranger's.

    Args:
        base: gtpo.GRPOTrainer, which is the class without the flag.
        others: Dataclasses of settings; a field of ``Settings`` has another name than theirs.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--objective")
    flags, _ = parser.parse_known_args()
    name = flags.objective
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
    kind.objective = _with_place(kind.objective, name)
    if kind.Settings is object:
        return kind, []
    taken = fields_of([*others, GTPOArguments]).keys() & fields_of([kind.Settings])
    if taken:
        raise UsageError(f"--objective {name}: Settings has {min(taken)}, which is a setting already: rename it.")
    return kind, [kind.Settings]


def _with_place(objective: Any, name: str) -> Any:
    """A method ``objective`` whose errors name the line of the user's file."""

    @functools.wraps(objective)
    def checked(self: Any, *args: Any) -> Any:
        try:
            return objective(self, *args)
        except (torch.OutOfMemoryError, RunError):  # the first one halves the micro-batch
            raise
        except Exception as error:
            place = place_of(error, __file__)
            raise RunError(f"--objective {name}: {last_line(error)} ({place}).") from error

    return checked
