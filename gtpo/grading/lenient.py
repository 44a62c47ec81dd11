r"""Two verdicts on a completion: the strict one of its answer block, and a lenient one that any format can pass.

The lenient answer is the content of the last ``\boxed{}``, else the answer block, else the last number of the text (the
last choice if the gold answer is one). A completion that is strictly correct is also leniently correct.
"""

import re
from typing import NamedTuple

from gtpo.grading.algebra import TimeBudget
from gtpo.grading.compare import is_correct
from gtpo.grading.extract import extract_answer
from gtpo.grading.latex import TEXT, boxes_of_last_line, last_boxed
from gtpo.grading.normal_form import normalise
from gtpo.grading.numerals import DECIMAL
from gtpo.grading.structure import parse_structure
from gtpo.prompts import ANSWER_CLOSE, ANSWER_OPEN

_INTEGER = r"[0-9]{1,3}(?:(?:,|\{,\}|,\\!|\\,)[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"  # with thousands separators
_TEN = r"\s?(?:\*|\u00d7|x|\\times|\\cdot)\s?10\s?(?:\^\s?\{?-?[0-9]+\}?|[⁻⁰¹²³⁴-⁹]+)"  # 5 x 10^3
_POWER = rf"{_TEN}|[eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z])"
_PART = r"[¼-¾⅐-⅞]"  # ½
_RATIO = rf"\s?/\s?[0-9]+|\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}}|{_PART}"
_NUMBER = (
    rf"(?:(?<![\w)}}\]])[-\u2212]\s?)?\\?\$?(?:\\[dt]?frac\{{-?{DECIMAL}\}}\{{-?{DECIMAL}\}}|{_PART}"
    rf"|(?:{_INTEGER}|{DECIMAL})(?:{_POWER}|{_RATIO})?)(?:\s?\\?%)?"
)
_UNIT = re.compile(  # what can be an answer; a formula, a pair and an interval only as a whole
    r"\$\$?(?=[^\s$])(?P<dollars>[^$]++)(?<!\s)\$\$?(?![0-9])|\\[(\[](?P<brackets>(?:(?!\\[()\[\]]).)*+)\\[)\]]"
    rf"|(?P<group>[\[(][^\[\]()a-zA-Z,]*+,[^\[\]()a-zA-Z]*+[\])])|(?P<number>{_NUMBER})",
    re.DOTALL,
)
# before a number in a word or a formula
_INSIDE = re.compile(r"(?:[A-Za-z√_^/]|(?<=[\w)}])\*|(?<!text)(?<!textbf)(?<!mathbf)(?<!mathrm)\{)\Z")
_GOES_ON = re.compile(  # after a number: 2x, not 2 km; 2^3, 2\sqrt{3}
    r"[a-zA-Z](?![a-zA-Z])(?<![mgshlLJNWVKC])|\s?[\^_]|\s?\\(?:sqrt|pi|cdot|times|frac|pm|log|ln|sin|cos|tan|infty)"
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


def grade_text(
    text: str,
    gold: str,
    opening: str = ANSWER_OPEN,
    closing: str = ANSWER_CLOSE,
) -> Verdicts:
    """Grade a completion by both rules. The lenient one gets the time that the strict one leaves."""
    budget = TimeBudget()
    answer = extract_answer(text, budget, opening, closing)
    correct = is_correct(answer, gold, budget)
    lenient = lenient_answer(text, answer, gold)
    is_decided = correct or budget.seconds_left <= 0 or normalise(lenient or "") == normalise(answer or "")
    return Verdicts(answer, correct, lenient, correct if is_decided else is_correct(lenient, gold, budget))


def lenient_answer(text: str, answer: str | None, gold: str) -> str | None:
    r"""The answer of a completion in any format; None if it has none. Runs in linear time.

    ``answer`` is that of its block; a sentence ("She makes 18 dollars a day.") is read like the rest of the text. Of
    ``gold`` only matters whether it is a list, or a choice, one letter from A to J.
    """
    whole = re.fullmatch(TEXT, gold.strip())
    form = normalise(whole["content"] if whole else gold)
    if boxed := last_boxed(text):
        is_list = parse_structure(form)[0] in ("list", "set")
        return ", ".join(boxes_of_last_line(text)) if is_list else boxed
    if answer is not None and not _PROSE.search(re.sub(TEXT, "", answer)):
        return answer
    is_choice = re.fullmatch(r"\(?[A-J]\)?", form)
    for unit in reversed([*(_CHOICE if is_choice else _UNIT).finditer(text)]):
        found = unit[0] if is_choice else _read_unit(unit, text)
        if found is not None:
            return found
    return answer


def _read_unit(unit: re.Match[str], text: str) -> str | None:
    """The answer in a part of a text; None for a number in a word or a formula, and for a formula without a number."""
    if unit["number"]:
        start, end = unit.span()
        is_part = _INSIDE.search(text, max(start - 12, 0), start) or _GOES_ON.match(text, end)
        return None if is_part else unit[0]
    found = unit["dollars"] or unit["brackets"] or unit["group"] or ""
    if not re.search(r"[0-9]", found) or _PROSE.search(re.sub(TEXT, "", found)):
        return None
    return found
