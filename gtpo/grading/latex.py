"""Helpers for LaTeX text: brackets, boxes, and the patterns that several rules share."""

import re
from itertools import accumulate

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
TEXT = r"\\(?P<command>text(?:normal|rm|bf|it)?|mbox|math(?:rm|bf|it|sf)|operatorname)\s*\{(?P<content>[^{}]*)\}"
OPENING, CLOSING = "([{", ")]}"


def bracket_balance(text: str) -> int:
    """Number of opening brackets minus number of closing brackets."""
    return sum((char in OPENING) - (char in CLOSING) for char in text)


def nesting_depth(text: str) -> int:
    """Largest number of brackets that are open at the same time."""
    return max(accumulate((char in OPENING) - (char in CLOSING) for char in text), default=0)


def closing_index(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; 0 if there is none."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in OPENING) - (text[i] in CLOSING)
        if depth == 0:
            return i
    return 0


def split_top_level(text: str, separator: str) -> list[str]:
    """Split `text` at the matches of the pattern `separator` that are not inside brackets."""
    pieces, start, depth, position = [], 0, 0, 0
    for match in re.finditer(separator, text):
        depth += bracket_balance(text[position : match.start()])
        position = match.start()
        if depth == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def last_boxed(text: str) -> str | None:
    r"""The gold answer of a MATH solution: the content of its last ``\boxed`` or ``\fbox``, None if missing or empty.

    Braces are matched, because 23 % of MATH gold answers contain nested braces. ``\boxed 2`` and ``\boxed {17}`` occur
    in MATH as well.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$\\{}.,]+", rest)
        return bare[0] if bare else None
    end = closing_index(rest, 0)
    return rest[1:end].strip() or None if end else None
