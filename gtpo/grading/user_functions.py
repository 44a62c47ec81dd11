"""Reward functions by name: those of the caller, or a user's own from a file or module."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from gtpo.errors import RunError, UsageError, counted, first_line, nearest

Reward = Callable[..., Any]  # a list of numbers, None where it does not apply; a coroutine of it for an async function

FROM_TRL = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
NOT_COLUMNS = FROM_TRL | {"environments", "image", "images"}  # other names that TRL uses
COLUMNS_OF_TABLE = frozenset(
    ("step", "prompt", "completion", "advantage", "entropy", "delta", "conflicts", "messages", "gold_answer", "cut_off")
)


class Purpose(NamedTuple):
    """What a function is loaded for."""

    flag: str
    noun: str
    passed: frozenset[str]  # arguments in addition to the columns of the data
    after_error: str


TRAINING = Purpose(
    "--reward", "reward", FROM_TRL, "run the same command again, or --resume a run that has a checkpoint"
)
GRADING = Purpose("--grader", "grader", frozenset({"prompts", "completions"}), "run the same command again")


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
        UsageError: If a name is unknown, cannot be imported or is a duplicate, a function cannot be called with the
            columns, or a column has the name of an argument of TRL.
    """
    if not names:
        raise UsageError(f"--reward is empty: name {', '.join(known)}, file.py:function or module:function.")
    if taken := sorted(NOT_COLUMNS & set(columns)):
        raise UsageError(f"the data has a column {taken[0]!r}, a name that TRL uses itself: rename it.")
    rewards = [checked_reward(known.get(name) or _import_reward(name, known, purpose), name, purpose) for name in names]
    by_name = {reward.__name__: reward for reward in rewards}
    for reward in rewards:
        if (other := by_name[reward.__name__]) is not reward:
            both = f"{reward.name} and {other.name} are both called {reward.__name__}"
            raise UsageError(f"{purpose.flag} {both} in metrics and tables: rename one of the functions.")
        _check_signature(reward, set(columns))
        reward.columns_of_table = COLUMNS_OF_TABLE | by_name.keys()
    return rewards


