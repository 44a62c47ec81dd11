"""The generated pages of docs/: Jinja templates next to this file, with lines wrapped."""

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from study import Row

LINE = 95  # characters; tables, figures and code stay as they are
# A paragraph or a list item; tables, figures, headings and HTML stay as they are.
TEXT = re.compile(r"^(?!\||!\[|#|<)(?P<mark>\* |\d+\. )?.+(\n(?!\* |\d+\. ).+)*", flags=re.MULTILINE)


def render(template: str, values: Row) -> str:
    """A page in Markdown, or a text for the screen, from ``template`` next to this file.

    Raises:
        jinja2.UndefinedError: If the template names a value that is missing.
    """
    text = _templates(Path(__file__).parent).get_template(template).render(values)
    return wrapped(text) if template.endswith(".md") else text.rstrip()


@cache
def _templates(directory: Path) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(directory),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def wrapped(page: str) -> str:
    """The page with each paragraph and list item in lines of at most ``LINE`` characters, and single empty lines."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    for place in range(0, len(parts), 2):  # the others are code
        single = re.sub(r"\n{3,}", "\n\n", parts[place])
        parts[place] = TEXT.sub(_filled, single)
    return "".join(parts)


def _filled(item: re.Match[str]) -> str:
    indent = " " * len(item["mark"] or "")
    words = " ".join(item[0].split())
    return textwrap.fill(words, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
