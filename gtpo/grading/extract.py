"""Reads the answer out of a completion, and the gold answer out of a GSM8K solution."""

from gtpo.grading.algebra import TimeBudget
from gtpo.grading.compare import equivalent
from gtpo.prompts import ANSWER_CLOSE, ANSWER_OPEN


def extract_answer(
    text: str,
    budget: TimeBudget | None = None,
    opening: str = ANSWER_OPEN,
    closing: str = ANSWER_CLOSE,
) -> str | None:
    """The stripped content of the last complete ``<answer>...</answer>`` block. Runs in linear time.

    None if there is no complete block, if the last one is empty, or if two blocks disagree. A block starts at the last
    opening tag before its closing tag. ``budget``: the time for their comparisons; pass the same to `is_correct`.
    """
    budget = budget or TimeBudget()
    answer: str | None = None
    for part in text.split(closing)[:-1]:
        _, tag, block = part.rpartition(opening)
        if tag:
            block = block.strip()
            if answer is not None and block != answer and not equivalent(block, answer, budget):
                return None
            answer = block
    return answer or None


def gsm8k_gold(answer_text: str) -> str | None:
    """The gold answer of a GSM8K solution: the text after its last ``#### ``, without commas; None if there is none."""
    _, mark, gold = answer_text.rpartition("#### ")
    return gold.replace(",", "").strip() or None if mark else None
