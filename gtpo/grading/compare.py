"""Decides whether two answers are equal: applies the rules in order (see the package's docstring)."""

import re
import time
from functools import lru_cache

from gtpo.grading.algebra import TimeBudget, alternatives
from gtpo.grading.latex import FUNCTIONS, TEXT, split_top_level
from gtpo.grading.normal_form import normalise
from gtpo.grading.numerals import parse_number, same_number
from gtpo.grading.structure import parse_structure
from gtpo.grading.units import split_unit, strip_units
from gtpo.grading.worker import ComparisonFailed, shared_worker

_MAX_UNORDERED = 64  # elements compared in any order, which takes quadratic time
_COMPARISON = r"[<>]|\\(?:leq|geq|neq)(?![a-zA-Z])"
_RELATION = f"=|{_COMPARISON}"
_NEGATION = re.compile(r"\b(?:not?|never|neither|wrong|false|incorrect)\b|n't\b", re.IGNORECASE)
_CONNECTIVE = re.compile(r"\b(and|or)\b|(\\cup(?![a-zA-Z])|\u222a)")
_SOLUTIONS = re.compile(r"[\d=]|\\(?!text|mbox)")  # x = 1 and x = 2 is x = 1 or x = 2; A and B is not A or B
_RANGE = re.compile(r"\d+(?:-\d+)+")  # a date, a range, a telephone number
NAME = re.compile(  # x, x_1, f(x), (x,y), \angle ABC, Area; not \sin x
    rf"(?!.*\\(?:{FUNCTIONS}|frac|sqrt))(?:[A-Za-z\\(),' ]|_\{{\w+\}}|\\text\{{[^{{}}]*\}}"
    r"|\\(?:math(?:bf|rm|it|cal)|vec|overline|overrightarrow|boldsymbol)\{[A-Za-z]+\})+"
)
_PART_OFNAME = re.compile(  # its digits do not count: a_1, AB^2, |z|^2, \sin^2 x, f^{-1}(3), P(X=8), \gcd(6,9)
    rf"_\{{[^{{}}]*\}}|(?<=[A-Z]{{2}})\^\{{\d\}}|(?<=\|)\^\{{\d\}}|\\(?:{FUNCTIONS})(?:\^\{{\d\}})?"
    r"|(?:[a-wA-W]|\\gcd)(?:\^\{-1\})?\((?![^()]*[xyz])[^()]*\)|\\(?:frac|sqrt|pi)(?![a-zA-Z])"
)


def is_correct(prediction: str | None, gold: str, budget: TimeBudget | None = None) -> bool:
    """True if `prediction` equals `gold` or one of its :func:`alternatives`. None (no answer found) is wrong."""
    return prediction is not None and any(equivalent(each, prediction, budget) for each in alternatives(gold))


def equivalent(a: str, b: str, budget: TimeBudget | None = None) -> bool:
    """True if two answers mean the same. Symmetric, so majority voting can group by it. Empty answers equal nothing.

    ``budget`` is the time that this comparison shares with others; its own by default. Two answers whose comparison
    ends above it count as different and as one of `timeouts`; once it is spent, no comparison starts.
    """
    first, second = sorted((normalise(a), normalise(b)))  # sorted: symmetric, and one cache entry per pair
    if not first or _other_connective(a, b):
        return False
    budget = budget or TimeBudget()
    is_same, seconds = decide(first, second) if budget.seconds_left > 0 else (None, 0.0)
    budget.seconds_left -= seconds
    if is_same is None or budget.seconds_left < 0:
        shared_worker.timeouts += 1
        return False
    return is_same


def _other_connective(a: str, b: str) -> bool:
    """True if one text joins conditions or words by "and", the other by "or"."""
    found = [{"or" if cup else word for word, cup in _CONNECTIVE.findall(text)} for text in (a, b)]
    if sorted(map(list, found)) != [["and"], ["or"]]:
        return False
    return bool(re.search(rf"{_COMPARISON}|[≤≥≠]|\\[lg](?:e|t)(?![a-zA-Z])", a + b)) or not _SOLUTIONS.search(a + b)


@lru_cache(maxsize=2**16)
def decide(a: str, b: str) -> tuple[bool | None, float]:
    """(`equivalent` for two normal forms, seconds taken: CPU time of the exact rules and time in the worker).

    (None, TIME_LIMIT) for a comparison that exceeds a limit. A result from the cache has the seconds of the first time.
    """
    budget, start = TimeBudget(), time.thread_time()
    limit = budget.seconds_left
    try:
        is_same = _same(a, b, budget)
    except ComparisonFailed:
        return None, limit
    except RecursionError:
        is_same = False
    return is_same, min(limit, limit - budget.seconds_left + time.thread_time() - start)


