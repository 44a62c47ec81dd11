"""Helpers for LaTeX text: brackets, boxes, and the patterns that several rules share."""

import re
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import yaml


def read_tables(name: str) -> dict[str, Any]:
    """A YAML file of this directory."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time
    tables: dict[str, Any] = yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), loader)
    return tables


TABLES = read_tables("tables.yaml") | read_tables("words.yaml")
TABLES["foreign_units"] = {
    word.replace("_", " "): unit for unit, words in TABLES["foreign_units"].items() for word in words.split()
}
for _name in ("changes of a quantity", "comparatives", "directions"):
    TABLES[_name] = {word: words[0] for words in TABLES[_name] for word in words}
    TABLES["changes"] = TABLES.get("changes", {}) | TABLES[_name]

FUNCTIONS = TABLES["functions"]
TEXT_COMMANDS = TABLES["text"]
TEXT = rf"\\(?P<command>{TEXT_COMMANDS})\s*\{{(?P<content>[^{{}}]*)\}}"
COMPARISON = r"[<>]|\\(?:leq|geq|neq)(?![a-zA-Z])"
OPENING = "([{"
_STEP = dict.fromkeys(OPENING, 1) | dict.fromkeys(")]}", -1)  # in depth


def depths(text: str) -> list[int]:
    """Number of open brackets before each character of the text, and at its end."""
    return [*accumulate(map(_STEP.get, text, repeat(0)), initial=0)]


def closing_index(text: str) -> int:
    """Index of the bracket that closes the first character; 0 if there is none."""
    return next((i for i, depth in enumerate(depths(text)[1:]) if depth == 0), 0)


def split_top_level(text: str, separator: str) -> list[str]:
    """Split `text` at the matches of the pattern `separator` that are not inside brackets."""
    pieces, start = [], 0
    open_before: list[int] = []  # counted if there is a separator at all
    for match in re.finditer(separator, text):
        open_before = open_before or depths(text)
        if open_before[match.start()] == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def last_boxed(text: str) -> str | None:
    r"""The gold answer of a MATH solution: the content of its last ``\boxed`` or ``\fbox``, None if missing or empty.

    Braces are matched, because 23 % of MATH gold answers contain nested braces. ``\boxed 2`` and ``\boxed {17}`` occur
    in MATH as well.
    """
    found = boxes(text)
    return found[-1] if found else None


_BOX = re.compile(r"\\(?:boxed|fbox)")
_MAX_BOXES = 64


def boxes(text: str) -> list[str | None]:
    r"""The content of every ``\boxed`` and ``\fbox``, None for one that is missing or empty."""
    _, *found = _BOX.split(text)
    return [*map(_content, found)]


def _content(text: str) -> str | None:
    r"""The content of a box from what follows ``\boxed``; None if it is missing or empty."""
    text = text.lstrip()
    if text.startswith("{"):
        return text[1 : closing_index(text)].strip() or None
    bare = re.match(r"[^\s$\\{}.,]+", text)
    return bare[0] if bare else None


def boxes_of_last_line(text: str) -> list[str]:
    r"""The contents of every ``\boxed`` of the last line that has one."""
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0)
    start = text.rfind("\n", 0, last) + 1
    return list(filter(None, boxes(text[start:])[-_MAX_BOXES:]))
