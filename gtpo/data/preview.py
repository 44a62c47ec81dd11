"""One look before the first step: a completion with the gold answer of a row has to earn the full reward.

It is written as the prompt asks, encoded, decoded and scored as by the trainer and the evaluation. What loses it would
be an accuracy or formatting of 0 for a whole run, without an error.
"""

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from gtpo.arguments import PromptArguments
from gtpo.data.tokenizer import Messages, assistant_prefill, end_of_turn, render
from gtpo.errors import UsageError
from gtpo.grading import alternatives, grade_text
from gtpo.prompts import PromptFormat

logger = logging.getLogger(__name__)

MOST_ROWS = 32
SHOWN = """The prompt of the first row:
{prompt}

A completion with its gold answer, as the rewards see it:
{completion}

Its scores: format {points} of 10, {accuracy}."""


class Preview(NamedTuple):
    """A rendered prompt, the completion as rewards see it, its scores; ``fault``: why they are not the maximum."""

    prompt: str
    completion: str
    follows_format: bool
    is_correct: bool | None  # None: the row has no gold answer
    fault: str | None

    def lines(self) -> list[str]:
        """For ``--dry_run``."""
        accuracy = "no gold answer" if self.is_correct is None else f"accuracy {10 * self.is_correct} of 10"
        text = SHOWN.format(**self._asdict(), points=10 * self.follows_format, accuracy=accuracy)
        if self.fault:
            text += f"\nerror: {self.fault}"
        return text.splitlines()


def check_first_rows(
    tokenizer: Any,
    prompts: Sequence[Messages],
    golds: Sequence[str | None],
    settings: PromptArguments,
    scored: Collection[str] = ("format", "accuracy"),
) -> None:
    """Look at up to MOST_ROWS rows, the first and others between. UsageError if all have a fault; else it is logged.

    ``prompts`` are conversations; ``scored``: which of format and accuracy count.
    """
    count = len(prompts)
    chosen = range(0, count, math.ceil(count / MOST_ROWS))
    faults = []
    for row in chosen:
        seen = look(tokenizer, prompts[row], golds[row], settings, scored)
        if seen.fault:
            faults.append(f"{seen.fault} (prompt {row + 1} of {count}; --dry_run shows a prompt and its completion)")
    if len(faults) == len(chosen):
        raise UsageError(f"{faults[0]}.")
    if faults:
        logger.warning(
            "%d of %d rows that were tried cannot earn the full reward: %s", len(faults), len(chosen), faults[0]
        )
    if settings.format.has_empty_block(seen.completion):
        logger.warning(
            "the chat template writes an empty reasoning block (--chat_template_kwargs): a completion is %r",
            seen.completion,
        )


def look(
    tokenizer: Any,
    prompt: Messages,
    gold: str | None,
    settings: PromptArguments,
    scored: Collection[str] = ("format", "accuracy"),
) -> Preview:
    """The prompt of a row, and a completion of it with its gold answer, encoded, decoded and scored."""
    text = render(tokenizer, prompt, add_generation_prompt=True, **settings.template_kwargs)
    prefill = assistant_prefill(tokenizer, settings)
    form = settings.format
    written = form.to_completion("...", "42" if gold is None else alternatives(gold)[0])
    for tag in form.tags:
        if tag in prefill:  # which the chat template has written
            written = written.partition(tag)[2]
    ids = tokenizer.encode(written, add_special_tokens=False)
    seen = prefill + tokenizer.decode(ids, skip_special_tokens=True)
    follows = form.follows_format(seen)
    correct = None if gold is None else grade_text(seen, gold, *form.answer_tags).correct
    fault = _lost_turn(tokenizer, prompt, text) or _lost_text(tokenizer, ids)
    loses_format = "format" in scored and not follows
    loses_accuracy = "accuracy" in scored and correct is False
    if not fault and (loses_format or loses_accuracy):
        fault = _reason(written, seen, prefill, form)
    return Preview(text, seen, follows, correct, fault)


def _lost_turn(tokenizer: Any, prompt: Messages, text: str) -> str | None:
    """What the template leaves out: the system's or a user's turn, or the beginning of the assistant's.

    Of earlier answers many templates leave the reasoning out.
    """
    for turn in prompt:
        content = turn.get("content") or ""
        if turn["role"] in ("system", "user") and "".join(content.split()) not in "".join(text.split()):
            whose = turn["role"]
            return f"the chat template leaves out the {whose}'s turn, or a part of it: name another --chat_template"
    for token in {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}:
        if text.rstrip().endswith(end := tokenizer.decode([token])):
            return (
                f"the chat template ends the prompt with {end} and does not begin the assistant's turn: name another "
                "--chat_template, with add_generation_prompt"
            )
    return None


def _lost_text(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """What follows an end token in a tag or an answer is lost."""
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    for token in ids:
        if token in ends:
            return (
                f"a tag or the gold answer contains {tokenizer.decode([token])}, which ends a completion: name other "
                "--tags, or correct the answer"
            )
    return None


def _reason(written: str, seen: str, prefill: str, form: PromptFormat) -> str:
    """Why a completion with the gold answer does not earn the full reward."""
    for tag in form.tags:
        if tag in written and tag not in seen:
            return (
                f"the tag {tag} is a special token of the tokenizer, which decoding drops, so that no reward sees it: "
                'set "special": false for it in tokenizer.json and tokenizer_config.json, or name other --tags'
            )
    if prefill and not form.follows_format(seen):
        return (
            f"the chat template begins the completion with {prefill!r}, after which no completion follows the format: "
            "name another --chat_template or --chat_template_kwargs, or other --tags"
        )
    return (
        f"a completion with the gold answer is not correct, the rewards see {seen!r}: correct --answer_column, or name "
        "other --tags"
    )
