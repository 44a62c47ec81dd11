"""The claims: what they read, in which unit, and the verdict on their margins."""

import math
from typing import Any

import pytest
from helpers.results import results_of
from pandas import Series
from paper_world import world

from gtpo.paper.matrix import figure_names, find_figure, groups_of, load_matrix, runs_of
from gtpo.paper.results import Results
from study.claims import Claim, read_claims, run_of
from study.measures import Measure, SeedRuns, quarters
from study.verdicts import SIZES, check, verdict

MATRIX, ALL_CLAIMS = load_matrix(), read_claims()
CLAIMS = {figure: claims for figure, claims in ALL_CLAIMS.items() if figure != "smol"}
early, late, mean, highest, fall, rise_step, fall_step = (
    lambda metric, *runs, name=name: Measure(metric, name, runs)
    for name in ("early", "late", "mean", "highest", "fall", "rise_step", "fall_step")
)
EACH = [(figure, claim) for figure, of_figure in CLAIMS.items() for claim in of_figure]
each_claim = pytest.mark.parametrize(("figure", "claim"), EACH, ids=[claim.name for _, claim in EACH])


# Verdicts


@pytest.mark.parametrize(
    ("margins", "size", "expected"),
    [  # t = 4.303 with three seeds: half width of 1, 2, 3 is 4.303 / sqrt(3) = 2.484
        ([9.0, 10.0, 11.0], 5.0, "holds"),  # 7.516 to 12.484
        ([2.485, 3.485, 1.485], 5.0, "holds"),  # 0.001 to 4.969: above 0, and small
        ([2.485, 3.485, 1.485], None, "holds"),
        ([2.483, 3.483, 1.483], 4.9, "undecided"),  # -0.001 to 4.967
        ([2.483, 3.483, 1.483], None, "undecided"),
        ([-2.485, -3.485, -1.485], 4.9, "does not hold"),
        ([-1.0, 0.0, 1.0], 2.485, "no large difference"),  # -2.484 to 2.484
        ([-1.0, 0.0, 1.0], 2.483, "undecided"),
        ([-1.0, 0.0, 1.0], None, "undecided"),
        ([0.0, 0.0, 0.0], 5.0, "no large difference"),  # runs that are identical
        ([-10.0, -10.0, -10.0], None, "does not hold"),
        ([9.0, 10.0], 5.0, "too few seeds"),
        ([], 5.0, "not run"),
    ],
)
def test_verdict(margins: list[float], size: float | None, expected: str) -> None:
    assert verdict(margins, size) == expected


# Measures


def results(**runs: list[float]) -> Results:
    rows = {name.replace("_", "-"): {1: [{"step": 10 * i, "kl": v} for i, v in enumerate(values, start=1)]}
            for name, values in runs.items()}  # fmt: skip
    return results_of(rows)


def test_measures_by_hand() -> None:
    runs = SeedRuns(results(a=[0.0, 4.0, 8.0, 6.0, 2.0, 4.0, 0.0, 2.0]), 1, window=2)
    measured = [measure("kl", "a").value(runs) for measure in (early, late, mean, highest, fall)]
    assert measured == [2.0, 1.0, 3.25, 7.0, 6.0]  # quarters: 2, 7, 3, 1; trailing means: 0, 2, 6, 7, 4, 3, 2, 1
    # half of 7 is reached at the third, (7 + 1) / 2 at the fifth
    assert rise_step("kl", "a").value(runs) == 30 and fall_step("kl", "a").value(runs) == 50
    noisy = SeedRuns(results(a=[0.0, 4.0, 0.0, 8.0, 0.0, 0.0]), 1, window=2)  # trailing means: 0, 2, 2, 4, 4, 0
    assert rise_step("kl", "a").value(noisy) == 20


def test_first_value_before_the_window_is_full_is_no_peak() -> None:
    runs = SeedRuns(results(a=[9.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0]), 1, window=3)
    assert highest("kl", "a").value(runs) == 3.0 and fall("kl", "a").value(runs) == 3.0  # the last quarter, 0
    assert fall_step("kl", "a").value(runs) == 40  # trailing means from the third on: 3, 4/3, 8/3, 8/3, 4/3


def test_several_runs_are_their_mean() -> None:
    runs = SeedRuns(results(a=[1.0] * 4, b=[4.0, 4.0, 4.0, 2.0]), 1, window=1)
    assert late("kl", "a", "b").value(runs) == 1.5 and fall("kl", "a", "b").value(runs) == 1.0
    assert late("kl", "a").value(runs) == 1.0


def test_quarters() -> None:
    assert quarters(Series(range(8))) == [0.5, 2.5, 4.5, 6.5]
    assert quarters(Series([1.0, 2.0, 4.0, 8.0, 8.0])) == [1.0, 2.0, 6.0, 8.0]  # bounds 0, 1, 2, 4, 5
    assert quarters(Series([3.0, 1.0])) == [3.0, 1.0] and quarters(Series([3.0])) == [3.0]


