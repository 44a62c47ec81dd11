"""docs/objectives.md is what the stored runs of three comparisons say."""

from pathlib import Path

import pytest
from helpers.scripts import ROOT

from study import objectives
from study.objectives import PAGE, write_objectives


def test_nothing_is_written_before_every_arm_has_runs(here: Path) -> None:
    assert write_objectives() == [] == [*here.iterdir()]


@pytest.mark.slow
def test_the_stored_page_is_that_of_the_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(objectives, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(objectives, "FIGURE", tmp_path / "figure.png")
    page, figure = write_objectives()
    assert page.read_text() == (ROOT / PAGE).read_text()
    assert figure.stat().st_size > 10_000
