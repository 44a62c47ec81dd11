import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from gtpo.errors import UsageError, nearest
from rewards import Reward, accuracy_reward, format_reward


def load_rewards(names: Sequence[str], columns: Collection[str]) -> list[Reward]:
    """The reward functions behind ``--reward``, whose sum is the reward.

    Args:
        names: ``format``, ``accuracy``, or ``module:function`` or ``file.py:function`` for one of your own, called as
            TRL calls it: ``function(completions, **columns) -> list[float]``.
        columns: Columns of the data set.

    Raises:
        UsageError: If a name is unknown, cannot be imported, or a reward needs a column that is not there.
    """
    if not names:
        raise UsageError("--reward is empty: name format, accuracy, module:function or file.py:function.")
    if "accuracy" in names and "answer" not in columns:
        raise UsageError("the accuracy reward needs a column 'answer': add it to the data, or name another --reward.")
    ours: dict[str, Reward] = {"format": format_reward, "accuracy": accuracy_reward}
    rewards = [ours[name] if name in ours else _import_reward(name) for name in names]
    by_trl = {"completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    given = by_trl | set(columns) - {"prompt", "completion"}  # TRL passes the prompts as `prompts`
    for name, reward in zip(names, rewards, strict=True):
        try:
            wanted = inspect.signature(reward).parameters.values()
        except ValueError:  # some built-in functions have none to read
            continue
        named = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if lacking := [argument for argument in named if argument not in given]:
            raise UsageError(
                f"reward {name!r} needs a column {lacking[0]!r}, and it can be given {', '.join(sorted(given))}."
            )
    return rewards


def _import_reward(name: str) -> Reward:
    module, colon, function = name.rpartition(":")
    if not colon:
        raise UsageError(
            f"reward {name!r} is unknown{nearest(name, ('format', 'accuracy'))}: pick format, accuracy, "
            "module:function or file.py:function."
        )
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"reward_{Path(module).stem}", module)
            found = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
            sys.modules[found.__name__] = found  # dataclasses look themselves up there
            spec.loader.exec_module(found)  # type: ignore[union-attr]
        else:
            sys.path.append(str(Path.cwd()))
            found = importlib.import_module(module)
    except (ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"reward {name!r} cannot be imported: {error}.") from error
    if not callable(reward := getattr(found, function, None)):
        raise UsageError(f"reward {name!r}: {module} has no function {function!r}.")
    return reward
