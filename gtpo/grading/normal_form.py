"""Rule 1: the normal form of an answer. Two answers with the same normal form are equal.

The rules are in rewrites.yaml, the words and commands that they name in tables.yaml.
"""

import html
import math
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from gtpo.grading.latex import TABLES, boxes, depths, read_tables
from gtpo.grading.number_words import with_digits
from gtpo.grading.piecewise import OPPOSITE, with_cases
from gtpo.grading.remark import NO_CONDITION, Condition, split_remark
from gtpo.grading.subject import without_subject

MAX_LENGTH = 1_000  # characters; the longest answer in MATH has 168
_MAX_DEPTH = 40  # nested brackets; the LaTeX grammar is recursive
_MAX_LAYERS = 8  # delimiters, bold, box and prose around one answer

# the other sections have their place in `read`, or in other modules
_BEFORE_REMARKS = ("numbers", "fonts", "commands", "spaces", "symbols", "python")
_LAST_SECTIONS = (
    *("absolute values", "no solution", "sets of numbers", "percent", "money", "remainders", "comparisons", "lists"),
    *("notation", "plain text", "dates", "signs", "counting", "remainders and ratios", "approximations"),
    *("numbers and indices", "degrees and other units in parts", "angles in functions", "angles"),
    *("words", "arguments", "blanks"),
)

Replacement = str | Callable[[re.Match[str]], str]
Rules = list[tuple[re.Pattern[str], Replacement]]

_CONTROL = dict.fromkeys(map(chr, [*range(32), 127]), " ")
_CHARACTERS = str.maketrans(TABLES["characters"] | _CONTROL)
_BARE = f"{TABLES['fonts']} {TABLES['declarations']}"
_COMMANDS = TABLES["commands"] | dict.fromkeys(_BARE.split(), "")
_ACCENTED = re.compile("(?i)(?<=[a-z])[\u00c0-\u017f]|[\u00c0-\u017f](?=[a-z])")  # días, año; not x̄
_BEFORE_BOX = re.compile(r"(?:^|[=:$.,]|\\[(\[]|(?<![\\a-zA-Z])[a-zA-Z]{2,})\s*\Z")
_BEHIND_BOX = re.compile(r"\s*(?:\Z|[$.,]|\\[)\]]|\\text|[a-zA-Z]{2})")
WORDS = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2}|[^\x00-\x7f]| [oey] ")  # outside commands
_PLAIN_NUMBER = re.compile(r"-?[1-9][0-9]*(?:\.[0-9]+)?|0")


def normalise(text: str) -> str:
    """The normal form of an answer: one spelling for all the ways to write the same thing.

    Returns an empty string if there is nothing to compare: blank text, over 1,000 characters, or unmatched brackets.
    """
    return read(text)[0]


@lru_cache(maxsize=2**14)
def read(text: str) -> tuple[str, Condition]:
    """The normal form of an answer, and the condition that stands behind its value."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return "", NO_CONDITION
    if _PLAIN_NUMBER.fullmatch(text):
        return text, NO_CONDITION
    text = _to_ascii(rewrite(text, "wrappers"))
    text = _unwrap(rewrite(" ".join(text.split()), "environments", "brackets", "decimals and bold"))
    if _PLAIN_NUMBER.fullmatch(text):
        return text, NO_CONDITION
    text = rewrite(text, "reversed")
    open_brackets = depths(text)
    if len(text) > MAX_LENGTH or open_brackets[-1] or max(open_brackets) > _MAX_DEPTH:
        return "", NO_CONDITION
    text = with_digits(rewrite(text, "number words"))
    value, condition = split_remark(with_cases(rewrite(text, *_BEFORE_REMARKS)))
    kind = condition.kind
    if kind and not kind[0].isalpha():  # a relation
        condition = condition._replace(kind=re.sub(r"\s", "", rewrite(kind, *_LAST_SECTIONS)))
    return rewrite(value, *_LAST_SECTIONS), condition


def rewrite(text: str, *sections: str) -> str:
    """The text after the rules of some sections of rewrites.yaml."""
    for section in sections:
        needs, rules = _REWRITES[section]
        if needs.search(text):
            for pattern, replacement in rules:
                text = pattern.sub(replacement, text)
    return text


def _to_ascii(text: str) -> str:
    """LaTeX or ASCII for Unicode mathematics. NFKC alone would read ``5²`` as 52 and ``1½`` as 11/2."""
    ascii_text = text.translate(_CHARACTERS)
    if text.isascii():
        return ascii_text
    text = unicodedata.normalize("NFKC", ascii_text).translate(_CHARACTERS)
    text = _ACCENTED.sub(lambda match: unicodedata.normalize("NFD", match[0])[0], text)
    return "".join(map(_ascii_character, rewrite(text, "unicode")))


def _ascii_character(char: str) -> str:
    """A digit of any script; nothing for marks without width; a blank for decoration."""
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category == "Cf" or "\ufe00" <= char <= "\ufe0f":
        return ""
    return " " if category == "Cc" or char in TABLES["decoration"] else char


def _unwrap(text: str) -> str:
    """Remove what surrounds an answer: delimiters, bold, "The answer is", one box, the final period."""
    for _ in range(_MAX_LAYERS):
        before = text
        text = rewrite(text, "layers", "fences").strip()
        if WORDS.search(text):
            text = without_subject(rewrite(text, "other languages", "changes", "prose"))
        text = _unbox(text)
        if text == before:
            break
    return text


def _unbox(text: str) -> str:
    """A text with the content of its only box in place, where words, ``=`` or nothing are next to the box."""
    if "box" not in text:
        return text
    box, *others = boxes(text) or [None]
    if not box or others:
        return text
    before, command, after = re.split(r"(\\(?:boxed|fbox)\s*\{?)", text, maxsplit=1)
    after = after.partition(box)[2]
    if command.endswith("{"):
        after = after.lstrip()[1:]
    if "\\(" not in before and "\\[" not in before:
        after = re.sub(r"^\s*\\[)\]]", "", after)
    is_read = _BEFORE_BOX.search(before) and _BEHIND_BOX.match(after)
    return f"{before}{' ' * before[-1:].isalnum()}{box}{' ' * after[:1].isalnum()}{after}" if is_read else text


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as 15/90."""
    whole, once, block = match.groups()
    digits = whole + once
    top = int(digits + block) - int(digits or 0)
    bottom = 10 ** len(once) * (10 ** len(block) - 1)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _letters(match: re.Match[str]) -> str:
    """``B, D``, several options, as BD."""
    return "".join(sorted(re.findall("[A-J]", match[0])))


