"""The claims language, the page and the README's tables, and the stored results behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gtpo.files import CONFIGS
from gtpo.paper.claims import (
    DIRECTORY,
    METRICS,
    PAGE,
    README,
    TEMPLATE,
    Curve,
    check_claim,
    fill,
    measure,
    readme_tables,
    render,
    summarize,
    unit_of,
    verdict,
    write_page,
)
from gtpo.paper.matrix import figure_names, load_matrix, runs_of
from gtpo.paper.results import Results, read_results

ROOT = CONFIGS.parent
MATRIX = load_matrix()
ALL = figure_names(MATRIX)
TINY_RUNS = runs_of(MATRIX, ALL, "tiny")


@pytest.mark.parametrize(
    ("margins", "met", "expected"),
    [
        ([3.0, 2.0, 1.0], True, "holds"),
        ([6.0, 3.0, -0.1], True, "cannot be seen at this scale"),  # one seed contradicts
        ([1.9, 1.9, 1.9], True, "cannot be seen at this scale"),  # too small
        ([-1.9, -1.9, -1.9], True, "cannot be seen at this scale"),
        ([-3.0, -2.0, -1.0], True, "does not hold"),
        ([-9.0, 1.0, -1.0], True, "cannot be seen at this scale"),
        ([3.0, 3.0, 3.0], False, "cannot be seen at this scale"),
        ([], True, "not run"),
    ],
)
def test_verdict(margins: list[float], met: bool, expected: str) -> None:
    assert verdict(margins, 2.0, met) == expected


def test_measures_by_hand() -> None:
    raw = [0.0, 4.0, 8.0, 6.0, 2.0, 4.0]  # window 2: 0, 2, 6, 7, 4, 3
    smoothed = [0.0, 2.0, 6.0, 7.0, 4.0, 3.0]
    curve = Curve([10, 20, 30, 40, 50, 60], raw, smoothed, 2)
    measured = {kind: curve.measure(kind) for kind in ("start", "end", "highest", "early", "late", "mean", "fall")}
    assert measured == {"start": 2.0, "end": 3.0, "highest": 7.0, "early": 2.0, "late": 3.0, "mean": 4.0, "fall": 4.0}
    assert curve.measure("half step") == 30  # 6 is the first value of at least 3.5
    assert curve.measure("fall step") == 50  # from 7 to 3: 4 is the first value of at most 5
    with pytest.raises(ValueError, match="kind 'middle' is unknown"):
        curve.measure("middle")


def small_results() -> Results:
    metrics = {
        "a": {seed: [{"step": step, "accuracy": 10.0 * seed + step} for step in range(3)] for seed in (1, 2)},
        "b": {1: [{"step": step, "accuracy": 5.0} for step in range(3)]},
    }
    scores = {"a": {"arithmetic": {1: {"scores": {"maj": {"8": 70.0}}}}}}
    return Results(metrics, scores)


def test_claim_is_measured_for_each_seed() -> None:
    results = small_results()
    assert measure(results, "end of accuracy in a", 1, 1) == 12.0
    assert measure(results, "end of accuracy in b, a", 1, 1) == 12.0
    assert measure(results, "maj@8 of arithmetic in a", 1, 1) == 70.0
    assert measure(results, 10, 1, 1) == 10.0
    with pytest.raises(ValueError, match="'accuracy of a' is not a measure: expected `KIND of METRIC in RUN, RUN`"):
        measure(results, "accuracy of a", 1, 1)
    claim = {"figure": "f", "claim": "c", "more": "end of accuracy in a", "less": "end of accuracy in b"}
    checked = check_claim(claim, results, [1, 2, 3], 1, {"points": 2.0})
    assert checked["margins"] == {"1": 7.0} and checked["verdict"] == "holds"  # seeds 2 and 3 lack a run
    needs = claim | {"needs": "end of accuracy in a > 12"}
    assert check_claim(needs, results, [1], 1, {"points": 2.0})["verdict"] == "cannot be seen at this scale"
    no_run = claim | {"more": "end of accuracy in c"}
    assert check_claim(no_run, results, [1], 1, {"points": 2.0})["verdict"] == "not run"


FULL = [{"step": s} | dict.fromkeys((*METRICS, "step_time"), float(s)) for s in range(1, 7)]
BENCHMARKS = {
    name: {1: {"scores": {score: {str(2**i): 1.0 for i in range(7)} for score in ("pass", "maj")}}}
    for name in ("arithmetic", "arithmetic_hard")
}


def test_claims_name_runs_and_figures_of_the_matrix() -> None:
    rules = yaml.safe_load((CONFIGS / "claims.yaml").read_text())
    results = Results({name: {1: FULL} for name in TINY_RUNS}, dict.fromkeys(TINY_RUNS, BENCHMARKS))
    for claim in rules["claims"]:
        checked = check_claim(claim, results, [1], 2, rules["least"])
        assert list(checked["margins"]) == ["1"], claim
        shown = set(runs_of(MATRIX, [claim["figure"]], "tiny"))
        for side in ("more", "less"):
            if isinstance(claim[side], str):
                assert set(claim[side].partition(" in ")[2].split(", ")) <= shown, claim
    assert {claim["figure"] for claim in rules["claims"]} == {
        *(name for name in ALL if name[:3] in ("fig", "tab")),
        "fast",
    }


@pytest.mark.parametrize(
    ("expression", "unit"),
    [
        ("end of accuracy in a", "points"),
        ("late of entropy in a", "nats"),
        ("half step of kl in a", "steps"),
        ("mean of conflict_tokens in a", "tokens"),
        ("pass@64 of arithmetic_hard in a, b", "points"),
    ],
)
def test_units(expression: str, unit: str) -> None:
    assert unit_of(expression) == unit


# The page


def test_page_of_a_few_runs(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Condensed, checked and rendered from a few runs; a second time from the condensed results alone."""
    (sandbox / "docs").mkdir()
    (sandbox / TEMPLATE).write_text((ROOT / TEMPLATE).read_text())
    README.write_text("<!-- paper scale -->\n<!-- end -->\nbetween\n<!-- tiny scale -->\nold\n<!-- end -->\n")
    assert sandbox.reproduce("fig2", "--seeds", "1", "2") == 0
    capsys.readouterr()
    assert sandbox.reproduce("--page") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.is_file() for path in written) and {PAGE, README, DIRECTORY / "summary.json"} <= set(written)
    first = PAGE.read_text()
    stored = read_results([DIRECTORY])
    found = read_results([Path("outputs")])
    assert stored.metrics == found.metrics
    assert stored.scores["gtpo-g8"]["arithmetic"][2]["scores"] == found.scores["gtpo-g8"]["arithmetic"][2]["scores"]
    (sandbox / "outputs").rename(sandbox / "gone")
    write_page(MATRIX)
    assert PAGE.read_text() == first
    assert "GTPO trains to higher accuracy than GRPO, G = 8." in first and "not run" in first
    readme = README.read_text()
    assert "| LLaMA, GSM8K | GTPO | - / 30.0 | - / 13.3 | - / 80.0 | - / 42.5 |" in readme  # Table 1, k = 64
    assert "between" in readme and "old" not in readme and readme.count("<!-- end -->") == 2