def test_first_and_last_third() -> None:
    runs = SeedRuns(results(a=[1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 0.2]), 1, window=1)
    assert Measure("kl", "first_third", ("a",)).value(runs) == 2.0
    assert Measure("kl", "last_third", ("a",)).value(runs) == pytest.approx(4.6)  # 9 and 0.2


def test_scores_are_those_of_the_benchmark() -> None:
    tables = {
        "arithmetic": {"pass": {"32": 90.0}, "pass_lenient": {"1": 50.0}},
        "arithmetic_hard": {"maj": {"64": 5.0}},
    }
    scores = {"a": {name: {7: {"scores": table}} for name, table in tables.items()}}
    runs = SeedRuns(results_of({}, scores), 7, window=1)
    assert Measure("pass@32", "arithmetic", ("a",)).value(runs) == 90.0
    assert Measure("pass_lenient@1", "arithmetic", ("a",)).value(runs) == 50.0
    assert Measure("maj@64", "arithmetic_hard", ("a",)).value(runs) == 5.0
    with pytest.raises(KeyError):
        Measure("pass@64", "arithmetic_hard", ("a",)).value(runs)


# Claims


STORED = {"grpo-late-w-reinforce"}  # its results and its claim stand; it is not run any more


def synthetic(seeds: int = 10) -> Results:
    """Every run and evaluation of the matrix; run i is i above the first in everything, and seeds shift all alike."""
    names = [*runs_of(MATRIX, [*CLAIMS], "tiny"), *STORED]
    metrics = (
        "accuracy",
        "formatting",
        "entropy",
        "kl",
        "conflict_tokens",
        "conflict_push",
    )
    logged = {
        name: {
            seed: [{"step": step} | dict.fromkeys(metrics, i + seed * step) for step in range(1, 9)]
            for seed in range(1, seeds + 1)
        }
        for i, name in enumerate(names)
    }
    ks = [str(2**i) for i in range(7)]
    scores = {
        scored: {
            benchmark: {
                seed: {"scores": {kind: dict.fromkeys(ks, float(i + seed)) for kind in ("pass", "maj", "pass_lenient")}}
                for seed in range(1, seeds + 1)
            }
            for benchmark in ("arithmetic", "arithmetic_hard")
        }
        for i, name in enumerate(names)
        for scored in (name, f"{name}@best")
    }
    return results_of(logged, scores)


@each_claim
def test_a_claim_reads_only_what_its_figure_makes(figure: str, claim: Claim) -> None:
    groups = groups_of(MATRIX, figure, "tiny")

    assert set(claim.runs) - STORED <= set(runs_of(MATRIX, [figure], "tiny"))
    for measure in claim.measures:
        for run in measure.runs if measure.benchmark else ():
            titles = [title for title, curves in groups.items() if run_of(run) in curves.values()]
            made = [find_figure(MATRIX, figure)["benchmarks"][title] for title in titles]
            assert any(measure.benchmark in benchmarks for benchmarks in made)


@each_claim
def test_a_claim_is_measured_and_named(figure: str, claim: Claim) -> None:
    checked = check(claim, synthetic(), range(1, 12), window=2)
    assert list(checked["margins"]) == [str(seed) for seed in range(1, 11)]  # no seed 11
    assert checked["verdict"] in ("holds", "does not hold", "no large difference", "undecided", "not counted")
    assert (checked["verdict"] == "not counted") == bool(checked["why"])
    assert checked["difference"] == pytest.approx(checked["mean"] - claim.allowed)
    assert checked["size"] == (SIZES[checked["unit"]] if claim.compares_runs else None)
    assert (checked["threshold"] is None) == (claim.measured_side is None) == (checked["value"] is None)
    if claim.measured_side is not None:
        above = -1 if claim.measured_side else 1  # the margin of "less than 10" is 10 minus the value
        assert checked["value"] == pytest.approx(checked["threshold"] + above * checked["mean"], abs=1e-3)
    assert claim.name.startswith(f"{figure}_") and checked["claim"].endswith(".") and "\n" not in checked["claim"]


def test_every_figure_has_claims_with_different_names() -> None:
    assert len({claim.name for _, claim in EACH}) == len({claim.sentence for _, claim in EACH}) == len(EACH) == 77
    paper = {name for name in figure_names(MATRIX) if name[:3] in ("fig", "tab")}
    assert paper <= {*CLAIMS} <= {*figure_names(MATRIX)}


def test_claims_about_a_threshold() -> None:
    """They have no verdict "no difference"; the margin of each where every measure of every run is 0."""
    margins = {claim.name: claim.margin(constant(0.0)) for _, claim in EACH if not claim.compares_runs}
    assert margins == {
        "fig1_formatting_falls": -10,
        "fig1_formatting_falls_with_kl": -10,
        "fig2_stable_accuracy": 5,
        "fig2_stable_formatting": 5,
        "fig2_stable_grpo_does_not_collapse": 10,
        "fig3_correction_alone_degrades_in_accuracy": -10,
        "fig3_correction_alone_degrades_in_formatting": -10,
        "fig4a_entropy_rises_without_filter": -math.log(2),
        "fig4a_entropy_stays_low_with_filter": math.log(2),
        "fig4d_grpo_loses_formatting": -10,
        "fig4d_grpo_loses_accuracy": -10,
        "fig4d_grpo_entropy_spikes": -math.log(2),
        "baselines_grpo_pushes_conflict_tokens_down": 0,
    }
    assert claim_of("baselines_grpo_pushes_conflict_tokens_down").margin(constant(1.0)) == -1000
    assert {claim.name for _, claim in EACH if claim.measured_side is None and not claim.compares_runs} == {
        "fig2_stable_accuracy",
        "fig2_stable_formatting",
    }
    assert all(claim.margin(constant(1.0)) == 0 for _, claim in EACH if claim.compares_runs)


