"""Decides whether two answers are equal: applies the rules in order (see the package's docstring)."""

import re
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from gtpo.grading.algebra import ComparisonFailed, TimeBudget, alternatives
from gtpo.grading.latex import COMPARISON, FUNCTIONS, split_top_level
from gtpo.grading.named import NAME, without_names
from gtpo.grading.normal_form import MAX_LENGTH, normalise, read
from gtpo.grading.numerals import as_fraction, last_place, parse_number, same_number
from gtpo.grading.remark import conditions_differ, with_variable
from gtpo.grading.structure import ELLIPSIS, MAX_UNORDERED, Items, parse_structure
from gtpo.grading.subject import CLOSED, is_name
from gtpo.grading.units import (
    LABEL,
    has_remark,
    in_one_unit,
    split_unit,
    strip_units,
    without_change,
    without_same_change,
)
from gtpo.grading.worker import shared_worker

_COMMAND = r"\\(?!text|mbox)[a-zA-Z]+(?:\{[a-z]*matrix\})?"
_RELATION = f"=|{COMPARISON}"
_OPERATION = rf"{_RELATION}|\\(?:setminus|cap)(?![a-zA-Z])|matrix"
_LISTED = re.compile(r"(?<=\d),(?=[1-9]\d\d(?!\d))")
_MIXED = re.compile(r"(?<=\d)\$? and (?:a )?\$?(?=\d+/\d+|\\[dt]?frac)")
_POINT = re.compile(r"(?:^|(?<=[,; ]))\$?[A-Z]\s*(?=\()")  # P(2,5), which counts permutations elsewhere
_OPTION = re.compile(  # one label: (B) with its text
    r"\(([A-J])\)(?!.*(?:\([A-J]\)|(?<![A-Za-z])[A-J][.):]|\b[A-J]$|(?i:\b(?:wrong|incorrect|no|wait|actually|maybe|hmm|doesn't|eliminated|rejected)\b)))(?!is\b|or\b|and\b|not\b|nor\b|,|[A-J]$)(.+)"
)
_SEGMENT = re.compile(r"(?<![A-Za-z\\])([A-Z]{2})(?![A-Za-z_\d])")
_FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:_?\{?\d+\}?)?){2,}")  # H_2O
_BELOW_HALF = Fraction(49, 100)
_INTERVAL = re.compile(r"[a-z]\\in[\[(]")
_RANGE = re.compile(r"\d+(?:-\d+)+")  # a date, a range, a telephone number
_PART_OF_NAME = re.compile(  # its digits do not count: a_1, AB^2, |z|^2, \sin^2 x, f^{-1}(3), P(X=8), \gcd(6,9)
    rf"_\{{[^{{}}]*\}}|(?<=[A-Z]{{2}})\^\{{\d\}}|(?<=\|)\^\{{\d\}}|\\(?:{FUNCTIONS})(?:\^\{{\d\}})?"
    r"|(?:[a-wA-W]|\\gcd)(?:\^\{-1\})?\((?![^()]*[xyz])[^()]*\)|\\(?:frac|sqrt|pi)(?![a-zA-Z])"
)


def is_correct(prediction: str | None, gold: str, budget: TimeBudget | None = None) -> bool:
    """True if `prediction` equals `gold` or one of its :func:`alternatives`. None (no answer found) is wrong.

    Where a text has two readings, the form of the gold answer decides: ``30,250`` is a list if the gold is one, and
    ``3 and 1/2`` a mixed number if the gold is a number.
    """
    if prediction is None:
        return False
    return any(
        equivalent(each, reading, budget)
        for written in alternatives(gold)
        for each in dict.fromkeys((written, without_change(written)))
        if each == written or not has_remark(prediction)  # 5 to the left is not 5 left
        for reading in _readings(prediction, each)
    )


def _readings(prediction: str, gold: str) -> Iterator[str]:
    """The prediction, then its second reading if the gold answer has that form."""
    yield prediction
    if len(prediction) > MAX_LENGTH:
        return
    form = normalise(gold)
    kind = parse_structure(form)[0]
    if form.endswith("%") and (number := parse_number(normalise(prediction))) and not number[1]:
        yield f"{prediction} percent"  # 0.5 for 0.5%
    pattern, separator = (_LISTED, ", ") if kind else (_MIXED, " ")
    if pattern.search(prediction):
        yield pattern.sub(separator, prediction)
    if kind in ("()", "list") and _POINT.match(prediction):
        yield _POINT.sub("", prediction)


