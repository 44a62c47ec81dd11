r"""Rule 4: what stands beside a value, read whole: a unit of measurement, a label, a word that scales the value.

    beside = {scale} {modifier} (unit | label) {"of" noun} {remark}

A unit has a size and a dimension: ``5 km`` is ``5000 m``. A label is a noun: ``18 ducks``. The words are in words.yaml,
but for nouns, which are an open class: a plural that is no word of a closed one, or after 1 any such word. A text that
the grammar does not read is no value with something beside it, and equals only itself.
"""

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo.grading.latex import TABLES, TEXT_COMMANDS, depths
from gtpo.grading.normal_form import MAX_LENGTH, WORDS, normalise, rewrite
from gtpo.grading.numerals import as_fraction, parse_number, scaled
from gtpo.grading.subject import CLOSED

Power = tuple[str, int]  # a base unit, or a word, and its power


class Unit(NamedTuple):
    """Size in base units, and the power of each base unit."""

    size: Fraction
    dimension: frozenset[Power]


class Measure(NamedTuple):
    """A scalar split into value and unit."""

    value: str
    unit: Unit | None  # None: no unit; LABEL: a noun, such as "units" or "dogs"
    is_letter: bool = False  # the unit is a bare letter or mark, and may be a variable or a prime: 2s, 2'


LABEL = Unit(Fraction(0), frozenset())
PERCENT = Unit(Fraction(0), frozenset({("%", 1)}))


def _words(*names: str) -> frozenset[str]:
    """The words of some lists of tables.yaml."""
    return frozenset(" ".join(TABLES[name] for name in names).split())


def _known_units() -> dict[str, Unit]:
    """Every symbol and name, with every prefix that it may have."""
    known = dict.fromkeys(TABLES["nouns"].split(), LABEL)
    known |= {word: Unit(Fraction(1), frozenset({(word, 1)})) for word in TABLES["own_units"].split()}
    for symbol, (size, dimension, *names) in TABLES["units"].items():
        for prefix, (exponent, *words) in TABLES["prefixes"].items():
            if not prefix or symbol in TABLES["prefixed"]:
                unit = Unit(Fraction(str(size)) * Fraction(10) ** exponent, frozenset(_factors(dimension)))
                known[prefix + symbol] = unit
                for name in names:
                    known.update((word + name.replace(" ", "-"), unit) for word in words)
    return known


_POWERS: dict[str, int] = TABLES["unit_powers"]
# a value and what may be its unit: in text, or bare words after the first or the last number
_MARKED = re.compile(rf"(?P<value>.*?)(?P<unit>(?:\\frac\{{)?\s*(?:\\mu\s*)?\\(?:{TEXT_COMMANDS})(?![a-zA-Z]).*)")
_BARE = (
    r"(?:[\d)}\]%]|\\pi))(?P<unit>\s*(?:\\mu\s*)?(?:\\Omega|[a-zA-Z]|\\frac\{[a-zA-Z]+\}\{[a-zA-Z])"
    r"[a-zA-Z./ *^{}()\d\\-]*)"
)
_FIRST = re.compile(f"(?P<value>.*?{_BARE}")
_LAST = re.compile(f"(?P<value>.*{_BARE}")
_POWER = "|".join(_POWERS)
_FACTOR = re.compile(
    rf"[\s{{(*.]*(?P<per>/|per\b)?[\s{{(]*(?:(?i:(?P<before>{_POWER}))[.\s]+)?"
    r"(?!per\b)(?P<word>[a-zA-Z](?:[a-zA-Z.-]*[a-zA-Z])?)\.?[\s})]*"
    rf"(?:\^\{{?(?P<power>-?\d)\}}?|(?P<bare>(?<=[a-zA-Z])[23])(?!\d)|(?P<after>{_POWER})\b|[,:-]*)[\s}})]*"
)

_MARK = re.compile(r"""(\d+(?:\.\d+)?)('|''|")""")  # of feet and inches

_PART = rf"(\d+(?:\.\d+)?)[\s*]*(?:\\(?:{TEXT_COMMANDS})\s*\{{)?\s*([a-zA-Z]+(?:-[a-z]+)?)\.?\s*\}}?[\s,*]*"
_PARTS = re.compile(rf"-?(?:{_PART}){{2,4}}")


