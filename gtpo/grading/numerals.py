r"""Rule 2: numbers, compared exactly as `fractions.Fraction`; in words: ``two and a half``, ``2\frac{1}{2}``."""

import re
from fractions import Fraction
from functools import lru_cache

from gtpo.grading.latex import TEXT

DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"  # ASCII digits only: Fraction() accepts 1_8 and Arabic digits
_SIGNIFICANT = 10  # digits from which a decimal may be the rounded form of an exact value
_VALUE = re.compile(
    rf"(?P<sign>[-+]?)\(?(?P<inner>-?)(?:(?P<whole>[0-9]+)?\\frac\{{(?P<top>-?{DECIMAL})\}}\{{(?P<bottom>-?{DECIMAL})\}}"
    rf"|(?P<over>{DECIMAL})/(?P<under>-?{DECIMAL})"
    rf"|(?P<decimal>{DECIMAL})(?:(?:\*10\^\{{|[eE])(?P<power>[-+]?[0-9]{{1,3}})\}}?)?)\)?(?P<percent>%?)"
)


@lru_cache(maxsize=2**14)
def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """(exact value, True if a percent sign follows it); None if the text is not a number.

    The percent sign does not scale the value: ``10%`` is (10, True).
    """
    match = _VALUE.fullmatch(text)
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
    if (unit := rounding_tolerance(a, b)) is None:
        return False
    decimal, exact = (x[0], y[0]) if "." in a else (y[0], x[0])
    return abs(decimal - exact) <= unit / 2 or 0 <= (exact - decimal) * (1 if decimal > 0 else -1) < unit  # cut off


def rounding_tolerance(a: str, b: str) -> Fraction | None:
    """The unit in the last place of a long decimal, if the other answer is not a decimal; otherwise None."""
    decimals = [text for text in (a, b) if re.fullmatch(rf"-?{DECIMAL}", text)]
    if len(decimals) != 1 or "." not in decimals[0]:
        return None  # two decimals are compared exactly
    if len(re.sub(r"\D", "", decimals[0]).lstrip("0")) < _SIGNIFICANT:
        return None
    return Fraction(1, 10 ** len(decimals[0].partition(".")[2]))


_SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: i for i, word in enumerate(_SMALL)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
_PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "hundredth": 100}

_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_SMALL[1:10])}))?|{'|'.join(reversed(_SMALL))})\b"
_BELOW_1000 = rf"{_BELOW_100}(?: hundred\b(?: (?:and )?{_BELOW_100})?)?"
_COUNT = rf"(?:{_BELOW_1000}(?: thousand\b(?: (?:and )?{_BELOW_1000})?)?|\d+)"
_FRACTION = rf"(?P<top>an?|{_COUNT})[ -](?P<bottom>{'|'.join(_PARTS)})(?P<plural>s?)\b"
_NUMBER = re.compile(
    rf"(?<![\w\\.,/^-])(?:(?:(?P<whole>{_COUNT}) and )?{_FRACTION}|(?P<count>(?!\d){_COUNT}))", re.IGNORECASE
)


def digits_for_words(text: str) -> str:
    r"""The text with digits for its number words, and without a ``\text`` around such a number alone."""
    if (whole := re.fullmatch(TEXT, text)) and _NUMBER.fullmatch(whole["content"].strip()):
        text = whole["content"].strip()
    return _NUMBER.sub(_number, text)


def _number(match: re.Match[str]) -> str:
    if match["count"]:
        return str(_count(match["count"]))
    top = 1 if match["top"].lower() in ("a", "an") else _count(match["top"])
    if (top == 1) == bool(match["plural"]):
        return match[0]  # an ordinal: the twenty-fifth
    whole = _count(match["whole"]) if match["whole"] else ""
    return rf"{whole}\frac{{{top}}}{{{_PARTS[match['bottom'].lower()]}}}"


def _count(words: str) -> int:
    """The value of a whole number in words or digits."""
    thousands = rest = 0
    for word in re.split("[ -]", words.lower()):
        if word == "thousand":
            thousands, rest = 1000 * rest, 0
        elif word == "hundred":
            rest *= 100
        elif word != "and":
            rest += int(word) if word.isdigit() else _VALUES[word]
    return thousands + rest