def equivalent(a: str, b: str, budget: TimeBudget | None = None) -> bool:
    """True if two answers mean the same. Symmetric, so majority voting can group by it. Empty answers equal nothing.

    ``budget`` is the time that this comparison shares with others; its own by default. Two answers whose comparison
    ends above it count as different and as one of `timeouts`; once it is spent, no comparison starts.
    """
    (first, condition), (second, other) = sorted((read(a), read(b)))  # symmetric, and one cache entry per pair
    if not first or conditions_differ(condition, other):
        return False
    second = with_variable(second, other, condition)
    if first.isdecimal() and second.isdecimal():
        return int(first) == int(second)
    budget = budget or TimeBudget()
    is_same = None
    if budget.seconds_left > 0:
        is_same, seconds = (True, 0.0) if first == second else decide(first, second)
        budget.seconds_left -= seconds
    if is_same is None or budget.seconds_left < 0:
        shared_worker.timeouts += 1
        return False
    return is_same


@lru_cache(maxsize=2**16)
def decide(a: str, b: str) -> tuple[bool | None, float]:
    """(`equivalent` for two normal forms, seconds taken: CPU time of the exact rules and time in the worker).

    (None, TIME_LIMIT) for a comparison that exceeds a limit. A result from the cache has the seconds of the first time.
    """
    budget, start = TimeBudget(), time.thread_time()
    limit = budget.seconds_left
    try:
        is_same = _same(in_one_unit(a), in_one_unit(b), budget)
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
    verdict = _same_option(a, b, budget)
    if verdict is not None:
        return verdict
    if (_INTERVAL.match(a) and parse_structure(b)[0] == "list") or (
        _INTERVAL.match(b) and parse_structure(a)[0] == "list"
    ):
        return False  # x \in (3, 8) is no list
    name_a, value_a = _assignment(a, budget)
    name_b, value_b = _assignment(b, budget)
    if name_a and name_a == name_b:
        return _same(value_a, value_b, budget)
    are_equations = "=" in a and "=" in b and "list" not in (parse_structure(a)[0], parse_structure(b)[0])
    if (name_a and name_b) or ((name_a or name_b) and are_equations):
        return "\\angle" not in name_a + name_b and budget.sympy_equal(a, b)  # another angle
    if (value_a, value_b) != (a, b):
        return _same(value_a, value_b, budget)
    return _same_structure(a, b, budget)


def _same_option(a: str, b: str, budget: TimeBudget) -> bool | None:
    """Options by their letters: B and (B) with its text; a text without label by the text. None without such a text."""
    x, y = _OPTION.fullmatch(a), _OPTION.fullmatch(b)
    if x and y:
        return x[1] == y[1]
    if y:
        return _same_option(b, a, budget)
    if not x:
        return None
    return x[1] == b if re.fullmatch("[A-J]", b) else _same(x[2], b, budget)


def _assignment(text: str, budget: TimeBudget) -> tuple[str, str]:
    r"""(name, value) of ``x = 5`` or ``x \in [0, 1]``; the name is empty if there is none.

    The value of a chain is its last member: ``P = \frac{2}{4} = \frac12``. The members before it must be equal to it,
    or formulas for it: ``A = \pi r^2 = 9\pi``. ``18 = 19``, comparisons and equations are left as they are.
    """
    name, *values = split_top_level(text, r"=|\\in(?![a-zA-Z])")
    if not values:
        return "", text
    text = text.replace(name, name := _without_labels(name), 1)
    if re.search(r"\b(?:at|when|where|if) [a-z]=", text) or len(split_top_level(text, f"[,;]|{COMPARISON}")) > 1:
        return "", text
    if text.count("=") == len(values) == 1 and parse_number(name) and _is_quantity(values[0]):
        name, values = values[0], [name]  # 18 = x
    value = values[-1]
    is_constant = not _has_variables(value)
    is_sum = re.fullmatch(r"[\d.+*-]+", value) and not parse_number(value)  # m + n = 841 + 61
    is_unfinished = is_sum or re.fullmatch(r"[^=]*\d[^=]*=0", text)  # 2a + b = 0
    is_named = NAME.fullmatch(name) and (is_name(name) if has_words(name) else not _is_closed(name))
    if not (is_named or (is_constant and not is_unfinished and _is_quantity(name))):
        if any(map(_has_variables, (name, *values))):
            return "", text  # an equation
        name, values = "", [name, *values]
    for member in values[:-1]:
        is_formula = is_constant and _has_variables(member)
        if not (is_formula or member == value or _same_structure(member, value, budget)):
            return "", text
    return name.replace(" ", ""), value


