"""Reward functions by name: those of the caller, or a user's own from a file or module."""

import ast
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gtpo.errors import RunError, UsageError, first_line, nearest

Reward = Callable[..., Any]  # a list of numbers, None where it does not apply; a coroutine of it for an async function

FROM_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
IMAGES = {"image", "images"}  # TRL passes these columns to the processor of a vision model
COLUMNS_OF_TABLE = frozenset(
    ("step", "prompt", "completion", "advantage", "entropy", "delta", "conflicts", "messages", "gold_answer", "cut_off")
)


@dataclass(frozen=True)
class Purpose:
    """What a function is loaded for: the name of its flag and in sentences, what it gets beside the columns of the
    data, and what to do after an error."""

    flag: str
    noun: str
    passed: frozenset[str]
    advice: str


TRAINING = Purpose(
    "--reward",
    "reward",
    frozenset(FROM_TRL - {"environments"}),
    "correct it, then continue from the last checkpoint with --resume or start again",
)
GRADING = Purpose(
    "--grader", "grader", frozenset({"prompts", "completions"}), "correct it, then run the same command again"
)


def load_rewards(
    names: Sequence[str], known: Mapping[str, Reward], columns: Collection[str], purpose: Purpose = TRAINING
) -> "list[CheckedReward]":
    """The reward functions of ``--reward``; their sum is the reward.

    Args:
        names: Keys of ``known``, or ``file.py:function`` or ``module:function`` with TRL's signature:
            ``function(completions, **columns) -> list[float | None]``. A module is looked up in the working directory
            first.
        known: Name -> function, such as format and accuracy of the paper.
        columns: Columns of the dataset; none if they are not known yet, then only the functions are loaded.
        purpose: What they are loaded for.

    Raises:
        UsageError: If a name is unknown, cannot be imported, a function needs a column that the dataset lacks or takes
            an argument by position only, two functions have one name, or a column has the name of an argument of TRL.
    """
    if not names:
        raise UsageError(f"--reward is empty: name {', '.join(known)}, file.py:function or module:function.")
    if taken := sorted((FROM_TRL | IMAGES) & set(columns)):
        raise UsageError(f"the data has a column {taken[0]!r}, a name that TRL uses for data of its own: rename it.")
    rewards = [checked_reward(known.get(name) or _import_reward(name, known, purpose), name, purpose) for name in names]
    by_name = {reward.__name__: reward for reward in rewards}
    for reward in rewards:
        if (other := by_name[reward.__name__]) is not reward:
            raise UsageError(
                f"{purpose.flag} {reward.name} and {other.name} are both called {reward.__name__} in metrics "
                "and tables: rename one of the functions."
            )
        reward.columns_of_table = COLUMNS_OF_TABLE | by_name.keys()
    theirs = sorted(set(columns) - {"prompt", "completion"})  # TRL passes the prompts as `prompts`
    given = purpose.passed | set(theirs)
    for reward in rewards:
        try:
            wanted = inspect.signature(reward.function).parameters.values()
        except ValueError:  # some built-in functions have no signature
            continue
        if by_position := [p.name for p in wanted if p.kind is p.POSITIONAL_ONLY]:
            raise UsageError(
                f"the {reward.name} {purpose.noun} takes {by_position[-1]!r} by position only, and arguments are "
                "passed by name: remove the `/` after it."
            )
        named = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [argument for argument in named if argument not in given]
        if columns and missing:
            raise UsageError(
                f"the {reward.name} {purpose.noun} needs a column {missing[0]!r}{nearest(missing[0], given)}: add it "
                f"to the data or name another {purpose.flag} (columns of the data: "
                f"{', '.join(theirs) or 'none but the prompt'})."
            )
    return rewards


def with_prefill(rewards: "Sequence[CheckedReward]", prefill: str) -> "list[CheckedReward]":
    """The rewards, called with completions that begin with what the chat template has written of them.

    Args:
        rewards: As :func:`load_rewards` returns them.
        prefill: As :func:`gtpo.data.tokenizer.assistant_prefill` returns it.
    """
    prefilled = [copy.copy(reward) for reward in rewards]
    for reward in prefilled:
        reward.prefill = prefill
    return prefilled