def in_one_unit(text: str) -> str:
    """``2 h 30 min`` as 150 min, ``7 tens and 3 ones`` as 73: numbers with falling units of one dimension, or scales.

    Any other text as it is.
    """
    total, larger = Fraction(0), LABEL
    parts = re.findall(_PART, text) if _PARTS.fullmatch(text) else []
    is_time = [word for _, word in parts] in (["h", "m"], ["m", "s"], ["h", "m", "s"])
    for number, word in parts:
        word = "min" if is_time and word == "m" else word
        unit = Unit(_SCALES[word], LABEL.dimension) if word in _SCALES else _unit_named(word) or LABEL
        part = Fraction(number) * unit.size
        if not unit.size or (total and (larger.dimension != unit.dimension or part >= larger.size)):
            return text
        total, larger, last = total + part, unit, word
    sign = "-" * text.startswith("-")
    if total and last in _SCALES:
        return f"{sign}{as_fraction(total)}"
    return rf"{sign}{as_fraction(total / larger.size)}\text{{ {last}}}" if total else text


@lru_cache(maxsize=2**12)
def without_change(gold: str) -> str:
    r"""A gold answer without its word of direction, change or sign (``15% increase``), which an answer may leave out.

    A noun of a gold answer that would be none in an answer, ``17\text{ any text}``, is a label.
    """
    if len(gold) > MAX_LENGTH or not re.search(r"\d", gold) or not WORDS.search(gold):
        return gold
    said = rewrite(gold.strip(), "changes", "prose")  # an increase of 15%
    rest = _without_change(said)
    if rest != said:
        return gold if CLOSED & set(re.findall("[a-z]+", rest)) else rest  # 18 or more
    noun = _GOLD_NOUN.fullmatch(gold)
    is_unread = noun and _is_open(noun[2]) and split_unit(normalise(gold)).unit is None
    return f"{noun[1]}\\text{{ items}}" if noun and is_unread else gold


def has_remark(text: str) -> bool:
    """True for ``5 left`` and ``20 years old``: another answer than a gold answer with a change, ``5 to the left``."""
    return bool(_REMARKS.search(text[-MAX_LENGTH:].rstrip(" .$}")))


def without_same_change(a: str, b: str) -> tuple[str, str]:
    """Two answers without a word of change of one meaning in both: ``5 km north`` and ``5000 m northward``."""
    first, second = (match and _MEANINGS[match["word"]] for match in map(_CHANGE.search, (a, b)))
    is_same = first and first == second
    return (_without_change(a), _without_change(b)) if is_same else (a, b)


def _without_change(text: str) -> str:
    return re.sub(rf"\\(?:{TEXT_COMMANDS})\s*\{{\s*\}}", "", _CHANGE.sub(r"\g<end>", text))


def strip_units(a: str, b: str) -> tuple[str, str] | None:
    """The two values without their units, in the same unit; None if the units differ.

    A bare letter is a variable, a mark a prime, and stays, unless the other answer has that unit in words or in
    ``\\text``.
    """
    x, y = split_unit(a), split_unit(b)
    if x.unit and y.unit and x.unit != y.unit:
        if x.unit.dimension == y.unit.dimension:
            return scaled(x.value, x.unit.size), scaled(y.value, y.unit.size)
        if {x.unit, y.unit} not in _EITHER:
            return None
    first = a if x.is_letter and (not y.unit or y.is_letter) else x.value
    second = b if y.is_letter and (not x.unit or x.is_letter) else y.value
    return first, second


@lru_cache(maxsize=2**14)
def split_unit(text: str) -> Measure:
    r"""Value and unit of a scalar, of which what stands beside the value is read whole, in ``\text`` or bare."""
    if text.endswith("%"):
        return Measure(text, PERCENT)
    if mark := _MARK.fullmatch(text):
        return Measure(mark[1], _KNOWN["ft" if mark[2] == "'" else "in"], is_letter=True)
    if not re.search(r"[a-zA-Z]", text):
        return Measure(text, None)
    marked = _MARKED.fullmatch(text)
    is_bare = not marked or re.search(r"(?<![\\a-z])[a-z]{3}", marked["value"])  # 15 dollars \text{ per hour}
    matches = [_FIRST.fullmatch(text), _LAST.fullmatch(text), marked] if is_bare else [marked]
    for match in filter(None, matches):
        if found := _measure(match["value"].strip(), match["unit"]):
            return found
    return Measure(text, None)