def _without_labels(text: str) -> str:
    """A computation without the labels of its numbers: ``3 sprints * 3 times``; any other text as it is."""
    if not re.match(r"\d.*[-+*/]", text) or not has_words(text):
        return text
    text = re.sub(r"\btimes\b", "", text)
    terms = [split_unit(term.strip()) for term in re.split(r"[-+*/]", text)]
    if any(term.unit not in (None, LABEL) or not parse_number(term.value) for term in terms):
        return text
    values = iter(terms)
    return re.sub(r"[^-+*/]+", lambda _: next(values).value, text)


def _is_quantity(text: str) -> bool:
    r"""True for what has a value: ``|z|``, ``f(2)``, ``m+n``, ``\frac{a}{b}``, words; not for 2x, x+1, x^2 and -x."""
    if re.match(r"\\(?:sum|prod|int|lim|max|min|det)(?![a-zA-Z])", text):
        return True
    if _is_closed(text) or has_words(re.sub("[A-Z]{2,}(?![a-z])", "", text)):  # not AB^2
        return is_name(text)
    count = 1
    while count:
        text, count = _PART_OF_NAME.subn(lambda match: "A" if match[0][-1] == ")" else "", text)
    letters = _variables(text)
    if len(letters) > 1 and letters.isdisjoint("xyzXYZ") and re.search(r"[+-]", text):
        return True  # 100m + n is asked for; 2x + 3y = 18 is to be solved
    return bool(re.search(r"[a-zA-Z]", text)) and not re.search(r"\d|^-", text)


def _is_closed(text: str) -> bool:
    r"""True for a text with a word of the closed classes, which is no product of variables: not m + n, AB \not."""
    return not CLOSED.isdisjoint(map(str.lower, re.findall("[a-z']{2,}|[A-Z]{3,}", text)))


def _same_structure(a: str, b: str, budget: TimeBudget) -> bool:
    """Compare tuples, intervals, sets, lists, unions and matrices element by element."""
    (kind_a, items_a), (kind_b, items_b) = without_names(parse_structure(a), parse_structure(b))
    kinds = {kind_a, kind_b}
    if kinds == {""}:
        return _same_scalar(items_a[0], items_b[0], budget)
    if "set" in kinds and len(kinds) > 1 and (only := _only_element(items_a if kind_a == "set" else items_b)):
        return _same(only, b if kind_a == "set" else a, budget)
    if kinds <= {"list", "set", "union"}:  # the intervals of a union may be listed: x < 2 or x > 5
        is_listed = "union" not in kinds or len(kinds) == 1 or "\\{" not in a + b
        same = is_listed and _same_items(items_a, items_b, budget, ordered=is_ranking(items_a))
        return same or ("union" in kinds and budget.sympy_equal(a, b))
    if kinds == {"cases"}:
        return _same_items(items_a, items_b, budget, ordered=False)
    if kind_a == kind_b or kinds <= {"()", "list", "matrix 1"}:  # 1,2 for (1,2); (1,2) for a column
        return _same_items(items_a, items_b, budget, ordered=True)
    if kinds & {"list", "cases"}:
        return False
    if "" in kinds:  # x > 2 for an interval; a multiple of a matrix
        scalar = items_b[0] if kind_a else items_a[0]
        return bool(re.search(_OPERATION, scalar)) and budget.sympy_equal(a, b)
    return "union" in kinds and budget.sympy_equal(a, b)  # one interval for two adjacent ones


def _only_element(items: Items) -> str:
    r"""The element of a set of one, which is the set as an answer: ``\{5\}`` is 5; empty for a set of one set."""
    return "" if len(items) != 1 or re.match(r"\\\{|\\emptyset", items[0]) else items[0]


def is_ranking(items: Items) -> bool:
    """True for a list of words, and for one that goes on: their order counts."""
    return any(re.fullmatch(r"[A-Za-z ]{2,}", item) or item == ELLIPSIS for item in items)


def _same_items(a: Items, b: Items, budget: TimeBudget, *, ordered: bool) -> bool:
    """Compare elements pairwise, in order or in any order; long lists always in order."""
    if len(a) != len(b):
        return False
    if ordered or len(a) > MAX_UNORDERED:
        return all(_same_element(x, y, budget) for x, y in zip(a, b, strict=True))
    rest = list(b)
    for x in a:
        rest.sort(key=x.__ne__)  # what is equal as text comes first
        for y in rest:
            if _same_element(x, y, budget):
                rest.remove(y)
                break
        else:
            return False
    return True


def _same_element(x: str, y: str, budget: TimeBudget) -> bool:
    """A set in a set is no number, and ``024`` after a comma are the last digits of ``1,024``."""
    is_other = re.match(r"0\d|\\\{", x) or re.match(r"0\d|\\\{", y)
    if is_other and x != y and not x[:2] == y[:2] == "\\{":
        return False
    return _same(x, y, budget)


