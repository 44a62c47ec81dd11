"""The claims: what they read, in which unit, and the verdict on their margins."""

from typing import Any

import pytest
from helpers.files import tables_of
from helpers.results import results_of
from paper_world import world

from paper.matrix import figure_names, find_figure, groups_of, load_matrix, runs_of
from study.claims import Claim, check, read_claims, verdict
from study.measures import Measure, SeedRuns

TABLES = tables_of(__file__)

MATRIX = load_matrix()
CLAIMS = read_claims()
EACH = [(figure, claim) for figure, of_figure in CLAIMS.items() for claim in of_figure]
each_claim = pytest.mark.parametrize(("figure", "claim"), EACH, ids=[claim.name for _, claim in EACH])


# Verdicts


@pytest.mark.parametrize(
    ("margins", "size", "expected"),
    TABLES["verdict"],
)
def test_verdict(margins: list[float], size: float | None, expected: str) -> None:
    assert verdict(margins, size) == expected


# Measures


def measured(values: list[float], *names: str) -> list[float]:
    """Statistics of a metric at steps 10, 20, ..., with trailing means of two."""
    rows = [{"step": 10 * i, "kl": value} for i, value in enumerate(values, start=1)]
    runs = SeedRuns(results_of({"a": {1: rows}}), 1, window=2)
    return [Measure("kl", name, ("a",)).value(runs) for name in names]


def test_measures_by_hand() -> None:
    values = [0.0, 4.0, 8.0, 6.0, 2.0, 4.0, 0.0, 2.0]  # quarters: 2, 7, 3, 1; trailing means: 0, 2, 6, 7, 4, 3, 2, 1
    assert measured(values, "early", "late", "mean", "highest", "fall") == [2.0, 1.0, 3.25, 7.0, 6.0]
    assert measured(values, "first_third", "last_third") == [2.0, 1.0]
    # half of 7 is reached at the third, (7 + 1) / 2 at the fifth
    assert measured(values, "rise_step", "fall_step") == [30, 50]
    assert measured([0.0, 4.0, 0.0, 8.0, 0.0, 0.0], "rise_step") == [20]  # trailing means: 0, 2, 2, 4, 4, 0


# Claims


STORED = {"grpo-late-w-reinforce"}  # its results and its claim stand; it is not run any more


@each_claim
def test_a_claim_reads_only_what_its_figure_makes(figure: str, claim: Claim) -> None:
    groups = groups_of(MATRIX, figure, "tiny")

    assert set(claim.runs) - STORED <= set(runs_of(MATRIX, [figure], "tiny"))
    for measure in claim.measures:
        for run in measure.runs if measure.benchmark else ():
            titles = [title for title, curves in groups.items() if run.removesuffix("@best") in curves.values()]
            made = [find_figure(MATRIX, figure)["benchmarks"][title] for title in titles]
            assert any(measure.benchmark in benchmarks for benchmarks in made)


def test_every_figure_has_claims_with_different_names() -> None:
    assert len({claim.name for _, claim in EACH}) == len({claim.claim for _, claim in EACH}) == len(EACH) == 77
    paper = {name for name in figure_names(MATRIX) if name[:3] in ("fig", "tab")}
    assert paper <= {*CLAIMS} <= {*figure_names(MATRIX)}


def claim_of(name: str) -> Claim:
    return next(claim for _, claim in EACH if claim.name == name)


@each_claim
def test_in_the_world_of_the_paper_every_claim_holds(figure: str, claim: Claim) -> None:
    checked = check(claim, world(), [1, 2, 3, 4, 5, 6], window=1)
    assert checked["mean"] > checked["half_width"] and checked["verdict"] in ("holds", "not counted")


def test_what_is_not_counted() -> None:
    """Accuracies at the floor, runs that are equal step by step (parts of one run are not), and what a row names."""
    accuracy = claim_of("fig3_entropy_control_repairs_accuracy")
    low, high = (
        {"gtpo-late-g8": {"accuracy": a}, "gtpo-late-correction-only": {"accuracy": b}} for a, b in ((4, 1), (6, 1))
    )
    assert check_of(accuracy, low)["why"] == "both below 5 %" and check_of(accuracy, high)["why"] == ""
    entropy = claim_of("fig4c_negative_filter_lowers_entropy")
    runs = {name: {"entropy": 1.0} for name in ("gtpo-no-filter", "gtpo-onlyneg1.05", "gtpo-onlyneg2.0")}
    equal = runs | {"gtpo-onlyneg0.7": {"entropy": 0.5}}
    assert check_of(entropy, equal)["why"] == "most of the runs are equal"
    assert check_of(entropy, equal | {"gtpo-onlyneg1.05": {"entropy": 0.9}})["why"] == ""
    assert check_of(claim_of("fig5a_kl_raises_entropy"), {"grpo-g8-beta0.04": {"entropy": 1.0}})["why"] == ""
    stable = claim_of("fig2_stable_grpo_does_not_collapse")
    assert check_of(stable, {name: {"formatting": 1.0} for name in stable.runs})["why"] == "by construction"


def check_of(claim: Claim, values: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The claim on three equal seeds of runs that have a value in the last quarter, and 0 before."""
    metrics = {
        name: {
            seed: [
                {"step": step} | {key: value * (step == 4) for key, value in logged.items()} for step in (1, 2, 3, 4)
            ]
            for seed in (1, 2, 3)
        }
        for name, logged in values.items()
    }
    return check(claim, results_of(metrics), [1, 2, 3], window=1)