def test_readme_table_has_mean_and_range_over_seeds() -> None:
    def entries(value: float) -> dict[str, dict[int, dict[str, Any]]]:
        scores = [{str(2**i): value + add for i in range(7)} for add in (0.0, 3.0)]
        seeds = {seed: {"scores": {"pass": table, "maj": table}} for seed, table in enumerate(scores)}
        return dict.fromkeys(("arithmetic", "arithmetic_hard"), seeds)

    scores = {"gtpo-g8": entries(10.0), "gtpo-g12": entries(20.0), "sft": entries(5.0)}
    table = readme_tables(MATRIX, Results({}, scores))["tiny scale"].splitlines()
    assert table[2:] == [
        "| SFT (sft) |" + " 6.5 (5.0 - 8.0) |" * 6,
        "| GRPO (not run) |" + " - |" * 6,
        "| GTPO (gtpo-g12) |" + " 21.5 (20.0 - 23.0) |" * 6,
    ]


def test_fill_needs_both_comments() -> None:
    assert fill("a\n<!-- x -->\nold\n<!-- end -->b", "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end -->b"
    with pytest.raises(ValueError, match="no `<!-- y -->`"):
        fill("a\n<!-- x -->\n<!-- end -->", "y", "new")
    with pytest.raises(ValueError, match="followed by `<!-- end -->`"):
        fill("a\n<!-- end -->\n<!-- x -->\n", "x", "new")


# The stored results


def test_page_has_the_numbers_of_the_stored_results() -> None:
    results = read_results([ROOT / DIRECTORY])
    summary = json.loads((ROOT / DIRECTORY / "summary.json").read_text())
    assert summarize(MATRIX, results) == summary
    assert render(summary, (ROOT / TEMPLATE).read_text()) == (ROOT / PAGE).read_text()
    readme = (ROOT / README).read_text()
    for name, table in readme_tables(MATRIX, results).items():
        assert fill(readme, name, table) == readme


def test_stored_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / DIRECTORY).iterdir()) < 3e6
