"""The two rewards of the paper (Section 8.2), format and accuracy: pure functions of text with TRL's signature.

    trainer = GTPOTrainer(..., reward_funcs=[format_reward, accuracy_reward])      # their sum is the reward

A completion is a string or a conversation ``[{"role": "assistant", "content": "..."}]``. They accept any text. Both
log their mean in percent of the maximum through TRL's ``log_metric``: ``formatting`` and ``accuracy`` of Figs. 1 to 6.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

from gtpo.grading import extract_answer, grade_text, is_correct, timeouts  # noqa: F401  (both are imported from here)
from gtpo.prompts import PAPER, PromptFormat

FORMAT_MAX = 10.0
ACCURACY_MAX = 10.0

Completion = str | Sequence[dict[str, Any]]
LogMetric = Callable[[str, float], None]


def rewards_in(prompt_format: PromptFormat) -> dict[str, Callable[..., list[float]]]:
    """The two rewards for the tags of a format, by their names in ``--reward``."""
    both: dict[str, Callable[..., list[float]]] = {"format": format_reward, "accuracy": accuracy_reward}
    return {name: update_wrapper(partial(f, prompt_format=prompt_format), f) for name, f in both.items()}


def score_format(text: str, prompt_format: PromptFormat = PAPER) -> float:
    """10 if the text follows the format (``PromptFormat.follows_format``), 1 if any tag occurs, else 0."""
    if prompt_format.follows_format(text):
        return FORMAT_MAX
    return 1.0 if any(tag in text for tag in prompt_format.tags) else 0.0


def format_reward(
    completions: Sequence[Completion],
    log_metric: LogMetric | None = None,
    prompt_format: PromptFormat = PAPER,
    **kwargs: Any,
) -> list[float]:
    """:func:`score_format` of each completion.

    Args:
        completions: G completions of each prompt.
        log_metric: TRL's; gets ``formatting``, the mean in percent of the maximum, and ``empty_blocks``, the percentage
            in the format without a reasoning or without an answer.
        prompt_format: The tags.
        kwargs: Other arguments of TRL, ignored.
    """
    texts = [_text(completion) for completion in completions]
    rewards = [score_format(text, prompt_format) for text in texts]
    _log_percent(log_metric, "formatting", rewards, FORMAT_MAX)
    _log_percent(log_metric, "empty_blocks", [float(prompt_format.has_empty_block(text)) for text in texts], 1.0)
    return rewards


def accuracy_reward(
    completions: Sequence[Completion],
    answer: Sequence[str],
    log_metric: LogMetric | None = None,
    prompt_format: PromptFormat = PAPER,
    **kwargs: Any,
) -> list[float]:
    """10 for each completion whose answer block contains the correct answer, with any reasoning tags; else 0.

    A completion that exceeds its :class:`gtpo.grading.TimeBudget` gets 0. In the worst case all of a batch do, each
    takes up to 12 seconds, and the call as long as all of them; known answers take no time again.

    Args:
        completions: G completions of each prompt.
        answer: The gold answer for each completion, from the dataset column of that name.
        log_metric: TRL's; gets ``accuracy``, the mean in percent of the maximum; ``accuracy_lenient``, the percentage
            with the right answer in any format (:mod:`gtpo.grading.lenient`), which the reward ignores; and
            ``grader_timeouts``, the completions of this call that exceeded the time or memory limit and scored 0.
        prompt_format: The tags.
        kwargs: Other arguments of TRL, ignored.
    """
    timeouts_before = timeouts()
    verdicts = [
        grade_text(_text(completion), gold, *prompt_format.answer_tags)
        for completion, gold in zip(completions, answer, strict=True)
    ]
    rewards = [ACCURACY_MAX if verdict.correct else 0.0 for verdict in verdicts]
    _log_percent(log_metric, "accuracy", rewards, ACCURACY_MAX)
    _log_percent(log_metric, "accuracy_lenient", [float(verdict.correct_leniently) for verdict in verdicts], 1.0)
    if log_metric is not None:
        log_metric("grader_timeouts", float(timeouts() - timeouts_before))
    return rewards


def _log_percent(log_metric: LogMetric | None, name: str, rewards: Sequence[float], maximum: float) -> None:
    if log_metric is not None and rewards:
        log_metric(name, 100 * sum(rewards) / len(rewards) / maximum)


def _text(completion: Completion) -> str:
    """The string itself, or the contents of the messages, concatenated."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