def _same_scalar(a: str, b: str, budget: TimeBudget) -> bool:
    """Compare two answers without structure: numbers, numbers in a base, words, or expressions."""
    if "\\approx" in a + b:
        return _same_rounded(a, b, budget) or _same_rounded(b, a, budget)
    a, b = without_same_change(a, b)
    values = strip_units(a, b)
    if values is None:
        return False
    x, y = values
    if x == y:
        return True
    verdict = same_number(x, y)
    if verdict is not None:
        return verdict
    if _is_relation(x) != _is_relation(y) and "\\setminus" not in x + y:
        return False  # 2x = 18 is not 18
    if (first := _segments(x)) and (second := _segments(y)):
        return budget.sympy_equal(first, second)
    verdict = _same_words(x, y)
    if verdict is not None:
        return verdict
    letters, others = _variables(x), _variables(y)
    if letters != others and set(map(str.lower, letters)) == set(map(str.lower, others)):
        return False  # the grammar reads X as x
    has_number = parse_number(x) or parse_number(y)
    if has_number and (letters or others) and "\\" not in x + y:
        return False  # an expression with a variable is not a number, unless functions cancel: those go to sympy
    return budget.sympy_equal(x, y)


def _same_words(x: str, y: str) -> bool | None:
    """Compare words and chemical formulas as text; None for expressions."""
    if _FORMULA.fullmatch(x) and _FORMULA.fullmatch(y) and re.sub("[_{}]", "", x) == re.sub("[_{}]", "", y):
        return True
    are_letters = re.fullmatch("[A-Za-z]+,[A-Za-z]+", f"{x},{y}")
    are_words = has_words(x) or has_words(y)
    if not (are_words or are_letters):
        return None
    is_same = squash(x) == squash(y) != ""
    if is_same or are_words or min(len(x), len(y)) > 1:
        return is_same  # on is not no, abc is not cba
    return None


def _segments(text: str) -> str:
    r"""An expression with lengths of segments, ``AB*CD``, ``2KL``, as one with variables; empty if it is none."""
    names, count = _SEGMENT.subn(r"u_{\1}", text)
    if not count or names == f"u_{{{text}}}" or has_words(re.sub("u_{[A-Z]{2}}", "", names)):
        return ""
    top, is_ratio, bottom = names.partition(":")
    return rf"\frac{{{top}}}{{{bottom}}}" if is_ratio else names


def _is_relation(text: str) -> bool:
    r"""True for an equation or inequality; not for the limits of a sum, ``\sum_{k=1}``."""
    return bool(re.search(_RELATION, re.sub(r"_\{[^{}]*\}", "", text)))


def _same_rounded(a: str, b: str, budget: TimeBudget) -> bool:
    r"""True if `a` is the exact value of ``\frac{50}{3} \approx 16.67``, or the decimal that rounds it."""
    exact, sign, decimal = b.partition("\\approx")
    value, unit, _ = split_unit(decimal)
    number = parse_number(value)
    if not sign or not number:
        return False
    if not (("." in value and same_number(a, value)) or _same(a.partition("\\approx")[0], exact, budget)):
        return False
    place = last_place(value)
    rounded, (exact, other, _) = number[0], split_unit(exact)
    if unit and other and unit != other:
        return False
    cut_off = rounded + (place if rounded > 0 else -place) / 2  # the middle of what is cut off to it
    return budget.sympy_equal(exact, as_fraction(rounded), tolerance=place / 2) or budget.sympy_equal(
        exact, as_fraction(cut_off), tolerance=place * _BELOW_HALF
    )


def has_words(text: str) -> bool:
    """True for words, False for a product of variables: four letters in a row, or two capitals, make a word."""
    bare = re.sub(_COMMAND, " ", text)
    return bool(re.search(r"[a-zA-Z]{4}|[A-Z]{2}|\\text|\\mbox|[a-z]{2}[ -]to[ -]", bare))


def squash(text: str) -> str:
    """A text without what does not matter between words; a minus between the names of points does."""
    text = re.sub(r"(?<=[a-z])-(?=[a-z]{3})|(?<=[a-z]{3})-(?=[a-z])", "", text)
    return re.sub(r"[\s'\"{}]|\\(?:text|mbox)|(?<=[a-zA-Z])\.", "", text).casefold()


def _has_variables(text: str) -> bool:
    """True for an expression with a variable; not for a value with a unit."""
    return bool(_variables(split_unit(text).value))


def _variables(text: str) -> set[str]:
    """The variables of an expression: its letters outside commands, except i and e."""
    bare = re.sub(_COMMAND, " ", text)
    return set(re.findall("[a-zA-Z]", bare)) - {"i", "e"}
