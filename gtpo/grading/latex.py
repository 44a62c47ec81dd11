"""Helpers for LaTeX text: brackets, boxes, and the patterns that several rules share."""

import re
from itertools import accumulate
from pathlib import Path

import yaml

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|lg|exp"
TEXT_COMMANDS = "text(?:normal|rm|bf|it)?|mbox|hbox|math(?:rm|bf|it|sf|up)|operatorname|unit|si"
TEXT = rf"\\(?P<command>{TEXT_COMMANDS})\s*\{{(?P<content>[^{{}}]*)\}}"
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
    boxes = _BOX.split(text)
    return _split_box(boxes[-1])[0] if len(boxes) > 1 else None


_BOX = re.compile(r"\\(?:boxed|fbox)")
_MAX_BOXES = 64


def _split_box(text: str) -> tuple[str | None, str]:
    r"""(content, rest) of a text that follows ``\boxed``; the content is None if there is none."""
    text = text.lstrip()
    if not text.startswith("{"):
        bare = re.match(r"[^\s$\\{}.,]+", text)
        return (bare[0], text[bare.end() :]) if bare else (None, text)
    end = closing_index(text, 0)
    return (text[1:end].strip() or None if end else None), text[end + 1 :]


def boxes_of_last_line(text: str) -> list[str]:
    r"""The contents of every ``\boxed`` of the last line that has one."""
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    line = text[text.rfind("\n", 0, max(last, 0)) + 1 :]
    contents = [_split_box(piece)[0] for piece in _BOX.split(line)[1:][-_MAX_BOXES:]]
    return [content for content in contents if content is not None]
