"""A user's objective: the class that ``--objective`` names, and calls of its ``objective`` and ``advantages``.

Errors name file and line, and what is returned is checked.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.errors import RunError, UsageError, last_line
from gtpo.grading.user_functions import import_named, place_of
from gtpo.training.batch import Batch, LossInputs, Trainer
from gtpo.training.faults import raise_together
from gtpo.training.record import Measured
from gtpo.training.refusals import uses_unsloth

Method = Callable[..., Any]  # of a trainer, which a user's class may override


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


def _call(method: Method, *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except (torch.OutOfMemoryError, RunError):  # the first one names the batch size
        raise
    except Exception as error:
        raise _error(method, f"raised {last_line(error)}", place_of(error)) from error


def _error(method: Method, what: str, place: str = "") -> RunError:
    function: Any = inspect.unwrap(method)  # of the user, also where another class wraps it
    code = function.__code__
    place = place or f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    return RunError(f"{function.__qualname__} ({place}) {what}.")


def _check(method: Method, what: str, value: Any, shape: tuple[int, ...]) -> None:
    if getattr(value, "shape", None) != shape:
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        raise _error(method, f"returned {what} {found}: expected a tensor of shape {shape}")


def copy_of(inputs: Batch) -> LossInputs:
    """A micro-batch whose tensors a hook may change: TRL keeps its own for the next update (``num_iterations``)."""
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return cast("LossInputs", copied)


def call_objective(trainer: Trainer, logps: Tensor, token_entropy: Tensor, inputs: Batch) -> tuple[Tensor, Measured]:
    """The loss and :class:`Measured` of a micro-batch; RunError if ``trainer.objective`` returns anything else.

    Also for a loss from which no gradient reaches the weights. The objective may change its arguments in place.
    """
    method = trainer.objective
    returned = _call(method, logps.clone(), token_entropy.clone(), copy_of(inputs))
    types = [type(value) for value in returned] if isinstance(returned, tuple) else [type(returned)]
    if types[1:] != [Measured]:
        found = ", ".join(kind.__name__ for kind in types)
        raise _error(method, f"returned {found}: expected a pair, the loss and gtpo.Measured")
    loss, measured = returned
    rows = tuple(logps.shape[:1])
    _check(method, "a loss", loss, ())
    if logps.requires_grad and torch.is_grad_enabled() and not _depends_on(loss, logps):
        raise _error(
            method, "returned a loss without a gradient: it has to depend on logps, without detach() or item()"
        )
    _check(method, "Measured.entropy", measured.entropy, rows)
    if measured.keep is not None:
        _check(method, "Measured.keep", measured.keep, rows)
    for name, value in (measured.metrics or {}).items():
        _check(method, f"the metric {name}", value, ())
    return loss, measured


def _depends_on(loss: Tensor, logps: Tensor) -> bool:
    """Whether a gradient goes from a loss to ln pi, or to a weight that an objective has used itself."""
    unseen, seen = [loss.grad_fn], set()
    while unseen:
        node = unseen.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node is logps.grad_fn or isinstance(getattr(node, "variable", None), Parameter):
            return True
        unseen += [following for following, _ in node.next_functions]
    return False


def call_advantages(trainer: Trainer, rewards: Tensor, group_size: int) -> Tensor:
    """A_i of all rows, shape (B,), by ``trainer.advantages``; 0 where no function has a reward. ``rewards``: (B, K).

    Every process has to call it: RunError on all of them if it raises on one, or returns anything else.
    """
    advantages = rewards[:, 0]
    raised = []
    try:
        advantages = _checked_advantages(trainer.advantages, rewards, group_size)
    except RunError as error:
        raised.append(error)
    raise_together(trainer, raised)
    return advantages


def _checked_advantages(method: Method, rewards: Tensor, group_size: int) -> Tensor:
    found = _call(method, rewards.clone(), group_size)
    _check(method, "advantages", found, (len(rewards),))
    advantages: Tensor = found.detach().to(rewards).masked_fill(rewards.isnan().all(1), 0.0)
    row = int(advantages.isfinite().int().argmin())
    if not advantages[row].isfinite():
        given = f"A_i = {advantages[row].item()} for the rewards {rewards[row].tolist()} (row {row + 1})"
        raise _error(method, f"returned {given}: expected a finite number")
    return advantages