def _same(a: str, b: str, budget: TimeBudget) -> bool:
    """Compare two answers, or two elements of answers, in normal form."""
    if a == b:
        return bool(a)
    if _RANGE.fullmatch(a) or _RANGE.fullmatch(b):
        return False
    (name_a, value_a), (name_b, value_b) = _assignment(a, budget), _assignment(b, budget)
    if name_a and name_b:
        return _same(value_a, value_b, budget) if name_a == name_b else budget.sympy_equal(a, b)
    if (name_a or name_b) and "=" in a and "=" in b:  # y = 2x + 3 and 2x - y + 3 = 0
        return budget.sympy_equal(a, b)
    if (value_a, value_b) != (a, b):
        return _same(value_a, value_b, budget)
    return _same_structure(a, b, budget)


def _assignment(text: str, budget: TimeBudget) -> tuple[str, str]:
    r"""(name, value) of ``x = 5`` or ``x \in [0, 1]``; the name is empty if there is none.

    The value of a chain is its last member: ``P = \frac{2}{4} = \frac12``. The members before it must be equal to it,
    or formulas for it: ``A = \pi r^2 = 9\pi``. ``18 = 19``, comparisons and equations are left as they are.
    """
    if ("=" not in text and "\\in" not in text) or len(split_top_level(text, f"[,;]|{_COMPARISON}")) > 1:
        return "", text
    name, *values = split_top_level(text, r"=|\\in(?![a-zA-Z])")
    if not values or _NEGATION.search(text):
        return "", text
    if len(values) == 1 and parse_number(name) and _is_quantity(values[0]):
        name, values = values[0], [name]  # 18 = x
    value = values[-1]
    is_constant = not _variables(split_unit(value).value)
    is_unfinished = re.fullmatch(r"[\d.+*-]+", value) and not parse_number(value)  # m + n = 841 + 61
    if not (NAME.fullmatch(name) or (is_constant and not is_unfinished and _is_quantity(name))):
        if _variables(text):
            return "", text  # an equation
        name, values = "", [name, *values]
    for member in values[:-1]:
        is_formula = is_constant and _variables(member)
        if not (is_formula or member == value or _same_structure(member, value, budget)):
            return "", text
    return name.replace(" ", ""), value


def _is_quantity(text: str) -> bool:
    r"""True for what has a value: ``|z|``, ``f(2)``, ``m+n``, ``\frac{a}{b}``, words; not for 2x, x+1, x^2 and -x."""
    if has_words(text):
        return not parse_number(split_unit(text).value)  # 18 dollars
    count = 1
    while count:
        text, count = _PART_OFNAME.subn(lambda match: "A" if match[0][-1] == ")" else "", text)
    return bool(re.search(r"[a-zA-Z]", text)) and not re.search(r"\d|^-", text)


def _same_structure(a: str, b: str, budget: TimeBudget) -> bool:
    """Compare tuples, intervals, sets, lists, unions and matrices element by element."""
    (kind_a, items_a), (kind_b, items_b) = parse_structure(a), parse_structure(b)
    kinds = {kind_a, kind_b}
    if kinds == {""}:
        return _same_scalar(items_a[0], items_b[0], budget)
    if kinds <= {"list", "set", "union"}:  # the intervals of a union may be listed: x < 2 or x > 5
        same = _same_items(items_a, items_b, budget, ordered=is_ranking(items_a))
        return same or (kinds == {"union"} and budget.sympy_equal(a, b))
    if kind_a == kind_b or kinds <= {"()", "list", "matrix 1"}:  # 1,2 for (1,2); (1,2) for a column
        return _same_items(items_a, items_b, budget, ordered=True)
    intervals = {"()", "(]", "[)", "[]", "union"}
    is_relation = "" in kinds and re.search(rf"{_RELATION}|\\setminus", a + b)
    if (kinds <= intervals and "union" in kinds) or (kinds & intervals and is_relation):
        return budget.sympy_equal(a, b)  # one interval for two adjacent ones; x > 2 for an interval
    return False


def is_ranking(items: tuple[str, ...]) -> bool:
    """True for a list of words, whose order counts."""
    return any(re.fullmatch(r"[A-Za-z ]{2,}", item) for item in items)


