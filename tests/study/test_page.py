"""The page and the README's tables, and the stored results behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.results import results_of

from gtpo.files import CONFIGS
from paper.matrix import load_matrix
from paper.results import read_results
from study.mechanism import DIRECTORY as mechanism_directory
from study.mechanism import summaries_in
from study.page import (
    DIRECTORY,
    FINDINGS,
    PAGES,
    PLACES,
    README,
    fill,
    page_of,
    summarize,
    write_page,
)
from study.storage import only, read_origins

ROOT = CONFIGS.parent
MATRIX = load_matrix()
PAGE, CLAIMS, DETAILS = PAGES.values()


@pytest.mark.slow
def test_page_of_a_few_runs(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Condensed, checked and rendered from a few runs; a second time from the condensed results alone."""
    (sandbox / "docs").mkdir()
    README.write_text("before\n<!-- found -->\nold\n<!-- end -->\nafter\n")
    Path("linked.md").hardlink_to(README)
    assert sandbox.reproduce("fig2", "--seeds", "1", "2") == 0
    capsys.readouterr()
    assert sandbox.study("page") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.is_file() for path in written)
    assert {CLAIMS, README, DIRECTORY / "summary.json"} <= set(written)
    first = PAGE.read_text() + CLAIMS.read_text()
    stored = read_results([DIRECTORY])
    found = read_results([Path("outputs")])
    logged = [*found.metrics.columns]
    assert (stored.metrics[logged] == found.metrics[logged]).all(axis=None) and "filtered_fraction" in stored.metrics
    scores = [result.scored("gtpo-g8", "arithmetic")["entry"][2]["scores"] for result in (stored, found)]
    assert scores[0] == scores[1]
    (sandbox / "outputs").rename(sandbox / "gone")
    write_page(MATRIX)
    assert PAGE.read_text() + CLAIMS.read_text() == first
    assert "not run" in first and "`python -m study compare llama`" in first
    readme = README.read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "\nold\n" not in readme
    assert "\nold\n" in Path("linked.md").read_text()  # replaced at once: no kill leaves a README without its comments
    assert "* **Unknown**: LLaMA" in readme and "Accuracy does not rise" not in readme  # no run says so


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """claim --seeds 21 22 23 leaves its runs and scores next to those of the matrix."""
    seeds = {seed: {"scores": {"pass": {"1": float(seed)}}} for seed in (1, 2, 3)}
    found = results_of(
        {"sft": {seed: [{"step": seed}] for seed in (1, 2, 3)}, "word": {1: [{"step": 1}]}},
        {"sft": {"arithmetic": seeds}, "base": {"arithmetic": {0: seeds[1]}}},
    )
    kept = only(found, [("sft", 1), ("sft", 3), ("word", 1)])
    assert [*kept.runs] == [("sft", 1), ("sft", 3), ("word", 1)]
    assert kept.scored("sft", "arithmetic")["pass@1"].to_dict() == {1: 1.0, 3: 3.0}
    assert len(kept.scored("base", "arithmetic")) == 1


# The stored results


@pytest.mark.slow
def test_page_has_the_numbers_of_the_stored_results() -> None:
    stored = (ROOT / DIRECTORY / "summary.json").read_text()
    summary = json.loads(stored)
    found = {place: read_results([ROOT / path]) for place, path in PLACES.items()}
    origins = {place: read_origins(ROOT / path) for place, path in PLACES.items()}
    every = [*origins["collapse"].values(), *origins["headroom"].values()]  # docs/log.md has both numbers
    assert sum("-dirty" in origin[0] for origin in every) == 42
    assert len(found["collapse"].runs) + len(found["headroom"].runs) - len(every) == 34
    mechanism = summaries_in(ROOT / mechanism_directory)
    computed = json.dumps(summarize(MATRIX, found, mechanism, origins))
    parts = [json.loads(text, parse_float=lambda number: f"{float(number):.9g}") for text in (computed, stored)]
    assert parts[0] == parts[1]  # Python 3.12 sums floats more exactly
    assert [page_of(summary, template) for template in PAGES] == [(ROOT / page).read_text() for page in PAGES.values()]
    readme = (ROOT / README).read_text()
    assert fill(readme, "found", page_of(summary, FINDINGS).strip()) == readme
    words = {page.name: len(page.read_text().split()) for page in (ROOT / README, *(ROOT / "docs").glob("*.md"))}
    assert sum(words.values()) <= 17_900 and len(words) <= 1 + 12, words
