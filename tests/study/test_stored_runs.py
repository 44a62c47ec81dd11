"""Condensed results: what is stored of finished runs, and what a stored comparison reads."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_json, write_json
from helpers.refusals import refused
from helpers.results import results_of
from helpers.runs import fake_run, write_results
from helpers.scripts import ROOT

from paper.matrix import RUNS, experiments_of, load_matrix
from paper.results import SCORES_FILE, read_results
from study.comparison import known_comparison, read_experiments, stored_comparison
from study.found import every_found
from study.storage import only, store


def test_finished_runs_are_condensed_and_kept(here: Path) -> None:
    """A second time without the runs: the condensed results stay as they are."""
    runs = experiments_of(load_matrix(), ["fig2"], "tiny", [1, 2, 3], ["gtpo-g8"])
    entries = []
    for run in runs:
        rows = [{"step": 1, "accuracy": 1.25, "filtered_fraction": 0.1 * run.seed}]
        fake_run(run.run.path, rows=rows, saved=["adapter"] if run.seed < 3 else [])
        graded = [{"n": 4, "c": run.seed, "correct": "0000"}, {"n": 4, "c": 0}]
        entry = {"adapter": str(run.run.adapter), "label": run.label, "benchmark": "arithmetic", "k": 4}
        entries.append(entry | {"problems": 2, "per_problem": graded, "settings": {}})
        write_json(run.run.environment, {"git_revision": f"revision {run.seed}", "platform": "linux", "cpu_count": 2})
    write_results(RUNS / "tiny" / "evaluation", *({**entry, "scores": {"pass": {"1": 50.0}}} for entry in entries))
    directory = Path("results/tiny")
    for _ in range(2):
        store(directory, RUNS / "tiny", runs, ["accuracy", "filtered_fraction"])
        stored = read_results([directory])
        kept = stored.metrics[["accuracy", "filtered_fraction"]].to_dict("index")
        assert kept == {  # the third run is not finished
            ("gtpo-g8", seed, 1): {"accuracy": 1.25, "filtered_fraction": 0.1 * seed} for seed in (1, 2)
        }
        assert stored.scored("gtpo-g8", "arithmetic")["pass@1"].to_dict() == {1: 50.0, 2: 50.0}
        assert read_json(directory / SCORES_FILE) == [  # from the counts pass@k can be computed again
            {
                "label": f"gtpo-g8-s{seed}",
                "adapter": str(runs[seed - 1].run.adapter),
                "benchmark": "arithmetic",
                "problems": 2,
                "k": 4,
                "scores": {"pass": {"1": 50.0}},
                "counts": [[4, seed], [4, 0]],
            }
            for seed in (1, 2)
        ]
        origins = read_json(directory / "origins.json")
        assert origins == {f"gtpo-g8-s{seed}": [f"revision {seed}", "linux", 2, None, ""] for seed in (1, 2)}
        shutil.rmtree(RUNS, ignore_errors=True)


def test_a_run_that_is_not_stored_enters_no_page(here: Path) -> None:
    Path("results").symlink_to(ROOT / "results")
    expected = every_found(stored_comparison("early"))[0].results.metrics.shape
    rows = [{"step": step, "accuracy": 100.0} for step in range(1, 21)]
    fake_run(Path("outputs/study/early/smol-early/grpo-3e-4-s741"), rows=rows, saved=["adapter"])
    fake_run(Path("outputs/study/early/smol-early/grpo-3e-4-s761"), rows=rows, saved=["adapter"])
    assert every_found(stored_comparison("early"))[0].results.metrics.shape == expected
    assert every_found(known_comparison("early"))[0].results.metrics.shape[0] == expected[0] + 20


def test_a_planned_comparison_is_stored_with_its_page(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished of its own seeds; a second time, without the runs, the same page."""
    planned = {"arms": ["grpo", "gtpo"], "steps": 8, "seeds": [1, 2, 3], "measures": ["accuracy late"]}
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", planned)
    place = Path("outputs/study/mine/wrong-mode")
    for name, seed in product(("grpo-0.3e-3", "gtpo-0.3e-3"), (1, 2, 3, 9)):
        rows = [{"step": step, "accuracy": 40.0 + seed * name.startswith("gtpo")} for step in range(1, 9)]
        fake_run(place / f"{name}-s{seed}", rows=rows, saved=["adapter"] if seed != 3 else [])
    pages = []
    for _ in range(2):
        assert sandbox.study("compare", "mine", "--store") == 0
        pages.append(Path("results/mine/comparison.md").read_text())
        shutil.rmtree("outputs", ignore_errors=True)
    assert pages[0] == pages[1] and "```bash\npython -m study compare mine\n```" in pages[0]
    assert "| accuracy late | 40.00 | 41.50 | +1.50 | 2 |" in pages[0]
    assert {seed for _, seed in read_results([Path("results/mine/wrong-mode")]).runs} == {1, 2}
    for words in (["mine", "--arms", "own.py:Own"], ["plain"], []):
        with refused("--store: results/ has a directory for each planned comparison: name one of missing_tags"):
            sandbox.study("compare", *words, "--store")


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """reproduce.py --seeds 21 22 23 leaves its runs and scores next to those of the matrix."""
    scored = {seed: {"scores": {"pass": {"1": float(seed)}}} for seed in (1, 2, 3)}
    metrics = {"sft": {seed: [{"step": seed}] for seed in scored}}
    found = results_of(metrics, {"sft": {"arithmetic": scored}, "base": {"arithmetic": {0: scored[1]}}})
    kept = only(found, [("sft", 1), ("sft", 3)])
    assert [*kept.runs] == [("sft", 1), ("sft", 3)]
    assert kept.scored("sft", "arithmetic")["pass@1"].to_dict() == {1: 1.0, 3: 3.0}
    assert len(kept.scored("base", "arithmetic")) == 1
