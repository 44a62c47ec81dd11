r"""Numbers in words, read whole: ``two hundred fifty`` is 250, ``three and a half`` is 3\frac{1}{2}.

    number   = cardinal ["and" fraction] | fraction [["of"] "a" size]
    cardinal = {below a thousand, size} below a thousand          sizes fall: two million ten thousand
    fraction = ("a" | cardinal | digits) denominator

Words that are no such number (``one two``, ``twenty fifth``) stay words.
"""

import re
from fractions import Fraction

from gtpo.grading.latex import TABLES

_NUMBERS: dict[str, int] = TABLES["number_words"]
_DENOMINATORS: dict[str, int] = TABLES["denominators"]
_SIZES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_DENOMINATOR = f"(?:{'|'.join(sorted(_DENOMINATORS, key=len, reverse=True))})s?"
_WORD = f"(?:{'|'.join(sorted([*_NUMBERS, *_SIZES, 'hundred'], key=len, reverse=True))}|{_DENOMINATOR})"
_RUN = re.compile(
    r"(?i)(?<![\w\\.,/^])(?<![^a-z]-)(?<!non-)(?!one to (?:one|many)\b)(?<!one[ -]to[ -])"
    rf"(?:(?:an?|\d+)(?=[ -](?:and an? )?{_WORD}\b)|{_WORD}\b)"
    rf"(?:(?:[ -]| (?:and|of)(?: an?)? | an? ){_WORD}\b)*(?![\w-])"
)
_AGAIN = re.compile(r"([-\d.\\$]\S*)\s*\((?:or |i\.e\.,? )?([^()]*)\)")  # 5 (five); a product has no word
_NEEDED = re.compile(rf"(?i)\b{_WORD}\b")
_HALF = r"\frac{1}{2}"
_OF_A = re.compile(r"(\\frac\{\d+\}\{\d+\}) of an? (?=[a-z])|(?i:(?<![a-z])half an? )(?=[a-z])")
_AND_A_HALF = re.compile(r"(?:an?|(\d+)) ([a-z]+) and (?:a half|\\frac\{1\}\{2\})")


def with_digits(text: str) -> str:
    r"""The text with its numbers in digits. ``5 (five)`` is ``5=5``, ``an hour and a half`` ``1\frac{1}{2} hour``."""
    if not _NEEDED.search(text):
        return text
    written = _RUN.sub(lambda run: _in_digits(run[0].lower()) or run[0], text)
    if (again := _AGAIN.fullmatch(text)) and (inner := _AGAIN.fullmatch(written)) and inner[2] != again[2]:
        return f"{inner[1]}={inner[2]}"
    written = _OF_A.sub(lambda part: f"{part[1] or _HALF} ", written)  # half an hour
    if part := _AND_A_HALF.fullmatch(written):
        return f"{part[1] or 1}{_HALF} {part[2]}"
    return written


def _in_digits(run: str) -> str:
    """A run of words of numbers in digits; numbers with "and" between them stay two; empty if it is no number."""
    words = run.replace("-", " ").split()
    for end in range(len(words), 0, -1):
        if number := _number(words[:end]):
            rest = words[end:]
            others = _in_digits(" ".join(rest[1:])) if rest and rest[0] == "and" else ""
            return number + (f" and {others}" if others else "") if others or not rest else ""
    return ""


def _number(words: list[str]) -> str:
    """The number that all of the words say; empty if they say none."""
    if (whole := _cardinal(words)) is not None:
        return "" if words[0].isdecimal() else str(whole)  # 3 million: of units.py
    if fraction := _fraction(words):
        return rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}"
    *factor, last = words
    if last in _SIZES and factor[-1:] == ["a"]:  # three quarters of a million
        part = [word for word in factor[:-1] if word != "of"]
        fraction = (1, 2) if part == ["half"] else _fraction(part)
        return str(Fraction(*fraction) * _SIZES[last]) if fraction else ""
    if (size := _SIZES.get(last, 100 * (last == "hundred"))) and (mixed := _mixed(factor)):  # two and a half million
        return str((mixed[0] + Fraction(*mixed[1])) * size)
    if not (mixed := _mixed(words)):
        return ""
    whole, (top, bottom) = mixed
    if words[0] == "a" and words[1] in _SIZES:  # a million and a half
        return str(whole + whole * Fraction(top, bottom))
    return rf"{whole}\frac{{{top}}}{{{bottom}}}"


def _mixed(words: list[str]) -> tuple[int, tuple[int, int]] | None:
    """A whole number and a fraction: ``three and a half``."""
    if "and" not in words:
        return None
    split = len(words) - 1 - words[::-1].index("and")
    whole, fraction = _cardinal(words[:split]), _fraction(words[split + 1 :])
    return None if whole is None or not fraction else (whole, fraction)


def _cardinal(words: list[str]) -> int | None:
    """The whole number that all of the words say."""
    total, group, limit = 0, 0, 10**15
    for i, word in enumerate(words):
        value = _NUMBERS.get(word) or (int(word) if word.isdecimal() and i == 0 else 0)
        if word == "zero" and len(words) == 1:
            return 0
        if word == "and" and 0 < i < len(words) - 1 and (words[i - 1] == "hundred" or words[i - 1] in _SIZES):
            continue
        if word == "a" and i == 0 and len(words) > 1 and (words[1] == "hundred" or words[1] in _SIZES):
            group = 1
        elif word == "hundred" and 0 < group < 100 and group % 10:
            group *= 100
        elif word in _SIZES and group and _SIZES[word] < limit:
            limit = _SIZES[word]
            total, group = total + group * limit, 0
        elif value and (group % 100 == 0 if value > 9 or group % 100 < 20 else group % 10 == 0) and group < 1000:
            group += value
        else:
            return None
    return total + group


def _fraction(words: list[str]) -> tuple[int, int] | None:
    """Numerator and denominator: ``a half``, ``two thirds``, ``3 quarters``."""
    if len(words) < 2:
        return None
    *top, last = words
    singular = last if last in _DENOMINATORS else last.removesuffix("s")
    number = 1 if top in (["a"], ["an"]) else _cardinal(top)
    if singular not in _DENOMINATORS or not number or (number == 1) != (last in _DENOMINATORS):
        return None
    return number, _DENOMINATORS[singular]
