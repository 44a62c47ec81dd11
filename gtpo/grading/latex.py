"""Helpers for LaTeX text: brackets, boxes, and the patterns that several rules share."""

import re
from itertools import accumulate, repeat
from pathlib import Path

import yaml

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|lg|exp"
TEXT_COMMANDS = "text(?:normal|rm|bf|it)?|mbox|hbox|math(?:rm|bf|it|sf|up)|operatorname|unit|si"
TEXT = rf"\\(?P<command>{TEXT_COMMANDS})\s*\{{(?P<content>[^{{}}]*)\}}"
OPENING = "([{"
_STEP = dict.fromkeys(OPENING, 1) | dict.fromkeys(")]}", -1)  # in depth


def bracket_balance(text: str) -> int:
    """Number of opening brackets minus number of closing brackets."""
    return sum(map(_STEP.get, text, repeat(0)))


def nesting_depth(text: str) -> int:
    """Largest number of brackets that are open at the same time."""
    return max(accumulate(map(_STEP.get, text, repeat(0))), default=0)


def closing_index(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; 0 if there is none."""
    depth = 0
    for i in range(start, len(text)):
        depth += _STEP.get(text[i], 0)
        if depth == 0:
            return i
    return 0


def split_top_level(text: str, separator: str) -> list[str]:
    """Split `text` at the matches of the pattern `separator` that are not inside brackets."""
    pieces = []
    start = depth = position = 0
    for match in re.finditer(separator, text):
        depth += bracket_balance(text[position : match.start()])
        position = match.start()
        if depth == 0:
            pieces.append(text[start:position].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def last_boxed(text: str) -> str | None:
    r"""The gold answer of a MATH solution: the content of its last ``\boxed`` or ``\fbox``, None if missing or empty.

    Braces are matched, because 23 % of MATH gold answers contain nested braces. ``\boxed 2`` and ``\boxed {17}`` occur
    in MATH as well.
    """
    _, *boxes = _BOX.split(text)
    return _content(boxes[-1]) if boxes else None


_BOX = re.compile(r"\\(?:boxed|fbox)")
_MAX_BOXES = 64


def _content(text: str) -> str | None:
    r"""The content of a box from what follows ``\boxed``; None if it is missing or empty."""
    text = text.lstrip()
    if text.startswith("{"):
        end = closing_index(text, 0)
        return text[1:end].strip() or None
    bare = re.match(r"[^\s$\\{}.,]+", text)
    return bare[0] if bare else None


def boxes_of_last_line(text: str) -> list[str]:
    r"""The contents of every ``\boxed`` of the last line that has one."""
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0)
    start = text.rfind("\n", 0, last) + 1
    _, *boxes = _BOX.split(text[start:])
    return list(filter(None, map(_content, boxes[-_MAX_BOXES:])))
