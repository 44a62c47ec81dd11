"""Rule 4: units of measurement at the end of an answer."""

import re
from functools import lru_cache
from typing import NamedTuple

from gtpo.grading.latex import TEXT

_NAMES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche, ft foot feet,
yd yard, mi mile, s sec second, min minute, h hr hour, day, week, month, year yr, g gm gram, kg kilogram, lb pound,
oz ounce, ml milliliter, l liter litre, gal gallon, dollar usd buck, cent, euro eur, sterling, yen, deg degree,
rad radian, celsius, fahrenheit, am, pm, / per, 2 square sq, 3 cubic cu
"""
_ANY = "unit point way digit integer people person child children men women sheep fish deer mice each old total"
_UNITS = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_UNITS |= dict.fromkeys(_ANY.split(" "), "")  # they match any unit
_NOT_UNITS = re.compile(  # plurals and short words that change the value
    r"plus|minus|times|less|over|not?|is|are|was|if|but|for|than|at|of|to|wrong|false|maybe|about|others?|factorial|equals|versus|modulus|"
    r"tens|dozens?|(?:hundred|thousand|million|billion)s|halves|(?:third|quarter|fourth|fifth)s|squares|cubes|percents"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TRAILING = re.compile(
    rf"(?P<value>.*[\d)}}\]%]|.*\\pi)\s*(?:{TEXT}|(?P<words>(?<=[^a-zA-Z\\])[a-zA-Z][a-zA-Z./ ]*))"
    r"(?:\^\{?(?P<power>[23])\}?)?"
)
_RATES = (("mph", "mi/h"), ("kmh", "km/h"), ("kph", "km/h"))
_EITHER = ({"deg", "celsius"}, {"deg", "fahrenheit"}, {"lb", "sterling"})  # degrees and pounds mean both


class Measure(NamedTuple):
    """A scalar split into value and unit."""

    value: str
    unit: str | None  # None: no unit; "": a word that matches any unit, such as "units" or "dogs"
    is_letter: bool = False  # the unit is one bare letter, so it may be a variable: 2s


def strip_units(a: str, b: str) -> tuple[str, str] | None:
    """The two values without their units; None if the units differ.

    A bare letter is a variable, and stays, unless the other answer has that unit in words or in ``\\text``.
    """
    x, y = split_unit(a), split_unit(b)
    if {x.unit, y.unit} == {"dollar", "cent"}:
        return _in_dollars(x), _in_dollars(y)
    if x.unit and y.unit and not _agree(x.unit, y.unit):
        return None
    if x.is_letter and (not y.unit or y.is_letter):
        x = Measure(a, None)
    if y.is_letter and not x.unit:
        y = Measure(b, None)
    return x.value, y.value


def _agree(a: str, b: str) -> bool:
    """Equal units, or one lacks a part: ``5 km`` for ``5 km/h``, ``5 degrees`` for ``5 degrees Celsius``."""
    return a == b or ("/" in a) != ("/" in b) or {a, b} in _EITHER


def _in_dollars(amount: Measure) -> str:
    return amount.value if amount.unit == "dollar" else f"{amount.value}*\\frac{{1}}{{100}}"


@lru_cache(maxsize=2**14)
def split_unit(text: str) -> Measure:
    r"""Value and unit of a scalar. A bare word is a unit if it is known or a plural; inside ``\text``, any word is."""
    match = _TRAILING.fullmatch(text)
    if not match:
        return Measure(text, None)
    marked, words = match["content"], match["words"]
    if marked is not None and not re.fullmatch(r"[A-Za-z./,\s-]*[23]?", marked):
        return Measure(text, None)  # \text{ maybe 19}
    written = (words if marked is None else marked).lower()
    for short, long in _RATES:
        written = re.sub(rf"\b{short}\b", long, written)
    tokens = re.findall(r"[a-z]\.m\.?|[a-z]+|/|\d", written)
    if len(tokens) == 2 and tokens[0].startswith("deg") and tokens[1] in ("celsius", "fahrenheit"):
        del tokens[0]
    value, power = match["value"], match["power"] or ""
    if any(_NOT_UNITS.fullmatch(token) for token in tokens):
        return Measure(text, None)
    if len(tokens) == 1 and tokens[0] in _SCALES:
        return Measure(f"{value}*10^{{{_SCALES[tokens[0]]}}}", None)
    names = [token.replace(".", "") for token in tokens]
    known = [_UNITS.get(name, _UNITS.get(name.removesuffix("s"))) for name in names]
    any_word = match["command"] in ("text", "mbox")
    if not any_word and tokens and known[-1] is None and not re.search(r"[a-z]{3}s", tokens[-1]):
        return Measure(text, None)
    if None in known or "" in known:
        return Measure(value, "")
    unit = "".join(sorted([*map(str, known), power]))
    return Measure(value, unit, is_letter=marked is None and len(words.strip()) == 1)
