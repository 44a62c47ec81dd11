"""The generated pages of docs/: Jinja templates next to this file, with lines wrapped."""

import re
import textwrap
from pathlib import Path

from study import Row

LINE = 140  # characters; tables, figures and code stay as they are
VERBATIM = re.compile(r"\||!\[|#|<|```")


def render(template: str, values: Row) -> str:
    """A page in Markdown, or a text for the screen, from ``template`` next to this file.

    Raises:
        jinja2.UndefinedError: If the template names a value that is missing.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = pages.get_template(template).render(values)
    return wrapped(text) if template.endswith(".md") else text.rstrip()


def wrapped(page: str) -> str:
    """The page with each paragraph and list item in lines of at most ``LINE`` characters, and single empty lines."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    for place in range(0, len(parts), 2):  # the others are code
        blocks = re.split(r"\n{2,}", parts[place])
        parts[place] = "\n\n".join(map(_block, blocks))
    return "".join(parts)


def _block(block: str) -> str:
    """A paragraph or a list, wrapped; a table, figure or heading is unchanged."""
    body = block.strip("\n")
    if not body or VERBATIM.match(body):
        return block
    items = re.split(r"\n(?=\* |\d+\. )", body)
    return block.replace(body, "\n".join(map(_item, items)))


def _item(item: str) -> str:
    mark = re.match(r"\* |\d+\. ", item)
    indent = " " * len(mark[0]) if mark else ""
    words = " ".join(item.split())
    return textwrap.fill(words, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
