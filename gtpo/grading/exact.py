"""Rule 2: exact comparison of numbers as `fractions.Fraction`."""

import re
from fractions import Fraction
from functools import lru_cache

DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"  # ASCII digits only: Fraction() accepts 1_8 and Arabic digits
_SIGNIFICANT = 10  # digits from which a decimal may be the rounded form of an exact value
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\(?(?P<inner>-?)(?:(?P<whole>[0-9]+)?\\frac\{{(?P<top>-?{DECIMAL})\}}\{{(?P<bottom>-?{DECIMAL})\}}"
    rf"|(?P<over>{DECIMAL})/(?P<under>-?{DECIMAL})"
    rf"|(?P<decimal>{DECIMAL})(?:(?:\*10\^\{{|[eE])(?P<power>[-+]?[0-9]{{1,3}})\}}?)?)\)?(?P<percent>%?)"
)


@lru_cache(maxsize=2**14)
def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """(exact value, True if a percent sign follows it); None if the text is not a number.

    The percent sign does not scale the value: ``10%`` is (10, True).
    """
    match = _NUMBER.fullmatch(text)
    if not match or text.count("(") != text.count(")"):
        return None
    part = match.groupdict()
    if part["decimal"]:
        value = Fraction(part["decimal"]) * Fraction(10) ** int(part["power"] or 0)
    else:
        top, bottom = (part["top"], part["bottom"]) if part["top"] else (part["over"], part["under"])
        if not Fraction(bottom):
            return None
        if part["whole"] and not (top + bottom).isdigit():
            return None  # 3\frac{-1}{2} is not a mixed number
        value = Fraction(top) / Fraction(bottom) + int(part["whole"] or 0)
    return value * (-1) ** (part["sign"] + part["inner"]).count("-"), bool(part["percent"])


def same_number(a: str, b: str) -> bool | None:
    """Exact comparison of two numbers; None if one of the texts is not a number."""
    x, y = parse_number(a), parse_number(b)
    if x is None or y is None:
        return None
    if x[0] == y[0]:
        return True  # also 10% and 10: MATH uses both
    if x[1] != y[1]:
        return x[0] / (100 if x[1] else 1) == y[0] / (100 if y[1] else 1)
    tolerance = rounding_tolerance(a, b)
    return tolerance is not None and abs(x[0] - y[0]) <= tolerance


def rounding_tolerance(a: str, b: str) -> Fraction | None:
    """The unit in the last place of a long decimal, if the other answer is not a decimal; otherwise None."""
    decimals = [text for text in (a, b) if re.fullmatch(rf"-?{DECIMAL}", text)]
    if len(decimals) != 1 or "." not in decimals[0]:
        return None  # two decimals are compared exactly
    if len(re.sub(r"\D", "", decimals[0]).lstrip("0")) < _SIGNIFICANT:
        return None
    return Fraction(1, 10 ** len(decimals[0].partition(".")[2]))
