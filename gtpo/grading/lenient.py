r"""Two verdicts on a completion: the strict one of its answer block, and a lenient one that any format can pass.

The lenient answer is the content of the last ``\boxed{}``, else the answer block, else the last number of the text (the
last choice if the gold answer is one). A completion that is strictly correct is also leniently correct.
"""

import re
from collections import deque
from typing import NamedTuple

from gtpo.grading.algebra import TimeBudget
from gtpo.grading.compare import is_correct
from gtpo.grading.extract import extract_answer
from gtpo.grading.latex import TEXT, last_boxed
from gtpo.grading.normal_form import normalise
from gtpo.grading.numerals import DECIMAL
from gtpo.prompts import ANSWER_CLOSE, ANSWER_OPEN

_INTEGER = r"[0-9]{1,3}(?:(?:,|\{,\}|,\\!|\\,)[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"  # with thousands separators
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)}}\]])[-\u2212]\s?)?\\?\$?(?:\\[dt]?frac\{{-?{DECIMAL}\}}\{{-?{DECIMAL}\}}"
    rf"|(?:{_INTEGER}|{DECIMAL})(?:\s?/\s?[0-9]+|\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}})?)(?:\s?\\?%)?"
)
# a capital letter alone; "A car" is none
_CHOICE = re.compile(r"(?<![A-Za-z\\'])(?:[B-HJ]|A(?!\s+[a-z]))(?![A-Za-z'])")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+[,;:]?\s+[A-Za-z]+\b")  # two words in a row


class Verdicts(NamedTuple):
    """What a completion answers, and whether it is right, by both rules; None: it has no answer."""

    answer: str | None
    correct: bool
    lenient_answer: str | None
    correct_leniently: bool


def grade_text(text: str, gold: str, opening: str = ANSWER_OPEN, closing: str = ANSWER_CLOSE) -> Verdicts:
    """Grade a completion by both rules. The lenient one gets the time that the strict one leaves."""
    budget = TimeBudget()
    answer = extract_answer(text, budget, opening, closing)
    correct = is_correct(answer, gold, budget)
    lenient = lenient_answer(text, answer, gold)
    if correct or lenient is None or budget.seconds_left <= 0 or normalise(lenient) == normalise(answer or ""):
        return Verdicts(answer, correct, lenient, correct)
    return Verdicts(answer, correct, lenient, is_correct(lenient, gold, budget))


def lenient_answer(text: str, answer: str | None, gold: str) -> str | None:
    r"""The answer of a completion in any format; None if it has none. Runs in linear time.

    ``answer`` is that of its block; a sentence ("She makes 18 dollars a day.") is read like the rest of the text. Of
    ``gold`` only matters whether it is a choice, one letter from A to J.
    """
    if boxed := last_boxed(text):
        return boxed
    if answer is not None and not _PROSE.search(re.sub(TEXT, "", answer)):
        return answer
    whole = re.fullmatch(TEXT, gold.strip())
    is_choice = re.fullmatch(r"\(?[A-J]\)?", normalise(whole["content"] if whole else gold))
    pattern = _CHOICE if is_choice else _NUMBER
    last = next(iter(deque(pattern.finditer(text), maxlen=1)), None)
    return last[0] if last else answer
