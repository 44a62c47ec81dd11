"""Reward functions by name: those of the caller, or a user's own from a file or module."""

import copy
import functools
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gtpo.arguments import split_function
from gtpo.errors import CodeError, RunError, UsageError, first_line, nearest

Reward = Callable[..., Any]  # a list of numbers, None where it does not apply; a coroutine of it for an async function
Known = Mapping[str, Reward]
Columns = Mapping[str, Any]  # what a reward function is called with, by name
Returned = list[float | None]

FROM_TRL = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
NOT_COLUMNS = FROM_TRL | {"environments", "image", "images"}  # other names that TRL uses
NO_LISTS = (Mapping, Set, bytes, bytearray)  # iterated, they give their keys, an order of their own, or byte values
OURS = str(Path(__file__).parents[1])


def load_rewards(
    names: Sequence[str],
    known: Known,
    columns: Collection[str],
    noun: str = "reward",
) -> "list[CheckedReward]":
    """The reward functions of ``--reward``; their sum is the reward.

    ``names`` are keys of ``known``, such as format and accuracy of the paper, or ``file.py:function`` or
    ``module:function`` with TRL's signature, ``function(completions, **columns) -> list[float | None]``, looked up in
    the working directory first. Without ``columns``, those of the dataset, the functions are only loaded. ``noun``:
    what they are, reward or grader.
    """
    taken = NOT_COLUMNS & set(columns)
    if taken:
        raise UsageError(f"the data has a column {min(taken)!r}, a name that TRL uses itself: rename it.")
    rewards: dict[str, CheckedReward] = {}
    for name in names:
        function = known.get(name) or import_named(name, known, noun)
        reward = checked_reward(function, name, noun)
        other = rewards.setdefault(reward.__name__, reward)
        if other is not reward:  # metrics and tables have one column for each name
            raise UsageError(f"--{noun} {other.name} and {name} are both called {reward.__name__}.")
        if columns:
            _check_signature(reward, set(columns) - {"prompt", "completion"})  # TRL passes the prompts as `prompts`
    return list(rewards.values())


def _check_signature(reward: "CheckedReward", columns: set[str]) -> None:
    passed = FROM_TRL if reward.noun == "reward" else {"prompts", "completions"}
    try:
        inspect.signature(reward.function).bind(**dict.fromkeys(passed | columns))
    except TypeError as error:
        raise UsageError(
            f"the {reward.noun} {reward.name} cannot be called with the columns {sorted(columns)}: {error}. "
            "--answer_column names the gold answer; **columns takes what a function does not need."
        ) from error


def with_prefill(rewards: "Sequence[CheckedReward]", prefill: str) -> "list[CheckedReward]":
    """The rewards, called with completions that begin with ``prefill``, which the chat template has written of them."""
    copies = [copy.copy(reward) for reward in rewards]
    for reward in copies:
        reward.prefill = prefill
    return copies