def _import_reward(name: str, known: Mapping[str, Reward], purpose: Purpose) -> Reward:
    module, colon, function = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise UsageError(
                f"{purpose.flag} {name} lacks a function: expected {name}:FUNCTION{_functions_of(Path(name))}."
            )
        raise UsageError(
            f"{purpose.noun} {name!r} is unknown{nearest(name, known)}: pick {', '.join([*known, 'file.py:function'])} "
            "or module:function."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    path = Path(module if module.endswith(".py") else f"{module}.py")  # before a module of that name elsewhere
    if module.endswith(".py") and not path.is_file():
        raise UsageError(f"{purpose.flag} {name}: {path} does not exist.")
    try:
        found = _import_file(path) if path.is_file() else importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code, SystemExit too
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{purpose.flag} {name} cannot be imported: {what}; --debug shows the traceback.") from error
    reward: Reward | None = getattr(found, function, None)
    if reward is None or not callable(reward):
        raise UsageError(f"{purpose.flag} {name}: {module} has no function {function!r}{_functions_of(path)}.")
    return reward


def _functions_of(path: Path) -> str:
    """`` (it has a, b)``: the public functions of a file, which is not imported; empty where it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
    return f" (it has {', '.join(names)})" if names else ""


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
    sys.modules[module.__name__] = module  # dataclasses look up their module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


# What a function does while training


class CheckedReward:
    """A reward function under its own name; what it raises, logs and returns is checked at each call.

    Attributes:
        function: The function itself. Arguments that a ``functools.partial`` binds are not replaced by columns of the
            data.
        name: As the user names it.
        prefill: As for :func:`with_prefill`.
        columns_of_table: Columns of the table of completions, which ``log_extra`` may not write.
        returned: The list that the last call returned: a number, or None where the reward does not apply.

    Raises:
        RunError: At a call, if the function raises, or logs or returns anything else than expected.
    """

    def __init__(self, function: Reward, name: str, purpose: Purpose) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = getattr(function, "__name__", name.rpartition(":")[2])  # TRL logs it under this name
        self.function, self.name, self.purpose = function, name, purpose
        self.prefill = ""
        self.columns_of_table: Set[str] = COLUMNS_OF_TABLE
        self.returned: list[float | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._errors_named():
            values = _run(self.function(*args, **self._arguments(kwargs)))
        return self._with_checked_values(values, kwargs)

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        arguments = {name: value for name, value in kwargs.items() if name not in bound}
        if self.prefill:
            arguments["completions"] = [_prefilled(completion, self.prefill) for completion in kwargs["completions"]]
        if log_metric := arguments.get("log_metric"):
            arguments["log_metric"] = functools.partial(self._log_metric, log_metric)
        if log_extra := arguments.get("log_extra"):
            arguments["log_extra"] = functools.partial(self._log_extra, log_extra, len(kwargs["completions"]))
        return arguments

    def _log_metric(self, log_metric: Callable[[str, float], None], name: str, value: Any) -> None:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError) as error:
            raise self._error(f"called log_metric({name!r}, {reprlib.repr(value)}): expected a number") from error
        log_metric(name, number)

    def _log_extra(self, log_extra: Callable[[str, list[Any]], None], rows: int, column: str, values: Any) -> None:
        if column in self.columns_of_table:
            raise self._error(
                f"called log_extra({column!r}, ...): the table of completions has a column of that name, choose another"
            )
        listed = [] if isinstance(values, str | bytes) or not isinstance(values, Iterable) else list(values)
        if len(listed) != rows:
            raise self._error(
                f"called log_extra({column!r}, {reprlib.repr(values)}): expected a list of {rows} values, one for each "
                "completion"
            )
        log_extra(column, listed)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except (Exception, SystemExit) as error:
            what = f"raised {type(error).__name__}: {first_line(error)}"
            raise self._error(what, " (--debug shows the traceback)") from error

    def _with_checked_values(self, values: Any, kwargs: Mapping[str, Any]) -> list[float | None]:
        expected = "a list with a number or None for each completion"
        try:
            if isinstance(values, str | bytes | Mapping) or any(isinstance(value, str | bytes) for value in values):
                raise TypeError
            self.returned = [None if value is None else float(value) for value in values]
        except (TypeError, ValueError) as error:
            shown = f"{type(values).__name__} {values!r}"
            shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
            raise self._error(f"returned {shown}: expected {expected}") from error
        if len(self.returned) != (completions := len(kwargs.get("completions", self.returned))):
            count = len(self.returned)
            raise self._error(f"returned {count} values for {completions} completions: expected {expected}")
        return self.returned

    def _error(self, what: str, end: str = "") -> RunError:
        return RunError(f"the {self.purpose.noun} {self.name} {what}; {self.purpose.advice}{end}.")


class _CheckedAsyncReward(CheckedReward):
    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:  # TRL awaits it
        with self._errors_named():
            values = _run(await self.function(*args, **self._arguments(kwargs)))
        return self._with_checked_values(values, kwargs)


def checked_reward(function: Reward, name: str = "", purpose: Purpose = TRAINING) -> CheckedReward:
    """A function as a :class:`CheckedReward`, which is awaited where the function is."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    name = name or getattr(function, "__name__", type(function).__name__)
    return (_CheckedAsyncReward if is_async else CheckedReward)(function, name, purpose)


def _run(values: Any) -> Any:
    return list(values) if isinstance(values, Iterator) else values  # a generator runs here


def _prefilled(completion: Any, prefill: str) -> Any:
    if isinstance(completion, str):
        return prefill + completion
    first, *rest = completion
    return [{**first, "content": f"{prefill}{first.get('content') or ''}"}, *rest]
