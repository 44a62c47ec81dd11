"""Reward functions by name: those of the caller, or a user's own from a file or module."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from gtpo.errors import UsageError, nearest

Reward = Callable[..., list[float]]


def load_rewards(names: Sequence[str], known: Mapping[str, Reward], columns: Collection[str]) -> list[Reward]:
    """The reward functions of ``--reward``; their sum is the reward.

    Args:
        names: Keys of ``known``, or ``file.py:function`` or ``module:function`` with TRL's signature:
            ``function(completions, **columns) -> list[float]``. A module is looked up in the working directory first.
        known: Name -> function, such as format and accuracy of the paper.
        columns: Columns of the dataset.

    Raises:
        UsageError: If a name is unknown, cannot be imported, or a function needs a column that the dataset lacks.
    """
    if not names:
        raise UsageError(f"--reward is empty: name {', '.join(known)}, file.py:function or module:function.")
    rewards = [known[name] if name in known else _import_reward(name, known) for name in names]
    by_trl = {"completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    given = by_trl | set(columns) - {"prompt", "completion"}  # TRL passes the prompts as `prompts`
    for name, reward in zip(names, rewards, strict=True):
        try:
            wanted = inspect.signature(reward).parameters.values()
        except ValueError:  # some built-in functions have no signature
            continue
        named = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if missing := [argument for argument in named if argument not in given]:
            raise UsageError(
                f"the {name} reward needs a column {missing[0]!r}: add it to the data or name another --reward "
                f"(available: {', '.join(sorted(given))})."
            )
    return rewards


def _import_reward(name: str, known: Mapping[str, Reward]) -> Reward:
    module, colon, function = name.rpartition(":")
    if not colon:
        raise UsageError(
            f"reward {name!r} is unknown{nearest(name, known)}: pick {', '.join(known)}, file.py:function or "
            "module:function."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    path = Path(module if module.endswith(".py") else f"{module}.py")  # before a module of that name elsewhere
    try:
        is_file = module.endswith(".py") or path.is_file()
        found = _import_file(path) if is_file else importlib.import_module(module)
    except (ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"reward {name!r} cannot be imported: {error}.") from error
    if not callable(reward := getattr(found, function, None)):
        raise UsageError(f"reward {name!r}: {module} has no function {function!r}.")
    return reward


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
    sys.modules[module.__name__] = module  # dataclasses look up their module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
