"""The two rewards of the paper (Section 8.2): format and accuracy, pure functions of text."""

from collections.abc import Callable, Sequence
from typing import Any

from answers import extract_answer, is_correct, timeouts

__all__ = ["ACCURACY_MAX", "FORMAT_MAX", "accuracy_reward", "extract_answer", "format_reward", "is_correct", "score_format"]

FORMAT_MAX = 10.0
ACCURACY_MAX = 10.0
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

Completion = str | Sequence[dict[str, Any]]


def score_format(text: str) -> float:
    """10 for the four tags once each, in order, only white space after the last; 1 for at least one tag; else 0."""
    if not any(tag in text for tag in TAGS):
        return 0.0
    once = all(text.count(tag) == 1 for tag in TAGS)
    in_order = [text.find(tag) for tag in TAGS] == sorted(text.find(tag) for tag in TAGS)
    return FORMAT_MAX if once and in_order and text.rstrip().endswith(TAGS[-1]) else 1.0


def format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """`score_format` of each completion."""
    return [score_format(_text(completion)) for completion in completions]


def accuracy_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """10 for each completion whose answer block holds the right answer, else 0."""
    before = timeouts()
    scores = [
        ACCURACY_MAX if is_correct(extract_answer(_text(completion)), gold) else 0.0
        for completion, gold in zip(completions, answer, strict=True)
    ]
    log_metric: Callable[[str, float], None] | None = kwargs.get("log_metric")
    if log_metric is not None:
        log_metric("grader_timeouts", float(timeouts() - before))
    return scores


def _text(completion: Completion) -> str:
    """The text of a TRL completion: a string, or a conversation whose messages are joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
