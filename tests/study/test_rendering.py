"""The generated pages: values in a template, and lines of at most ``LINE`` characters."""

from pathlib import Path

import jinja2
import pytest

from study import rendering
from study.rendering import render


def test_a_missing_value_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "__file__", str(tmp_path / "rendering.py"))
    (tmp_path / "page.md").write_text("{% if true %}\n{{ value }}\n{% endif %}\n")
    assert render("page.md", {"value": 3}) == "3\n"
    with pytest.raises(jinja2.UndefinedError, match="'value' is undefined"):
        render("page.md", {})