def _measure(value: str, written: str) -> Measure | None:
    """The value with what is written behind it; None if the grammar does not read all of it."""
    if not value or depths(value)[-1]:
        return None
    beside = re.sub(r"(?<!\^)\{([^{}]*)\}", r" \1 ", rewrite(written, "unit")).strip()
    beside = _PER.sub("per ", _SPACED.sub(lambda match: re.sub(r"\s+", "-", match[0]), beside))
    beside, remarks = _REMARKS.subn("", f" {beside}")
    value, beside, scales = _scaled(value, beside.strip())
    core, *of = re.split(r"\s+of\s+", _MODIFIERS.sub("", beside))
    if not all(map(_is_open, of)):
        return None
    unit = _unit(core, is_one=value in ("1", "-1"))
    if not unit and (core or not (remarks or scales)):
        return None
    is_letter = len(written.strip()) == 1 or bool(re.fullmatch("[A-Z]{2}", written))  # 2KL
    if written.startswith(" ") and parse_number(value) and written.strip() != "p":
        is_letter = False  # 5 J; but 2s, 5 p, and x + 2 m
    return Measure(value, unit, is_letter)


def _scaled(value: str, beside: str) -> tuple[str, str, int]:
    """The value times the words of a scale behind it (``5 dozen``, ``13 squared``), the rest, the number of words."""
    count = 0
    while count < _MAX_SCALES and (match := _SCALE.match(beside)):
        word = match["word"].lower()
        if word in TABLES["powers"]:
            power = TABLES["powers"][word]
            number = parse_number(value)
            if not number or max(map(int.bit_length, number[0].as_integer_ratio())) > _MAX_BITS:
                break
            value = as_fraction(number[0] ** power)
        else:
            value = scaled(value, _SCALES[word])
        beside = beside[match.end() :]
        count += 1
    return value, beside, count


def _unit(core: str, *, is_one: bool) -> Unit | None:
    """The unit that a text names, LABEL for a noun; None if it is neither."""
    factors = _factors(core)
    known = [(_unit_named(word), word, power) for word, power in factors]
    is_power = any(unit is LABEL and power > 1 for unit, word, power in known)
    if len(factors) == 1 and factors[0][0] in ("unit", "units") and factors[0][1] > 1:
        return _SQUARE_UNITS.get(factors[0][1])
    if factors and not is_power and all(unit for unit, *_ in known):
        units = [(unit, power) for unit, _, power in known if unit]
        return LABEL if LABEL in [unit for unit, power in units if power > 0] else _product(units)
    parts = re.split(r"\s*(?:\bper\b|[:/])\s*", core)
    first = _unit(parts[0], is_one=is_one) if len(parts) > 1 else None
    if first and all(map(_is_open, parts[1:])):
        return first if first is LABEL else Unit(first.size, first.dimension | {(part, -1) for part in parts[1:]})
    return LABEL if len(parts) == 1 and _is_noun(core, is_one=is_one) else None


def _is_noun(text: str, *, is_one: bool) -> bool:
    """True for a plural, a known noun, or one thing, after words that may stand before it: 14 right triangles."""
    last = text.split()[-1].lower() if text else ""
    is_plural = re.search(r"[a-z]{2}[a-rtv-z]s$|[a-z]ses$", last) or _KNOWN.get(last) is LABEL
    is_single = is_one and len(last) > 2 and not re.search(r"(?:ly|ed|ing)$", last)
    return _is_open(text) and last not in _NOT_HEADS and bool(is_plural or is_single)


def _is_open(text: str) -> bool:
    """True for up to four words of which none is of a closed class."""
    words = re.sub(r"^(?:the|an?|any|each|every)\s+", "", text.strip()).lower().split()
    return 0 < len(words) <= 4 and all(_OPEN_WORD.fullmatch(word) and word not in CLOSED for word in words)


