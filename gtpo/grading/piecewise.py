r"""Piecewise answers: cases with conditions in symbols or in words, as the rows ``value&condition`` of one environment.

``x \text{ if } x\ge0, -x \text{ otherwise}`` is ``\begin{cases}x&x\ge0\\-x&x<0\end{cases}``.
"""

import re

from gtpo.grading.latex import COMPARISON, TABLES, split_top_level
from gtpo.grading.subject import plain

_ENVIRONMENT = re.compile(
    r"(?:[a-zA-Z](?:\([a-z]\))?\s*=\s*)?\\begin\{[dr]{0,2}cases\*?\}(?P<rows>(?:(?!\\begin).)*)\\end\{[dr]{0,2}cases\*?\}"
)
_IF = f"(?:{TABLES['if'].replace(' ', '|')})"
_OTHERWISE = f"(?:{TABLES['otherwise'].replace(' ', '|')})"
_NEEDED = re.compile(rf"cases|\b{_IF}\b.*\b(?:{_IF}|{_OTHERWISE})\b")
_BRANCH = re.compile(  # a row without &
    rf"(?P<value>.+?)(?:\s*,?\s*\b(?:{_IF}\b(?:\s+all\b)?\s*(?P<condition>.+)|(?P<rest>{_OTHERWISE}))|\s*,\s*(?P<bare>.+))"
)
_RELATION = re.compile(f"=|{COMPARISON}")
OPPOSITE = {"<": "\\geq ", ">": "\\leq ", "\\leq": ">", "\\geq": "<", "=": "\\neq ", "\\neq": "="}
OPPOSITE |= {"even": "odd", "odd": "even", "rational": "irrational", "irrational": "rational"}
_ANY = re.compile(rf"{_RELATION.pattern}|\b(?:even|odd|rational|irrational)\b")


def with_cases(text: str) -> str:
    """The text with its cases in one form; one without cases as it is."""
    if not _NEEDED.search(text):
        return text
    environment = _ENVIRONMENT.fullmatch(text)
    if environment:
        lines = [line for line in re.split(r"\\\\|\\cr(?![a-z])", environment["rows"]) if line.strip()]
        rows = [_row(line) for line in lines]
    else:
        parts = split_top_level(plain(text), r"[,;]\s*(?:and\s+)?|\s+and\s+")
        rows = [_row(part) if re.search(rf"\b(?:{_IF}|{_OTHERWISE})\b", part) else None for part in parts]
    whole = [row for row in rows if row]
    if len(whole) < len(rows) or len(rows) < 1 + (not environment):
        return text
    if len(whole) == 2:
        whole = [_with_the_rest(*whole), _with_the_rest(*whole[::-1])]
    return r"\begin{cases}" + r"\\".join("&".join(row) for row in whole) + r"\end{cases}"


def _row(line: str) -> tuple[str, str] | None:
    """Value and condition of a row, with ``otherwise`` for what the others leave; None if it has no condition."""
    value, mark, condition = plain(line.replace("$", "")).partition("&")
    if not mark:
        branch = _BRANCH.fullmatch(value.strip(" ,."))
        if not branch:
            return None
        value, condition = branch["value"], branch["condition"] or branch["bare"] or branch["rest"]
    condition = re.sub(rf"^{_IF}\b(?:\s+all\b)?|&", "", condition.strip(" ,.;")).strip(" ,.:")
    if re.fullmatch(_OTHERWISE, condition):
        condition = "otherwise"
    elif not _RELATION.search(condition):
        words = re.sub(r"\b(?:is|an?)\b", "", condition).split()
        condition = " ".join(sorted(words))  # for even n, n is even
    return (value.strip(" ,.;"), condition) if condition else None


def _with_the_rest(row: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    """The first of two rows, with the opposite of the second one's condition for ``otherwise``."""
    found = _ANY.search(other[1])
    if row[1] != "otherwise" or not found:
        return row
    return row[0], other[1].replace(found[0], OPPOSITE[found[0]])
