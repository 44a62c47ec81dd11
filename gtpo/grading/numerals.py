r"""Rule 2: numbers, compared exactly as `fractions.Fraction`."""

import re
from fractions import Fraction
from functools import lru_cache

DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"  # ASCII digits only: Fraction() accepts 1_8 and Arabic digits
_SIGNIFICANT = 10  # digits from which a decimal may be the rounded form of an exact value
_TIME = re.compile(r"\d{1,2}:[0-5]\d")  # of two ratios that look like it each is itself only
_INTEGER = re.compile(r"-?[0-9]+")
_TEN = re.compile(r"^([-+]?)(?=10\^\{)")
_VALUE = re.compile(
    rf"(?P<sign>[-+]?)\(?(?P<inner>-?)(?:(?P<whole>[0-9]+)?\\frac\{{(?P<top>-?{DECIMAL})\}}\{{(?P<bottom>-?{DECIMAL})\}}"
    rf"|(?P<over>{DECIMAL})(?:/|:(?!0))(?P<under>-?{DECIMAL})"  # 3:4
    rf"|(?P<decimal>{DECIMAL})(?:(?:\*10\^\{{|[eE])(?P<power>[-+]?[0-9]{{1,3}})\}}?)?)\)?(?P<percent>%?)"
)


@lru_cache(maxsize=2**14)
def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """(exact value, True if a percent sign follows it); None if the text is not a number.

    The percent sign does not scale the value: ``10%`` is (10, True).
    """
    if _INTEGER.fullmatch(text):
        return Fraction(int(text)), False
    match = _VALUE.fullmatch(_TEN.sub(r"\g<1>1*", text))  # 10^{5}
    if not match or text.count("(") != text.count(")"):
        return None
    part = match.groupdict("")
    top, bottom = part["top"] + part["over"] + part["decimal"], part["bottom"] + part["under"] or "1"
    if not Fraction(bottom) or (part["whole"] and not (top + bottom).isdigit()):
        return None  # 3\frac{-1}{2} is not a mixed number
    value = Fraction(part["whole"] or 0) + Fraction(top) / Fraction(bottom)
    value *= Fraction(10) ** int(part["power"] or 0)
    is_negative = (part["sign"] + part["inner"]).count("-") == 1
    return -value if is_negative else value, bool(part["percent"])


def as_fraction(number: Fraction) -> str:
    """An exact number in LaTeX."""
    if number.denominator == 1:
        return str(number)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def scaled(text: str, factor: Fraction) -> str:
    """A scalar times a factor: a number if it is one, else an expression."""
    number = parse_number(text)
    return as_fraction(number[0] * factor) if number else f"({text})*({as_fraction(factor)})"


def same_number(a: str, b: str) -> bool | None:
    """Exact comparison of two numbers; None if one of the texts is not a number."""
    x, y = parse_number(a), parse_number(b)
    if x is None or y is None:
        return None
    if _TIME.fullmatch(a) and _TIME.fullmatch(b):
        return a == b
    (value, is_percentage), (other, is_other_percentage) = x, y
    if value == other and (is_percentage == is_other_percentage or abs(value) >= 1):
        return True  # also 10% and 10: MATH uses both; not 0.75% and 0.75
    if is_percentage != is_other_percentage:
        return value / 100**is_percentage == other / 100**is_other_percentage
    unit = rounding_tolerance(a, b)
    if unit is None:
        return False
    decimal = value if "." in a else other
    error = (2 * decimal - value - other) * (1 if decimal > 0 else -1)
    return -unit < error <= unit / 2  # cut off or rounded


def rounding_tolerance(a: str, b: str) -> Fraction | None:
    """The unit in the last place of a long decimal, if the other answer is not a decimal; otherwise None."""
    decimals = [text for text in (a, b) if re.fullmatch(rf"-?{DECIMAL}", text)]
    if len(decimals) != 1 or "." not in decimals[0]:
        return None  # two decimals are compared exactly
    digits = re.sub(r"\D", "", decimals[0]).lstrip("0")
    return last_place(decimals[0]) if len(digits) >= _SIGNIFICANT else None


def last_place(decimal: str) -> Fraction:
    """The unit in the last place of a decimal."""
    return Fraction(1, 10 ** len(decimal.partition(".")[2]))
