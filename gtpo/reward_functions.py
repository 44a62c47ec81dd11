"""Reward functions by name: those of the caller, or a user's own from a file or module."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gtpo.errors import RunError, UsageError, first_line, nearest

Reward = Callable[..., Any]  # a list of numbers, None where it does not apply; a coroutine of it for an async function

FROM_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
IMAGES = {"image", "images"}  # TRL passes these columns to the processor of a vision model


@dataclass(frozen=True)
class Use:
    """What a function is loaded for: the name of its flag and in sentences, what it gets beside the columns of the
    data, and what to do after an error."""

    flag: str
    noun: str
    passed: frozenset[str]
    advice: str


TRAINING = Use(
    "--reward",
    "reward",
    frozenset(FROM_TRL - {"environments"}),
    "correct it, then continue from the last checkpoint with --resume or start again",
)
JUDGING = Use("--judge", "judge", frozenset({"prompts", "completions"}), "correct it, then run the same command again")


def load_rewards(
    names: Sequence[str], known: Mapping[str, Reward], columns: Collection[str], use: Use = TRAINING
) -> list[Reward]:
    """The reward functions of ``--reward``; their sum is the reward.

    Args:
        names: Keys of ``known``, or ``file.py:function`` or ``module:function`` with TRL's signature:
            ``function(completions, **columns) -> list[float | None]``. A module is looked up in the working directory
            first. These raise :class:`RunError` where the user's function raises or returns anything else.
        known: Name -> function, such as format and accuracy of the paper.
        columns: Columns of the dataset; none if they are not known yet, then only the functions are loaded.
        use: What they are loaded for.

    Raises:
        UsageError: If a name is unknown, cannot be imported, a function needs a column that the dataset lacks, or a
            column has the name of an argument of TRL.
    """
    if not names:
        raise UsageError(f"--reward is empty: name {', '.join(known)}, file.py:function or module:function.")
    if taken := sorted((FROM_TRL | IMAGES) & set(columns)):
        raise UsageError(f"the data has a column {taken[0]!r}, a name that TRL uses for data of its own: rename it.")
    rewards = [
        known[name] if name in known else _checked(_import_reward(name, known, use), name, use) for name in names
    ]
    theirs = sorted(set(columns) - {"prompt", "completion"})  # TRL passes the prompts as `prompts`
    given = use.passed | set(theirs)
    if not columns:
        return rewards
    for name, reward in zip(names, rewards, strict=True):
        try:
            wanted = inspect.signature(reward).parameters.values()
        except ValueError:  # some built-in functions have no signature
            continue
        named = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if missing := [argument for argument in named if argument not in given]:
            raise UsageError(
                f"the {name} {use.noun} needs a column {missing[0]!r}{nearest(missing[0], given)}: add it to the data "
                f"or name another {use.flag} (columns of the data: {', '.join(theirs) or 'none but the prompt'})."
            )
    return rewards


def with_prefill(rewards: Sequence[Reward], prefill: str) -> list[Reward]:
    """The rewards, called with completions that begin with what the chat template has written of them.

    Args:
        rewards: Reward functions with TRL's signature.
        prefill: As :func:`gtpo.tokenizer.assistant_prefill` returns it; empty: the rewards themselves.
    """
    return [_prefilled(reward, prefill) for reward in rewards] if prefill else list(rewards)


def _prefilled(reward: Reward, prefill: str) -> Reward:
    def complete(completion: Any) -> Any:
        if isinstance(completion, str):
            return prefill + completion
        first, *rest = completion
        return [{**first, "content": f"{prefill}{first.get('content') or ''}"}, *rest]

    def call(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
        return reward(*args, completions=[complete(completion) for completion in completions], **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return functools.update_wrapper(call_async if inspect.iscoroutinefunction(reward) else call, reward)


def _import_reward(name: str, known: Mapping[str, Reward], use: Use) -> Reward:
    module, colon, function = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise UsageError(
                f"{use.flag} {name} lacks a function: expected {name}:FUNCTION{_functions_of(Path(name))}."
            )
        raise UsageError(
            f"{use.noun} {name!r} is unknown{nearest(name, known)}: pick {', '.join([*known, 'file.py:function'])} or "
            "module:function."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    path = Path(module if module.endswith(".py") else f"{module}.py")  # before a module of that name elsewhere
    if module.endswith(".py") and not path.is_file():
        raise UsageError(f"{use.flag} {name}: {path} does not exist.")
    try:
        found = _import_file(path) if path.is_file() else importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code, SystemExit too
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{use.flag} {name} cannot be imported: {what}; --debug shows the traceback.") from error
    reward: Reward | None = getattr(found, function, None)
    if reward is None or not callable(reward):
        raise UsageError(f"{use.flag} {name}: {module} has no function {function!r}{_functions_of(path)}.")
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


# What a user's function does while training


def _checked(reward: Reward, name: str, use: Use) -> Reward:
    """The function under its own name; what it raises and returns is checked at each call."""

    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        with _told(name, use):
            returned = reward(*args, **kwargs)
        return _numbers(returned, kwargs, name, use)

    async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
        with _told(name, use):
            returned = await reward(*args, **kwargs)
        return _numbers(returned, kwargs, name, use)

    checked: Reward = call_async if inspect.iscoroutinefunction(reward) else call  # TRL awaits the one
    functools.update_wrapper(checked, reward)
    checked.__name__ = getattr(reward, "__name__", name.rpartition(":")[2])  # TRL logs it under this name
    return checked


@contextlib.contextmanager
def _told(name: str, use: Use) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise RunError(f"the {use.noun} {name} raised {what}; {use.advice} (--debug shows the traceback).") from error


def _numbers(returned: Any, kwargs: Mapping[str, Any], name: str, use: Use) -> list[float | None]:
    """The returned values as a list, a number or None for each completion."""
    expected = "a list with a number or None for each completion"
    try:
        if isinstance(returned, str | bytes | Mapping) or any(isinstance(value, str | bytes) for value in returned):
            raise TypeError
        rewards = [None if value is None else float(value) for value in returned]
    except (TypeError, ValueError) as error:
        shown = f"{type(returned).__name__} {returned!r}"
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        raise RunError(f"the {use.noun} {name} returned {shown}: expected {expected}; {use.advice}.") from error
    if len(rewards) != (completions := len(kwargs.get("completions", rewards))):
        raise RunError(
            f"the {use.noun} {name} returned {len(rewards)} values for {completions} completions: expected {expected}; "
            f"{use.advice}."
        )
    return rewards
