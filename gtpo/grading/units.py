r"""Rule 4: units of measurement at the end of an answer. The units are in tables.yaml.

A unit has a size and a dimension: ``5 km`` is ``5000 m``. A word that is not in the table is a label: ``18 ducks``.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo.grading.latex import TABLES, TEXT_COMMANDS, depths
from gtpo.grading.normal_form import rewrite
from gtpo.grading.numerals import as_fraction, parse_number, scaled

Power = tuple[str, int]  # a base unit, or a word, and its power


class Unit(NamedTuple):
    """Size in base units, and the power of each base unit."""

    size: Fraction
    dimension: frozenset[Power]


class Measure(NamedTuple):
    """A scalar split into value and unit."""

    value: str
    unit: Unit | None  # None: no unit; LABEL: a word that matches any unit, such as "units" or "dogs"
    is_letter: bool = False  # the unit is one bare letter, so it may be a variable: 2s


LABEL = Unit(Fraction(0), frozenset())
PERCENT = Unit(Fraction(0), frozenset({("%", 1)}))


def _known_units() -> dict[str, Unit]:
    """Every symbol and name, with every prefix that it may have."""
    known = dict.fromkeys(TABLES["any"].split(), LABEL)
    for symbol, (size, dimension, *names) in TABLES["units"].items():
        for prefix, (exponent, word) in TABLES["prefixes"].items():
            if not prefix or symbol in TABLES["prefixed"]:
                unit = Unit(Fraction(str(size)) * Fraction(10) ** exponent, frozenset(_factors(dimension)))
                known[prefix + symbol] = unit
                for name in names:
                    known[word + name] = unit
    return known


_NOT_UNITS = frozenset(TABLES["not_units"].split())  # plurals and short words that change the value
# a value and what may be its unit: in text, or bare words after the first or the last number
_MARKED = re.compile(rf"(?P<value>.*?)(?P<unit>(?:\\frac\{{)?\s*(?:\\mu\s*)?\\(?:{TEXT_COMMANDS})(?![a-zA-Z]).*)")
_BARE = (
    r"(?:[\d)}\]%]|\\pi))(?P<unit>\s*(?:\\mu\s*)?(?:\\Omega|[a-zA-Z]|\\frac\{[a-zA-Z]+\}\{[a-zA-Z])"
    r"[a-zA-Z./ *^{}()\d\\-]*)"
)
_FIRST = re.compile(f"(?P<value>.*?{_BARE}")
_LAST = re.compile(f"(?P<value>.*{_BARE}")
_FACTOR = re.compile(
    r"[\s{(*.]*(?P<per>/|per\b)?[\s{(]*(?:(?P<before>square|sq|cubic|cu)[.\s]+)?"
    r"(?!per\b)(?P<word>[a-zA-Z](?:[a-zA-Z.-]*[a-zA-Z])?)\.?[\s})]*"
    r"(?:\^\{?(?P<power>-?\d)\}?|(?P<bare>[23])(?!\d)|(?P<after>squared|cubed)\b|[,:-]*)[\s})]*"
)

_PART = rf"(\d+(?:\.\d+)?)[\s*]*(?:\\(?:{TEXT_COMMANDS})\s*\{{)?\s*([a-zA-Z]+)\.?\s*\}}?[\s,*]*"
_PARTS = re.compile(rf"-?(?:{_PART}){{2,4}}")


def in_one_unit(text: str) -> str:
    """``2 h 30 min`` as 150 min: numbers with falling units of one dimension. Any other text as it is."""
    total, larger = Fraction(0), LABEL
    for number, word in re.findall(_PART, text) if _PARTS.fullmatch(text) else ():
        unit = _unit_named(word) or LABEL
        part = Fraction(number) * unit.size
        if not unit.size or (total and (larger.dimension != unit.dimension or part >= larger.size)):
            return text
        total, larger, last = total + part, unit, word
    sign = "-" * text.startswith("-")
    return rf"{sign}{as_fraction(total / larger.size)}\text{{ {last}}}" if total else text


def strip_units(a: str, b: str) -> tuple[str, str] | None:
    """The two values without their units, in the same unit; None if the units differ.

    A bare letter is a variable, and stays, unless the other answer has that unit in words or in ``\\text``.
    """
    x, y = split_unit(a), split_unit(b)
    if x.unit and y.unit and x.unit != y.unit:
        if x.unit.dimension == y.unit.dimension:
            return scaled(x.value, x.unit.size), scaled(y.value, y.unit.size)
        units = {x.unit, y.unit}
        if PERCENT in units or not (LABEL in units or units in _EITHER):
            return None
    first = a if x.is_letter and (not y.unit or y.is_letter) else x.value
    second = b if y.is_letter and (not x.unit or x.is_letter) else y.value
    return first, second


@lru_cache(maxsize=2**14)
def split_unit(text: str) -> Measure:
    r"""Value and unit of a scalar. A bare word is a unit if it is known or a plural; inside ``\text``, any word is."""
    if text.endswith("%"):
        return Measure(text, PERCENT)
    if not re.search(r"[a-zA-Z]", text):
        return Measure(text, None)
    marked = _MARKED.fullmatch(text)
    matches = [marked] if marked else [_FIRST.fullmatch(text), _LAST.fullmatch(text)]
    for match in filter(None, matches):
        if found := _measure(match["value"].strip(), match["unit"], is_marked=bool(marked)):
            return found
    return Measure(text, None)


def _measure(value: str, written: str, *, is_marked: bool) -> Measure | None:
    """The value with the unit that is written behind it; None if that is no unit."""
    factors = _factors(rewrite(written, "unit"))
    if not value or not factors or depths(value)[-1]:
        return None
    names = [word.lower() for word, _ in factors]
    if not _NOT_UNITS.isdisjoint(names):
        return None
    scale = TABLES["scales"].get(" ".join(names))
    if scale:
        return Measure(f"{value}*{scale}", None)
    is_plural = re.search(r"[a-z]{3}s$", names[-1])
    if not (is_marked or is_plural or _unit_named(factors[-1][0])):
        return None
    is_letter = not is_marked and len(written.strip()) == 1
    if written.startswith(" ") and parse_number(value):
        is_letter = False  # 5 J; but 2s, and x + 2 m
    return Measure(value, _product(factors), is_letter)


def _factors(flat: str) -> list[Power]:
    """(name, power) of each factor: ``kg m / s^2``, ``square feet per minute``; empty if that is not all."""
    factors, position, sign = [], 0, 1
    while match := _FACTOR.match(flat, position):
        if match["per"]:
            sign = -1
        in_words = TABLES["powers"].get(match["before"] or match["after"], 1)
        power = match["power"] or match["bare"] or in_words
        factors.append((match["word"], sign * int(power)))
        position = match.end()
    return factors if position == len(flat) else []


def _unit_named(word: str) -> Unit | None:
    bare = word.replace(".", "")
    lower = bare.lower()
    for name in (bare, lower, lower.removesuffix("s")):
        if name in _KNOWN:
            return _KNOWN[name]
    return None


def _product(factors: list[Power]) -> Unit:
    size, dimension = Fraction(1), Counter[str]()
    for word, power in factors:
        unit = _unit_named(word) or LABEL
        if unit is LABEL:
            return LABEL
        size *= unit.size**power
        for base, times in unit.dimension:
            dimension[base] += times * power
    return Unit(size, frozenset(item for item in dimension.items() if item[1]))


_KNOWN = _known_units()
_EITHER = [{_KNOWN[name] for name in pair.split()} for pair in TABLES["either"]]
