r"""What comes behind a value, read whole: where it is attained, for which variables it holds, a note on its form.

    remark = [","] ["("] (attained | holds | note | mark value) [")"]

``8, attained at x = 2``, ``n^2 for all n``, ``\frac{5}{9} (exact)``. A condition that the grammar does not read, or
that names a variable which the value does not have (``8 (if n > 2)``), is no remark: the text equals only itself. A
value that is said again, ``\frac{1}{2} (or 0.5)``, makes a chain, ``0.5=\frac{1}{2}``, which has a value if it is true.
"""

import re
from typing import NamedTuple

from gtpo.grading.latex import COMPARISON, TABLES, TEXT_COMMANDS, depths


class Condition(NamedTuple):
    """For which values of a variable an answer holds."""

    variable: str
    kind: str  # a set of numbers: "integer", "positive integer"; or a relation: ">3"; empty for every value
    is_set: bool = False  # of a set of all values, which one value does not equal


NO_CONDITION = Condition("", "")

_VARIABLE = r"(?:[a-zA-Z]|\\(?:theta|phi|alpha|beta|lambda|mu|t))(?:_\{?\w\}?)?(?![a-zA-Z])"
_VALUE = r"(?:[^\s,;()=]|\((?:[^()]|\([^()]*\))*\))+"
_POINT = rf"(?:{_VARIABLE}|\({_VARIABLE}(?:\s*,\s*{_VARIABLE})*\))(?:\s*=\s*{_VARIABLE})*\s*=\s*{_VALUE}"
_POINTS = rf"{_POINT}(?:\s*(?:,|,?\s(?:and|or)\s)\s*{_POINT})*"
_KINDS = rf"(?:(?:{'|'.join(sorted(TABLES['kinds of number'].split(), key=len, reverse=True))})(?![a-z])\s*)"
_SET = r"\\mathbb\s*\{?(?P<set>[ZNRQC])\}?\s*(?:\^\s*\{?\s*(?P<sign>[*+])\s*\}?)?"
_RELATION = f"(?:{COMPARISON})=?"
_ATTAINED = re.compile(
    r"(?:(?:which|and|it|this) )?(?:is )?(?:attained|achieved|reached|obtained|occurring|occurs)"
    rf" (?:at|when|for|if|by|where|only (?:at|when|for|if))\s+{_POINTS}"
    rf"|(?:with |and )?equality (?:holds |occurs )?(?:at|when|for|if|iff)\s+{_POINTS}"
)
_WHEN = re.compile(rf"(?:when|at)\s+(?P<variable>{_VARIABLE})\s*=\s*[^()=,;\s]+(?:,?\s(?:and|or)\s{_POINT})?")
_HOLDS = re.compile(
    rf"(?:(?:for|where|with)\b|\\forall(?![a-z]))\s*(?P<kinds>{_KINDS}*)(?:(?:choices?|values?) of\s+)?"
    rf"(?P<variable>{_VARIABLE})?(?:\s*\\in\s*{_SET}|\s*(?:is|are)\s+(?P<said>{_KINDS}+))?"
)
_FREE = re.compile(rf"(?:independent of|regardless of|no matter what)\s+(?P<variable>{_VARIABLE})(?: is)?")
_MEMBER = re.compile(rf"(?P<variable>{_VARIABLE})\s*(?:\\in\s*{_SET}|(?:is|being)\s+(?P<said>{_KINDS}+))")
_DOMAIN = re.compile(
    rf"(?:(?:for|when|whenever|where|with|if)\s+(?:all\s+)?)?(?P<variable>{_VARIABLE})\s*(?P<relation>{_RELATION}"
    r"(?:\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|[^,;:=?!a-zA-Z\\])*)"  # no words
)
_NOTE = re.compile(
    r"(?:the |my |in )?(?:exact(?: value| answer| form)?|(?:final )?answer|inclusive|total|simplified|simplest form)"
)
_AGAIN = re.compile(r"(?:=|or|i\.?e\.?,?|that is,?|which is|equivalently,?|also)\s*(?P<value>[^<>=]*\d[^<>=]*)")
_ABOUT = re.compile(r"(?:\\approx|approximately|approx\.?|about|roughly)\s*(?P<value>[-\d.]+)")
_WORDS = (
    "for|when|whenever|where|with|at|if|which|and|it|this|is|attained|achieved|reached|obtained|occurring|occurs|equality"
    "|independent|regardless|only|no|the|my|in|exact|final|answer|inclusive|total|simplified"
)
_BRACKET = re.compile(r"(?P<value>[^()]*[\d}a-z])\s+\((?P<inner>(?:[^()]|\([^()]*\))*)\)")
_PERCENT = re.compile(r"[\d./]+\s*\\?%")
_MEASURE = re.compile(r"[\d./]+\s*[a-z]{2,}")
_START = re.compile(  # a remark begins with a comma, a bracket, \text, or one of its words
    rf"(?<![\s,;])(?P<mark>[\s,;]*(?:\\(?:{TEXT_COMMANDS})\s*\{{[\s,]*)?(?P<bracket>\()?[\s$]*(?:\\(?:{TEXT_COMMANDS})\s*\{{\s*)?)"
    rf"(?<![a-zA-Z\\])(?=(?:{_WORDS})\b|\\forall(?![a-z])|{_VARIABLE}\s*(?:\\in(?![a-z])|{_RELATION}|(?:\\(?:{TEXT_COMMANDS})\s*\{{)?\s*(?:is|being)\b))"
)
_NEEDED = re.compile(rf"\)$|(?<![a-zA-Z])(?:{_WORDS})(?![a-zA-Z])|\\forall|\\in(?![a-z])|{_RELATION}")
_BUILDER = re.compile(r"\\\{(?P<value>[^|:]*?)(?:\\mid(?![a-z])|[|:])(?P<tail>[^|:]*)\\\}")
_MAX_STARTS = 8
_NUMBERS = {"Z": "integer", "N": "natural", "Q": "rational", "R": "real", "C": "complex"}
_SAME = (  # conditions of other words
    {"natural", "positive integer", ">0", "\\geq1"},
    {"natural", "nonnegative integer", "\\geq0"},
    {"positive real", "positive", ">0"},
    {"nonnegative real", "nonnegative", "\\geq0"},
    {"nonzero real", "nonzero", "\\neq0"},
)


