"""The canonical form of an answer, by which majority votes count.

:func:`gtpo.grading.equivalent` is no equivalence relation (10 is 10 %, which is 0.1): classes built from it depend on
the order of the answers. Equal canonical forms are one.
"""

import re
from collections.abc import Hashable
from functools import lru_cache

from gtpo.grading.compare import has_words, is_ranking, squash
from gtpo.grading.latex import split_top_level
from gtpo.grading.named import NAME, without_names
from gtpo.grading.normal_form import normalise, read
from gtpo.grading.numerals import parse_number
from gtpo.grading.structure import parse_structure
from gtpo.grading.units import split_unit


@lru_cache(maxsize=2**14)
def canonical_form(answer: str) -> Hashable:
    r"""An exact number with its unit, a sorted list, or the normalised string; empty for an unreadable answer.

    ``x = 1/2``, ``0.5`` and ``\frac12`` have one form; 10 and 10 %, 5 and 5 cm, ``n^2`` and ``n^2, n > 1`` have two.
    """
    try:
        value, condition = read(answer)
        return (_form(value), condition) if condition.kind else _form(value)
    except RecursionError:
        return normalise(answer)


def _form(text: str) -> Hashable:
    (kind, items), _ = without_names(parse_structure(text), ("", ("",)))
    if not kind:
        name, *values = split_top_level(items[0], r"=|\\in(?![a-zA-Z])")
        if values and NAME.fullmatch(name):
            return _form(values[-1])
        return _scalar_form(items[0])
    forms = [_form(item) for item in items]
    if kind == "set":
        kind = "list"
    if kind == "union" or (kind == "list" and not is_ranking(items)):
        forms.sort(key=repr)
    return (kind, *forms)


def _scalar_form(text: str) -> Hashable:
    value, unit, _ = split_unit(text)
    number = parse_number(value)
    if number:
        return number[0], unit
    if has_words(text):
        return squash(text)
    return re.sub(r"\s", "", text)