def test_the_unit_is_that_of_what_is_measured() -> None:
    units = {"entropy": "nats", "conflict_tokens": "tokens", "conflict_push": "10⁻³", "kl": "steps"}  # KL: its step
    for _, claim in EACH:
        assert claim.unit == next((units[m.name] for m in claim.measures if m.name in units), "points"), claim.name


def claim_of(name: str) -> Claim:
    return next(claim for _, claim in EACH if claim.name == name)


def constant(value: float) -> SeedRuns:
    """Every run of the matrix with one value of all metrics and scores."""

    class Constant(SeedRuns):
        def curve(self, name: str, metric: str) -> Series:
            return Series([value] * 4, index=[1, 2, 3, 4])

        def score(self, name: str, benchmark: str, score: str) -> float:
            return value

    return Constant(results_of({}), 1, window=1)


def with_late(**values: dict[str, float]) -> SeedRuns:
    """Runs with one value in the first three quarters, 0, and one in the last."""
    metrics: dict[str, Any] = {}
    for name, logged in values.items():
        metrics[name.replace("_", "-")] = {
            1: [{"step": step} | {key: value * (step == 4) for key, value in logged.items()} for step in (1, 2, 3, 4)]
        }
    return SeedRuns(results_of(metrics), 1, window=1)


def test_the_sign_of_a_claim_is_that_of_the_paper() -> None:
    """GTPO ends 30 above GRPO with G = 8 and 10 above with 12: 20 points."""
    runs = with_late(**{
        "gtpo-late-g8": {"accuracy": 80.0},
        "gtpo-late-g12": {"accuracy": 90.0},
        "grpo-late-g8-beta0": {"accuracy": 40.0},
        "grpo-late-g8-beta1e-6": {"accuracy": 60.0},
        "grpo-late-g12-beta0": {"accuracy": 80.0},
    })  # fmt: skip
    assert claim_of("fig2_late_accuracy").margin(runs) == 20.0


def test_grpo_is_the_mean_over_both_betas() -> None:
    """60 and 80 without KL, 55 with it: 15 points; the claim about accuracy reads other values."""
    runs = with_late(**{
        "grpo-g8-beta0": {"formatting": 60.0, "accuracy": 1.0},
        "grpo-g8-beta1e-6": {"formatting": 80.0, "accuracy": 4.0},
        "grpo-g8-beta0.04": {"formatting": 55.0, "accuracy": 0.5},
    })  # fmt: skip
    assert claim_of("fig5a_kl_costs_formatting").margin(runs) == 15.0
    assert claim_of("fig5a_kl_costs_accuracy").margin(runs) == 2.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # the mean over G = 8 and 12 of GTPO minus the mean over both betas
        ("fig2_stable_pass_1", 2.0),  # 12 - (10 + 11) / 2 and 14 - (9 + 14) / 2
        ("fig2_stable_pass_32", 20.0),
        ("fig2_stable_maj_32", 200.0),
        ("fig2_stable_lenient_pass_1", 2000.0),
    ],
)
def test_each_claim_about_scores_reads_its_own(name: str, expected: float) -> None:
    """The four scores of a run differ by factors of ten."""
    ones = {"gtpo-g8": 12, "gtpo-g12": 14, "grpo-g8-beta0": 10, "grpo-g8-beta1e-6": 11, "grpo-g12-beta0": 9}
    scores: dict[str, Any] = {}
    for run, one in (ones | {"grpo-g12-beta1e-6": 14}).items():
        table = {"pass": {"1": one, "32": 10 * one}, "maj": {"32": 100 * one}, "pass_lenient": {"1": 1000 * one}}
        scores[run] = {"arithmetic": {1: {"scores": table}}}
    assert claim_of(name).margin(SeedRuns(results_of({}, scores), 1, window=1)) == expected


@each_claim
def test_in_the_world_of_the_paper_every_claim_holds(figure: str, claim: Claim) -> None:
    checked = check(claim, world(), [1, 2, 3], window=1)
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


def test_a_seed_that_lacks_a_run_is_left_out() -> None:
    found = synthetic()
    found = Results(found.metrics.drop(index=("grpo-late-w-reinforce", 3)), found.scores)
    checked = check(claim_of("baselines_w_reinforce_keeps_entropy"), found, [1, 2, 3, 4, 5], window=1)
    assert list(checked["margins"]) == ["1", "2", "4", "5"] and checked["verdict"] == "holds"
    assert set(checked["margins"].values()) == {checked["mean"]} and checked["half_width"] == 0
