"""The page and the README's tables, and the stored results behind them."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.results import results_of
from helpers.runs import fake_run, write_results

from gtpo.files import CONFIGS
from paper.matrix import RUNS, experiments_of, load_matrix
from paper.results import read_results
from study.page import DIRECTORY, FINDINGS, METRICS, PAGES, PLACES, README, fill, means_over_bases, page_of, summarize
from study.storage import only, read_origins, store

ROOT = CONFIGS.parent
MATRIX = load_matrix()


def test_finished_runs_are_condensed_and_kept(here: Path) -> None:
    """A second time without the runs: the condensed results stay as they are."""
    runs = experiments_of(MATRIX, ["fig2"], "tiny", [1, 2, 3], ["gtpo-g8"])
    entries = []
    for run in runs:
        rows = [{"step": 1, "accuracy": 1.25, "filtered_fraction": 0.1 * run.seed}]
        fake_run(run.run.path, rows=rows, saved=["adapter"] if run.seed < 3 else [])
        entries.append({"adapter": str(run.run.adapter), "label": run.label, "benchmark": "arithmetic"})
    write_results(RUNS / "tiny" / "evaluation", *({**entry, "scores": {"pass": {"1": 50.0}}} for entry in entries))
    for _ in range(2):
        store(DIRECTORY, RUNS / "tiny", runs, METRICS)
        stored = read_results([DIRECTORY])
        kept = stored.metrics[["accuracy", "filtered_fraction"]].to_dict("index")
        assert kept == {  # the third run is not finished
            ("gtpo-g8", seed, 1): {"accuracy": 1.25, "filtered_fraction": 0.1 * seed} for seed in (1, 2)
        }
        assert stored.scored("gtpo-g8", "arithmetic")["pass@1"].to_dict() == {1: 50.0, 2: 50.0}
        shutil.rmtree(RUNS, ignore_errors=True)


def test_a_run_that_is_not_stored_enters_no_page(here: Path) -> None:
    Path("results").symlink_to(ROOT / "results")
    expected = means_over_bases("early")
    rows = [{"step": step, "accuracy": 100.0} for step in range(1, 21)]
    fake_run(Path("outputs/study/early/smol-early/grpo-3e-4-s741"), rows=rows, saved=["adapter"])
    assert means_over_bases("early") == expected


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """reproduce.py --seeds 21 22 23 leaves its runs and scores next to those of the matrix."""
    scored = {seed: {"scores": {"pass": {"1": float(seed)}}} for seed in (1, 2, 3)}
    metrics = {"sft": {seed: [{"step": seed}] for seed in scored}}
    found = results_of(metrics, {"sft": {"arithmetic": scored}, "base": {"arithmetic": {0: scored[1]}}})
    kept = only(found, [("sft", 1), ("sft", 3)])
    assert [*kept.runs] == [("sft", 1), ("sft", 3)]
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
