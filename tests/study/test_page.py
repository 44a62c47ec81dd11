"""The page and the README's tables, and the stored results behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.results import results_of

from gtpo.files import CONFIGS
from paper.matrix import RUNS, experiments_of, load_matrix
from paper.results import read_results
from study.page import (
    DIRECTORY,
    FINDINGS,
    METRICS,
    PAGES,
    PLACES,
    README,
    fill,
    page_of,
    summarize,
)
from study.storage import only, read_origins, store

ROOT = CONFIGS.parent
MATRIX = load_matrix()
PAGE, CLAIMS, DETAILS = PAGES.values()


@pytest.mark.slow
def test_finished_runs_are_condensed_and_kept(sandbox: Any) -> None:
    """A second time without the runs: the condensed results stay as they are."""
    assert sandbox.reproduce("fig2", "--seeds", "1", "2") == 0
    runs = experiments_of(MATRIX, ["fig2"], "tiny")
    store(DIRECTORY, RUNS / "tiny", runs, METRICS)
    stored = read_results([DIRECTORY])
    found = read_results([Path("outputs")])
    logged = [*found.metrics.columns]
    assert (stored.metrics[logged] == found.metrics[logged]).all(axis=None) and "filtered_fraction" in stored.metrics
    scores = [result.scored("gtpo-g8", "arithmetic")["entry"][2]["scores"] for result in (stored, found)]
    assert scores[0] == scores[1]
    (sandbox / "outputs").rename(sandbox / "gone")
    store(DIRECTORY, RUNS / "tiny", runs, METRICS)
    assert read_results([DIRECTORY]).metrics.equals(stored.metrics)


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """reproduce.py --seeds 21 22 23 leaves its runs and scores next to those of the matrix."""
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
    computed = json.dumps(summarize(MATRIX, found))
    parts = [json.loads(text, parse_float=lambda number: f"{float(number):.9g}") for text in (computed, stored)]
    assert parts[0] == parts[1]  # Python 3.12 sums floats more exactly
    assert [page_of(summary, template) for template in PAGES] == [(ROOT / page).read_text() for page in PAGES.values()]
    readme = (ROOT / README).read_text()
    assert fill(readme, "found", page_of(summary, FINDINGS).strip()) == readme
    words = {page.name: words_of(page.read_text()) for page in (ROOT / README, *(ROOT / "docs").glob("*.md"))}
    assert sum(words.values()) <= 17_500 and len(words) <= 1 + 12, words


def words_of(page: str) -> int:
    """The words of a page: what has a letter or a digit, not the bars of a table."""
    return sum(any(map(str.isalnum, word)) for word in page.split())