def _same_items(a: tuple[str, ...], b: tuple[str, ...], budget: TimeBudget, *, ordered: bool) -> bool:
    """Compare elements pairwise, in order or in any order; long lists always in order."""
    if len(a) != len(b):
        return False
    if ordered or len(a) > _MAX_UNORDERED:
        return all(_same(x, y, budget) for x, y in zip(a, b, strict=True))
    rest = list(b)
    for x in a:
        match = next((y for y in rest if x == y), None) or next((y for y in rest if _same(x, y, budget)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same_scalar(a: str, b: str, budget: TimeBudget) -> bool:
    """Compare two answers without structure: numbers, numbers in a base, words, or expressions."""
    if (verdict := same_number(a, b)) is not None:
        return verdict
    a, b = strip_words(a), strip_words(b)
    values = strip_units(a, b)
    if values is None:
        return False
    x, y = values
    if x == y:
        return True
    if re.fullmatch("[A-Za-z]+,[A-Za-z]+", f"{x},{y}") and (x.casefold() == y.casefold() or min(len(x), len(y)) > 1):
        return x.casefold() == y.casefold()  # words of any length: on is not no, abc is not cba
    if values != (a, b) and (verdict := same_number(x, y)) is not None:
        return verdict
    if bool(re.search(_RELATION, x)) != bool(re.search(_RELATION, y)):
        return False  # 2x = 18 is not 18
    for rule in (_same_in_base, _same_ratio, _same_words):
        if (verdict := rule(x, y)) is not None:
            return verdict
    letters = _variables(x), _variables(y)
    if letters[0] != letters[1] and {c.lower() for c in letters[0]} == {c.lower() for c in letters[1]}:
        return False  # the grammar reads X as x
    if (parse_number(x) or parse_number(y)) and _variables(x + y) and "\\" not in x + y:
        return False  # an expression with a variable is not a number, unless functions cancel: those go to sympy
    return budget.sympy_equal(x, y)


def strip_words(text: str) -> str:
    r"""A scalar without text wrapper, article or the brackets of a choice: ``\text{(E)}`` is E."""
    if whole := re.fullmatch(TEXT, text):
        text = whole["content"].strip()
    text = re.sub(r"^(?:an?|the|option|choice)(?:\s+(?=[a-zA-Z])|(?=\())", "", text, flags=re.IGNORECASE)
    if choice := re.fullmatch(r"\(([A-Za-z])\)", text):
        text = choice[1]
    elif (choice := re.fullmatch(r"(?:\\text\{)?\(([A-J])\)\}?(.+)", text)) and parse_number(
        split_unit(choice[2]).value
    ):
        text = choice[1]  # (E) 12 cm
    return text


def _same_in_base(a: str, b: str) -> bool | None:
    """Compare digits and base: 204_5 is not 204_6, 204 or 54. Base 10 may be missing. None without a base."""
    bases = [re.fullmatch(r"(-?[0-9A-Z.]+)_\{(\w+)\}", text) for text in (a, b)]
    if not any(bases):
        return None
    digits_a, digits_b = (
        match[1] if match and match[2] == "10" else text for match, text in zip(bases, (a, b), strict=True)
    )
    return bool(same_number(digits_a, digits_b))


def _same_ratio(a: str, b: str) -> bool | None:
    """Compare ratios and times part by part: 05:00 is 5:00, and 1:2 is not 1/2. None without a colon."""
    if ":" not in a + b:
        return None
    parts_a, parts_b = a.split(":"), b.split(":")
    return len(parts_a) == len(parts_b) and all(map(same_number, parts_a, parts_b))


def _same_words(a: str, b: str) -> bool | None:
    """Compare words; case, spaces, quotes, periods and hyphens are ignored. None if neither text contains words."""
    if not (has_words(a) or has_words(b)):
        return None
    return squash(a) == squash(b) != ""


def has_words(text: str) -> bool:
    """True for words, False for a product of variables: four letters in a row, or two capitals, make a word."""
    bare = re.sub(r"\\(?!text|mbox)[a-zA-Z]+", " ", text)
    return bool(re.search(r"[a-zA-Z]{4}|[A-Z]{2}|\\text|\\mbox", bare))


def squash(text: str) -> str:
    return re.sub(r"[\s'\"{}]|\\(?:text|mbox)|(?<=[a-zA-Z])[.-]", "", text).casefold()


def _variables(text: str) -> set[str]:
    """The variables of an expression: its letters outside commands, except i and e."""
    return set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+(?:\{[a-z]*matrix\})?", " ", text))) - {"i", "e"}
