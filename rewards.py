"""The two rewards of the paper (Section 8.2), format and accuracy: pure functions of text with TRL's signature.

    trainer = GTPOTrainer(..., reward_funcs=[format_reward, accuracy_reward])      # the reward is their sum

A completion is a string, or a conversation ``[{"role": "assistant", "content": "..."}]``. No text makes them raise.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gtpo.grading.compare import is_correct, timeouts
from gtpo.grading.extract import extract_answer
from gtpo.prompts import TAGS

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


def _text(completion: Completion) -> str:
    """What the policy wrote: the string itself, or the contents of the conversation's messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
