"""The generated pages: values in a template, and lines of at most ``LINE`` characters."""

from pathlib import Path

import jinja2
import pytest

from study import rendering
from study.rendering import render, wrapped


def test_paragraphs_and_items_are_wrapped_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LINE", 20)
    table = "| a long head of a table | b |\n|---|---|\n| 1 | 2 |"
    code = "```bash\npython reproduce.py all --scale tiny\n\n\n# two empty lines\n```"
    figure = "![a figure with a long title](path/to/figure.png)"
    page = f"""# A heading that is longer than a line

One sentence, and another
sentence.



* first item with some words
  that go on
* second
1. numbered item with words

{table}

{figure}

{code}
"""
    assert (
        wrapped(page)
        == f"""# A heading that is longer than a line

One sentence, and
another sentence.

* first item with
  some words that go
  on
* second
1. numbered item
   with words

{table}

{figure}

{code}
"""
    )


def test_a_missing_value_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "__file__", str(tmp_path / "rendering.py"))
    (tmp_path / "page.md").write_text("{% if true %}\n{{ value }}\n{% endif %}\n")
    assert render("page.md", {"value": 3}) == "3\n"
    with pytest.raises(jinja2.UndefinedError, match="'value' is undefined"):
        render("page.md", {})