def _factors(flat: str) -> list[Power]:
    """(name, power) of each factor: ``kg m / s^2``, ``square feet per minute``; empty if that is not all."""
    factors, position, sign = [], 0, 1
    while match := _FACTOR.match(flat, position):
        if match["per"]:
            sign = -1
        in_words = _POWERS.get((match["before"] or match["after"] or "").lower(), 1)
        power = match["power"] or match["bare"] or in_words
        factors.append((match["word"], sign * int(power)))
        position = match.end()
    return factors if position == len(flat) else []


def _unit_named(word: str) -> Unit | None:
    bare = word.replace(".", "")
    lower = bare.lower()
    for name in (bare, lower, lower.removesuffix("s"))[: len(bare) if len(bare) < 2 else 3]:
        if name in _KNOWN:
            return _KNOWN[name]
    return None


def _product(factors: list[tuple[Unit, int]]) -> Unit | None:
    """The unit of a product; None for money times another unit: 17 K dollars are thousands, no kelvins."""
    size, dimension = Fraction(1), Counter[str]()
    for unit, power in factors:
        size *= (unit.size or 1) ** power
        for base, times in unit.dimension or {("unit", 1)}:
            dimension[base] += times * power
    above = [base for base, power in dimension.items() if power > 0]
    if len(above) > 1 and any(map(_CURRENCY.fullmatch, above)):
        return None
    return Unit(size, frozenset(item for item in dimension.items() if item[1]))


def _any(words: Iterable[str]) -> str:
    """Words as alternatives, the longest first."""
    return "|".join(sorted(words, key=len, reverse=True))


_CURRENCY = re.compile("[A-Z]{3}")  # a dimension: USD
_MAX_BITS = 256  # of a number that is squared or cubed
_MAX_SCALES = 3  # 5 hundred thousand million
_MEANINGS: dict[str, str] = TABLES["changes"] | TABLES["eras"]
_NOT_HEADS = _words("not_heads") | frozenset(_MEANINGS)
_SCALES = {name: Fraction(str(size)) for name, size in TABLES["scales"].items()}
_SCALES |= {f"{name}s": size for name, size in _SCALES.items()}
_SCALES |= {f"{name}s": Fraction(1, size) for name, size in TABLES["denominators"].items() if name != "half"}
_SCALE = re.compile(rf"(?P<word>{_any(_SCALES)}|squared|cubed)(?![a-zA-Z])[\s-]*", re.IGNORECASE)
_REMARKS = re.compile(rf"(?:,?\s+(?:{'|'.join(TABLES['remarks'])}))+$", re.IGNORECASE)
_MODIFIERS = re.compile(rf"^(?:(?:{_any(TABLES['modifiers'].split())})\s+)+")
_PER = re.compile(r"(?:(?<=[a-z%]\s)|^)(?:an?|each|every|for each|for every|per each)\s+(?=[a-z]{2})")
_OPEN_WORD = re.compile(  # no sixteenths, no zillions
    r"(?!.*(?:(?:ie|teen|usand|hundred)ths?|illion(?:th)?s?|iemes?|lhoes|llones)$)"
    r"(?!(?:half|quarter|[a-z]+ty)-(?:[a-z]+ths?|seconds?|thirds?|firsts?|dozens?)$)[a-z][a-z-]+(?<!ly)\.?"
)
_GOLD_NOUN = re.compile(r"(-?\d+)\s*\\text\{\s*([a-z]+(?: [a-z]+)?)\s*\}")
_CHANGE = re.compile(
    rf"(?<=[\d%}}a-z{{])\s*(?<![a-zA-Z])(?:(?:{_any(TABLES['before a change'])})\s+)?"
    rf"(?P<word>{_any(map(re.escape, _MEANINGS))})(?P<end>\s*\}}?\$?)$"
)
_KNOWN = _known_units()
_IN_WORDS = _any(name.replace("-", r"\s+") for name in _KNOWN if "-" in name)
_SPACED = re.compile(rf"\b(?:{_IN_WORDS})s?(?![a-z])", re.IGNORECASE)
_SQUARE_UNITS = {power: Unit(Fraction(1), frozenset({("unit", power)})) for power in (2, 3)}
_EITHER = [{_KNOWN[name] for name in pair.split()} for pair in TABLES["either"]]
_EITHER += [{LABEL, unit} for unit in _SQUARE_UNITS.values()]