def split_remark(text: str) -> tuple[str, Condition]:
    """A value without the remark behind it, and the condition that the remark sets; a text without one as it is."""
    if not _NEEDED.search(text) or text.startswith("\\begin"):
        return text, NO_CONDITION
    if (bracket := _BRACKET.fullmatch(text)) and (again := _value_again(bracket["value"], _flat(bracket["inner"]))):
        return again, NO_CONDITION
    if builder := _BUILDER.fullmatch(text):
        found = _MEMBER.fullmatch(_flat(builder["tail"]))
        value = builder["value"].strip()
        if found and value != found["variable"] in _variables(value):
            return value, _condition(found)._replace(is_set=True)
    for _, start in zip(range(_MAX_STARTS), _START.finditer(text), strict=False):
        value, tail = text[: start.start()].rstrip(" ,$"), text[start.start() :]
        is_whole = value and not depths(value)[-1] and value.count("\\begin") == value.count("\\end")
        is_marked = is_whole and _is_marked(start["mark"], tail)
        condition = _read(value, _flat(tail), in_bracket=bool(start["bracket"])) if is_marked else None
        if condition is not None:
            return value, condition
    return text, NO_CONDITION


def _value_again(value: str, inner: str) -> str:
    """The chain of a value and another form of it in brackets; empty if they hold no other form."""
    if not re.search(r"\d|\\pi", value) or _variables(value) - {"i", "e", "\\pi", "\\sqrt", "\\frac"}:
        return ""
    if found := _AGAIN.fullmatch(inner):
        return f"{found['value']}={value}"
    if found := _ABOUT.fullmatch(inner):
        return f"{value}\\approx {found['value']}"
    is_measure = _MEASURE.fullmatch(inner) and _MEASURE.fullmatch(_flat(value))
    return f"{inner}={value}" if is_measure or _PERCENT.fullmatch(inner) else ""


def _is_marked(mark: str, tail: str) -> bool:
    """True if a remark may begin here: a relation and a membership only behind a comma or in brackets."""
    is_word = re.match(rf"(?:{_WORDS})\b|\\forall", tail[len(mark) :])
    return bool(is_word or re.search(r"[,;(]", mark))


