"""The two rewards of the paper (Section 8.2), format and accuracy: pure functions of text with TRL's signature.

    trainer = GTPOTrainer(..., reward_funcs=[format_reward, accuracy_reward])      # the reward is their sum

A completion is a string, or a conversation ``[{"role": "assistant", "content": "..."}]``. No text makes them raise.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from answers import extract_answer, is_correct, timeouts
from config import UsageError, nearest
from prompts import TAGS

__all__ = [
    "ACCURACY_MAX",
    "FORMAT_MAX",
    "accuracy_reward",
    "extract_answer",
    "format_reward",
    "is_correct",
    "load_rewards",
    "score_format",
]

FORMAT_MAX = 10.0  # a step's mean reward over this, in percent, is the `formatting` of Figs. 1-6
ACCURACY_MAX = 10.0  # and over this the `accuracy`

Completion = str | Sequence[dict[str, Any]]
Reward = Callable[..., list[float]]


def score_format(text: str) -> float:
    """10 if each of the four tags is there once, in order, and only white space follows; 1 if any tag is; else 0.

    The paper says "includes all tags"; the order is the prompt's, the rule for the end that of the authors' code. Text
    before and between the tags is allowed.
    """
    if not any(tag in text for tag in TAGS):
        return 0.0
    positions = [text.find(tag) for tag in TAGS]
    once = all(text.count(tag) == 1 for tag in TAGS)
    return FORMAT_MAX if once and positions == sorted(positions) and text.rstrip().endswith(TAGS[-1]) else 1.0


def format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """`score_format` of each completion."""
    return [score_format(_text(completion)) for completion in completions]


def accuracy_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """10 for each completion whose answer block holds the right answer, whatever the reasoning tags do; else 0.

    Args:
        completions: G completions of each prompt.
        answer: The gold answer of each completion's prompt, the column of that name in the data set.
        kwargs: What else TRL passes. Its ``log_metric`` is told ``grader_timeouts``, the comparisons of this call that
            were given up and scored 0: a number that grows means that the reward has stopped measuring.
    """
    before = timeouts()
    rewards = [
        ACCURACY_MAX if is_correct(extract_answer(_text(completion)), gold) else 0.0
        for completion, gold in zip(completions, answer, strict=True)
    ]
    log_metric: Callable[[str, float], None] | None = kwargs.get("log_metric")
    if log_metric is not None:
        log_metric("grader_timeouts", float(timeouts() - before))
    return rewards


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


def _text(completion: Completion) -> str:
    """What the policy wrote: the string itself, or the contents of the conversation's messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
