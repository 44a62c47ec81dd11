r"""Numbers in English words: ``twenty-five`` is 25, ``three and a half`` is ``3\frac{1}{2}``."""

import re

from gtpo.grading.latex import TEXT

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