def _check_signature(reward: "CheckedReward", columns: Set[str]) -> None:
    try:
        parameters = inspect.signature(reward.function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return
    purpose, what = reward.purpose, f"the {reward.name} {reward.purpose.noun}"
    theirs = columns - {"prompt", "completion"}  # TRL passes the prompts as `prompts`
    given = purpose.passed | theirs
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise UsageError(
            f"{what} takes {by_position[-1]!r} by position, but is called by name: remove the `/` after it."
        )
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, default in named.items() if default is inspect.Parameter.empty and name not in given]
    if columns and missing:
        name_it = "name it with --answer_column, " if missing[0] == "answer" else ""
        raise UsageError(
            f"{what} needs a column {missing[0]!r}{nearest(missing[0], given)}: {name_it}add it to the data or name "
            f"another {purpose.flag} (columns of the data: {', '.join(sorted(theirs)) or 'none but the prompt'})."
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (others := sorted(given - named.keys())):
        raise UsageError(f"{what} does not accept {', '.join(others)}, passed to it: add **kwargs to its arguments.")


def with_prefill(rewards: "Sequence[CheckedReward]", prefill: str) -> "list[CheckedReward]":
    """The rewards, called with completions that begin with ``prefill``, which the chat template has written of them."""
    copies = [copy.copy(reward) for reward in rewards]
    for reward in copies:
        reward.prefill = prefill
    return copies


def _import_reward(name: str, known: Mapping[str, Reward], purpose: Purpose) -> Reward:
    module, _, function = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    if not module:
        choice = ", ".join([*known, "file.py:function"])
        raise UsageError(f"{purpose.noun} {name!r} is unknown{nearest(name, known)}: pick {choice} or module:function.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    path = Path(module.removesuffix(".py") + ".py")  # before a module of that name elsewhere
    if module.endswith(".py") and not path.is_file():
        raise UsageError(f"{purpose.flag} {name}: {path} does not exist.")
    try:
        found = _import_file(path) if path.is_file() else importlib.import_module(module)
    except (Exception, SystemExit) as error:  # of the user's code
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{purpose.flag} {name} cannot be imported: {what}; --debug shows the traceback.") from error
    if not callable(reward := getattr(found, function, None)):
        known_names = ", ".join(key for key, _ in inspect.getmembers(found, inspect.isfunction) if key[0] != "_")
        raise UsageError(f"{purpose.flag} {name}: expected {module}:FUNCTION with one of its functions: {known_names}.")
    return cast("Reward", reward)


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
        function: The function itself. Columns of the data do not replace arguments bound by a ``functools.partial``.
        name: As the user names it.
        prefill: As for :func:`with_prefill`.
        columns_of_table: Columns of the table of completions, which ``log_extra`` may not write.
        returned: What the last call returned: a number, or None where the reward does not apply.

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
        with self._errors_named(kwargs):
            return self._checked(self.function(*args, **self._arguments(kwargs)), kwargs)

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        arguments = {name: value for name, value in kwargs.items() if name not in bound}
        if self.prefill:
            arguments["completions"] = [_prefilled(completion, self.prefill) for completion in kwargs["completions"]]
        if log_metric := arguments.get("log_metric"):
            arguments["log_metric"] = lambda name, value: log_metric(name, float(value))
        if log_extra := arguments.get("log_extra"):
            arguments["log_extra"] = functools.partial(self._log_extra, log_extra, len(kwargs["completions"]))
        return arguments

    def _log_extra(self, log_extra: Callable[[str, list[Any]], None], rows: int, column: str, values: Any) -> None:
        if column in self.columns_of_table:
            raise ValueError(f"log_extra({column!r}, ...): the table of completions already has this column")
        if len(listed := list(values)) != rows:
            raise ValueError(f"log_extra({column!r}, ...): {len(listed)} values for {rows} completions")
        log_extra(column, listed)

    @contextlib.contextmanager
    def _errors_named(self, kwargs: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except (Exception, SystemExit) as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]  # not of a library
            place = f" ({Path(frames[0].filename).name}, line {lines[-1]}; --debug shows more)" if frames else ""
            is_chat = "'list'" in str(error) and not isinstance(kwargs.get("completions", [""])[0], str)
            hint = '; the text of a completion is completion[0]["content"]' if is_chat else ""
            raise self._error(f"raised {type(error).__name__}: {first_line(error)}{place}{hint}") from error

    def _checked(self, values: Any, kwargs: Mapping[str, Any]) -> list[float | None]:
        """The values for TRL, which takes NaN for None: infinity instead. The trainer refuses both in ``returned``."""
        listed = list(values) if isinstance(values, Iterable) else None  # a generator runs here
        count = len(kwargs.get("completions", listed or ()))
        wrong = [value for value in listed or () if value is not None and not hasattr(value, "__float__")]
        if listed is None or len(listed) != count or wrong:
            found = f"{reprlib.repr(values)} ({type(values).__name__})"
            if values is None:
                found = "None (is a `return` missing?)"
            elif listed and len(listed) != count:
                found = f"{counted(len(listed), 'value')} for {counted(count, 'completion')}, {reprlib.repr(listed)}"
            elif wrong and not isinstance(values, str):
                found = f"{reprlib.repr(wrong[0])} ({type(wrong[0]).__name__}) in {reprlib.repr(listed)}"
            raise self._error(f"returned {found}: expected a list with a number or None for each completion")
        self.returned = [None if value is None else float(value) for value in listed]
        return [math.inf if value is not None and math.isnan(value) else value for value in self.returned]

    def _error(self, what: str) -> RunError:
        return RunError(f"the {self.purpose.noun} {self.name} {what}; correct it, then {self.purpose.after_error}.")


class _CheckedAsyncReward(CheckedReward):
    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:  # TRL awaits it
        with self._errors_named(kwargs):
            return self._checked(await self.function(*args, **self._arguments(kwargs)), kwargs)


def checked_reward(function: Reward, name: str = "", purpose: Purpose = TRAINING) -> CheckedReward:
    """A function as a :class:`CheckedReward`, which is awaited where the function is."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    name = name or getattr(function, "__name__", type(function).__name__)
    return (_CheckedAsyncReward if is_async else CheckedReward)(function, name, purpose)


def _prefilled(completion: Any, prefill: str) -> Any:
    if isinstance(completion, str):
        return prefill + completion
    first, *rest = completion
    return [{**first, "content": f"{prefill}{first.get('content') or ''}"}, *rest]