def _flat(text: str) -> str:
    """A remark as plain text, without the brackets around it."""
    text = re.sub(rf"\\(?:{TEXT_COMMANDS})(?![a-zA-Z])\s*\{{([^{{}}]*)\}}", r" \1 ", text).replace("$", " ")
    text = " ".join(text.split()).strip(" ,.")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    return re.sub(r"\(\s*(for|when|where)\b", r"\1", text)


def _read(value: str, tail: str, *, in_bracket: bool) -> Condition | None:
    """The condition that a remark sets on a value; None for a text that is no remark on it."""
    variables = _variables(value)
    is_number = bool(re.search(r"[\d})]\$?$", value))
    if _ATTAINED.fullmatch(tail) or (in_bracket and _NOTE.fullmatch(tail)):
        return NO_CONDITION
    if found := _WHEN.fullmatch(tail):
        return NO_CONDITION if is_number and not variables else None
    if found := _DOMAIN.fullmatch(tail):
        is_named = re.match(rf"{re.escape(found['variable'])}\s*=", value)  # x = 5, x > 7
        is_part = found["variable"] in variables and not is_named and not re.search(rf"{_RELATION}|[,;]", value)
        return Condition(found["variable"], found["relation"].strip()) if is_part else None
    if tail == "only" or _FREE.fullmatch(tail):
        return NO_CONDITION
    if found := _MEMBER.fullmatch(tail):
        return _condition(found) if found["variable"] in variables else None
    if found := _HOLDS.fullmatch(tail):
        if found["variable"] in variables:
            return _condition(found)
        return NO_CONDITION if _is_universal(found) else None
    return None


def _is_universal(found: re.Match[str]) -> bool:
    """True for what leaves out no value of a variable that the answer does not have: for all integers n."""
    said = f"{found['kinds']} {found['said'] or ''}"
    is_limited = re.search(r"some|positive|negative|nonzero|natural|even|odd", said)
    return bool(not is_limited and re.search(r"\b(?:all|any|every|each|arbitrary)\b|\\forall", found[0]))


def _condition(found: re.Match[str]) -> Condition:
    """The set of numbers of a variable, in one word for all ways to say it."""
    parts = found.groupdict()
    said = f"{parts.get('kinds') or ''} {parts.get('said') or ''}"
    letter, sign = parts["set"], parts["sign"]
    noun = _NUMBERS.get(letter or "") or next((name for name in _NUMBERS.values() if name in said), "")
    adjectives = re.findall(r"positive|non-?negative|negative|non-?zero|even|odd", said + " positive" * (sign == "+"))
    kind = " ".join([*adjectives, noun]).replace("non-", "non").strip()
    return Condition(parts["variable"] or "", "natural" if noun == "natural" else kind)


def conditions_differ(a: Condition, b: Condition) -> bool:
    """True if two answers have a condition, and not the same one; one without a condition equals either."""
    if not a.kind or not b.kind:
        return a.is_set or b.is_set
    are_relations = not (a.kind + b.kind)[0].isalpha() and not b.kind[0].isalpha()
    if are_relations and a.variable != b.variable:
        return True
    return a.kind != b.kind and not any({a.kind, b.kind} <= same for same in _SAME)


def with_variable(text: str, condition: Condition, other: Condition) -> str:
    """A general solution with the letter of another one, where each names its own integer: 4n+3 and 4k+3."""
    old, new = condition.variable, other.variable
    if not (old and new) or old == new or new in _variables(text):
        return text
    if not all(re.search("integer|natural", each.kind) for each in (condition, other)):
        return text
    letter = re.escape(old)
    return re.sub(rf"(?:(?<![a-zA-Z\\])|(?<=\d)){letter}(?![a-zA-Z])", lambda _: new, text)


def _variables(text: str) -> set[str]:
    """The letters of a value that are no part of a command or word."""
    bare = re.sub(r"\\text[a-z]*\s*\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]{4,}|^[a-zA-Z ]{2,}$", " ", text)
    return set(re.findall(r"[a-zA-Z]", bare)) | set(re.findall(r"\\[a-z]+", text))