def _chinese_number(match: re.Match[str]) -> str:
    """Chinese numerals as digits."""
    total = digit = 0
    for char in match[0]:
        value = int(unicodedata.numeric(char))
        total += (digit or 1) * value if value > 9 else 0
        digit = 0 if value > 9 else value
    return str(total + digit)


def _ratio(match: re.Match[str]) -> str:
    """``2:4:6`` as 1:2:3."""
    parts = [*map(int, match[0].split(":"))]
    return ":".join(str(part // math.gcd(*parts)) for part in parts)


def _between(match: re.Match[str]) -> str:
    """``-2 > x < 5``, of x > -2 and x < 5, as -2 < x < 5."""
    low, lower, name, upper, high = match.groups()
    return low + ("<" if lower == ">" else "\\leq ") + name + upper + " " + high


def _ascending(match: re.Match[str]) -> str:
    r"""``5 > x \geq -2`` as -2 \leq x < 5."""
    high, upper, name, lower, low = match.groups()
    signs = {">": "<", "\\geq": "\\leq "}
    return f"{low} {signs[lower]}{name}{signs[upper]}{high}"


def _double_factorial(match: re.Match[str]) -> str:
    """``5!!`` as 15."""
    return str(math.prod(range(int(match[1]), 0, -2)))


def _commuted(match: re.Match[str]) -> str:
    """Two sets in the order of the alphabet."""
    return match[2].join(sorted((match[1], match[3])))


def _replacement(text: str) -> Replacement:
    """What a rule puts in place: a template, ``@`` and a function, or ``@``, a table of words and a template."""
    if not text.startswith("@"):
        return text
    name, _, template = text[1:].partition(" ")
    words = TABLES.get(name, {})
    return _FUNCTIONS.get(name) or (
        lambda match: match.expand(template).replace("@", str(words[match["word"].lower()]))
    )


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern of rewrites.yaml with the lists that it names."""
    return re.compile(re.sub(r"(?<!\?)(?<!\?P)<([a-z_]+)>", _alternatives, text))


def _alternatives(name: re.Match[str]) -> str:
    """The words of a list of tables.yaml, the longest first; the text itself if it names none."""
    words = TABLES.get(name[1], TABLES.get(name[1].replace("_", " "), name[0]))
    if isinstance(words, dict):
        return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return words.replace(" ", "|")


_FUNCTIONS: dict[str, Callable[[re.Match[str]], str]] = {
    "repeating": _repeating_decimal,
    "letters": _letters,
    "chinese": _chinese_number,
    "ratio": _ratio,
    "between": _between,
    "ascending": _ascending,
    "double_factorial": _double_factorial,
    "commuted": _commuted,
    "congruent": lambda match: f"N={int(match[2]) % (int(match[3]) or 1)}",
    "angle": lambda match: " " + min(match[1] + match[2] + match[3], match[3] + match[2] + match[1]),
    "negated": lambda match: OPPOSITE[match[1]],
    "command": lambda match: _COMMANDS.get(match[1], match[0]),
    "unescape": lambda match: html.unescape(match[0]),
    "ungrouped": lambda match: re.sub("[,._]", "", match[0]),
    "remainder": lambda match: str(int(match[1]) % (int(match[2]) or 1)),
}
_REWRITES: dict[str, tuple[re.Pattern[str], Rules]] = {}
for _name, _section in read_tables("rewrites.yaml").items():
    _rules = [(_pattern(old), _replacement(new)) for old, new in _section["rules"]]
    _REWRITES[_name] = _pattern(_section["needs"]), _rules
