"""docs/objectives.md, from stored runs: the differences, what is decided, and which objectives are GRPO or DAPO."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers.results import results_of
from helpers.scripts import ROOT

from study import objectives
from study.bench import Comparison, known_comparison
from study.objectives import FIGURE, PAGE, write_objectives
from study.storage import condense

ACCURACY = {1: (60.0,), 3: (40.0, 60.0, 50.0)}  # of each rate
GAINS = {"gdpo": 3.0, "gspo": -2.0}  # points over GRPO, of every seed but for the noise


def store_runs(comparison: Comparison) -> None:
    """One rate, or three of which the second trains best, and the scores of its runs."""
    for base in comparison.bases:
        metrics: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for arm in comparison.arms:
            for rate, accuracy in zip(comparison.rates, ACCURACY[len(comparison.rates)], strict=True):
                row = {"step": 1, "accuracy": accuracy, "formatting": 90.0, "entropy": 0.4, "step_time": 0.1}
                seeds = comparison.rate_seeds + comparison.seeds * (accuracy == 60)
                metrics[arm.run_name(rate)] = {seed: [row] for seed in seeds}
            gain = GAINS.get(arm.name, 0.0)
            noise = {seed: (seed % 2 - 0.5) * (arm.name != "grpo") for seed in comparison.seeds}
            scored = {seed: {"scores": {"pass": {"1": 70 + gain + noise[seed]}}} for seed in comparison.seeds}
            scores[arm.run_name("0.3e-3")] = {"arithmetic": scored, "arithmetic_greedy": scored}
        columns = ["accuracy", "formatting", "entropy", "step_time"]
        condense(results_of(metrics, scores), comparison.stored(base), columns)


@pytest.mark.slow
def test_the_page_of_the_objectives(here: Path) -> None:
    Path("results").mkdir()
    PAGE.parent.mkdir()
    store_runs(known_comparison("objectives"))
    store_runs(known_comparison("objectives_one_rate"))
    assert write_objectives() == [] and not PAGE.exists()  # one of the three comparisons is missing
    store_runs(known_comparison("objectives_off_policy"))
    assert write_objectives() == [PAGE, FIGURE] and FIGURE.stat().st_size > 10_000
    lines = PAGE.read_text().splitlines()
    assert fmean(seed % 2 - 0.5 for seed in known_comparison("objectives").seeds) == 0
    (decided,) = (line for line in PAGE.read_text().split("\n\n") if line.startswith("**Decided**"))
    assert " ".join(decided.split()).endswith(
        "one update, wrong-mode: GDPO higher; one update, missing-50: GDPO higher; "
        "one update at 0.3e-3, wrong-mode: GDPO higher; one update at 0.3e-3, missing-50: GDPO higher; "
        "four updates, wrong-mode: GSPO lower, GDPO higher."
    )
    table = {line.split("|")[1].strip().split("]")[0].strip("["): line for line in lines if line.count("|") == 8}
    assert table["GDPO"].endswith(f"{' | **+3.00 ± 0.24**' * 5} | learns several rewards better |")
    assert f"{'| = GRPO ' * 4}| **-2.00 ± 0.24** |" in table["GSPO"]
    assert f"{'| = DAPO ' * 4}| +0.00 ± 0.24 |" in table["CISPO"]
    assert "the largest difference is 3.0 points (GDPO). GRPO solves 70.0 and 70.0 % there" in " ".join(lines)
    assert table["correction on tags"].endswith("| +0.00 ± 0.24 | |")
    (measured,) = (line for line in lines if line.startswith("| GDPO | 20 |"))
    assert measured.startswith("| GDPO | 20 | 73.00 (+3.00 ± 0.24) | 73.00 (+3.00 ± 0.24) | 90.00 (+0.00 ± 0.00) |")


@pytest.mark.slow
def test_the_stored_page_is_that_of_the_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(objectives, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(objectives, "FIGURE", tmp_path / "figure.png")
    page, _ = write_objectives()
    assert page.read_text() == (ROOT / PAGE).read_text()