def import_named(name: str, known: Known, noun: str) -> Reward:
    module, function = split_function(name, known, noun)
    sys.path.append(str(Path.cwd()))
    path = Path(module.removesuffix(".py") + ".py")  # before a module of that name elsewhere
    is_file = path.is_file() or module.endswith(".py")
    try:
        found = _import_file(path) if is_file else importlib.import_module(module)
    except (Exception, SystemExit) as error:  # of the user's code
        place = place_of(error)
        what = f"{type(error).__name__}: {first_line(error)}{f' ({place})' if place else ''}"
        kind = CodeError if place else UsageError  # of a name that is mistyped no traceback helps
        raise kind(f"--{noun} {name} cannot be imported: {what}.") from error
    if not hasattr(found, function):
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        there = ", ".join(own) or "nothing"
        raise UsageError(f"--{noun} {name}: {module} has no {function}{nearest(function, own)}: it has {there}.")
    return cast("Reward", getattr(found, function))


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
    sys.modules[module.__name__] = module  # dataclasses look up their module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class CheckedReward:
    """A reward function under its own name; what it raises and returns is checked at each call.

    ``returned`` is what the last call returned: a number, or None where the reward does not apply. Columns of the data
    do not replace arguments bound by a ``functools.partial``. ``defers``: an error is kept in ``failure`` for all
    processes of a run to raise, which would wait for this one.
    """

    def __init__(self, function: Reward, name: str, noun: str) -> None:
        functools.update_wrapper(self, function)
        last = name.rpartition(":")[2] or type(function).__name__
        self.__name__ = getattr(function, "__name__", last)  # TRL logs it under this name
        self.function = function
        self.name = name or self.__name__
        self.noun = noun
        self.prefill = ""
        self.returned: Returned = []
        self.defers = False
        self.failure: RunError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._named_errors(kwargs):
            self._check(self.function(*args, **self._arguments(kwargs)), kwargs)
        return self._for_trl()

    def _arguments(self, kwargs: Columns) -> dict[str, Any]:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        arguments = {name: value for name, value in kwargs.items() if name not in bound}
        if self.prefill:
            arguments["completions"] = [_prefilled(each, self.prefill) for each in arguments["completions"]]
        return arguments

    @contextmanager
    def _named_errors(self, kwargs: Columns) -> Iterator[None]:
        """Raise an error of the function as a RunError that names it, or keep it."""
        self.failure = None
        try:
            yield
        except RunError as error:
            self.failure = error
        except (Exception, SystemExit) as error:
            hint = ', the text of a completion is completion[0]["content"]' if "'list' object" in str(error) else ""
            what = f"raised {type(error).__name__}: {first_line(error)}{hint} ({place_of(error)})"
            self.failure = self._error(what)
            self.failure.__cause__ = error
        if self.failure:
            self.returned = [0.0] * len(kwargs.get("completions", ()))
            if not self.defers:
                raise self.failure

    def _check(self, values: Any, kwargs: Columns) -> None:
        is_table = hasattr(values, "columns")  # of pandas: it gives the names of its columns
        is_list = hasattr(values, "__iter__") and not is_table and not isinstance(values, NO_LISTS)
        listed = list(values) if is_list else [values]  # a generator runs here
        count = len(kwargs.get("completions", listed))
        wrong = [value for value in listed if value is not None and not hasattr(value, "__float__")]
        if wrong or not is_list or len(listed) != count:
            expected = f"expected a list with a number or None for each of {count} completions"
            raise self._error(f"returned {reprlib.repr(listed if is_list else values)}: {expected}")
        self.returned = [None if value is None else float(value) for value in listed]

    def _for_trl(self) -> Returned:
        """Infinity for NaN, which TRL takes for None. The trainer refuses both in ``returned``."""
        return [math.inf if value != value else value for value in self.returned]

    def _error(self, what: str) -> RunError:
        return RunError(f"the {self.noun} {self.name} {what}.")


class _CheckedAsyncReward(CheckedReward):
    async def __call__(self, *args: Any, **kwargs: Any) -> Returned:  # TRL awaits it
        with self._named_errors(kwargs):
            self._check(await self.function(*args, **self._arguments(kwargs)), kwargs)
        return self._for_trl()


def place_of(error: BaseException) -> str:
    """File and line of a user's code where it raised, not of what it calls; empty for a file that cannot be read."""
    not_of_user = (OURS, "<frozen", str(Path(importlib.__file__).parent))
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_of_user)
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


def checked_reward(function: Reward, name: str = "", noun: str = "reward") -> CheckedReward:
    """A function as a :class:`CheckedReward`, which is awaited where the function is."""
    called = type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    kind = _CheckedAsyncReward if is_async else CheckedReward
    return kind(function, name, noun)


def _prefilled(completion: Any, prefill: str) -> Any:
    if isinstance(completion, str):
        return prefill + completion
    first, *rest = completion
    text = first.get("content") or ""
    return [{**first, "content": prefill + text}, *rest]
