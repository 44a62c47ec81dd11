"""The claims: what they read, in which unit, and the verdict on their margins."""

import inspect
import math
from typing import Any

import pytest
from paper_world import world

from gtpo.paper import claims as module
from gtpo.paper.claims import CLAIMS, Claim
from gtpo.paper.matrix import figure_names, find_figure, groups_of, load_matrix, runs_of
from gtpo.paper.measures import Recorder, Runs, quarters
from gtpo.paper.results import Results
from gtpo.paper.verdicts import SIZES, check, compares_runs, read_by, unit_of, verdict

MATRIX = load_matrix()
EACH = [(figure, claim) for figure, of_figure in CLAIMS.items() for claim in of_figure]
each_claim = pytest.mark.parametrize(("figure", "claim"), EACH, ids=[claim.__name__ for _, claim in EACH])


# Verdicts


@pytest.mark.parametrize(
    ("margins", "size", "expected"),
    [  # t = 4.303 with three seeds: half width of 1, 2, 3 is 4.303 / sqrt(3) = 2.484
        ([9.0, 10.0, 11.0], 5.0, "holds"),  # 7.516 to 12.484
        ([2.485, 3.485, 1.485], 5.0, "no difference"),  # 0.001 to 4.969: above 0, and too small
        ([2.485, 3.485, 1.485], 4.9, "holds"),
        ([2.485, 3.485, 1.485], None, "holds"),
        ([2.483, 3.483, 1.483], 4.9, "undecided"),  # -0.001 to 4.967
        ([2.483, 3.483, 1.483], None, "undecided"),
        ([-2.485, -3.485, -1.485], 4.9, "does not hold"),
        ([-2.485, -3.485, -1.485], 5.0, "no difference"),
        ([-1.0, 0.0, 1.0], 2.485, "no difference"),  # -2.484 to 2.484
        ([-1.0, 0.0, 1.0], 2.483, "undecided"),
        ([-1.0, 0.0, 1.0], None, "undecided"),
        ([0.0, 0.0, 0.0], 5.0, "no difference"),  # runs that are identical
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
    return Results(rows, {})


def test_measures_by_hand() -> None:
    run = Runs(results(a=[0.0, 4.0, 8.0, 6.0, 2.0, 4.0, 0.0, 2.0]), 1, window=2)("a")
    measured = [run.early("kl"), run.late("kl"), run.mean("kl"), run.highest("kl"), run.fall("kl")]
    assert measured == [2.0, 1.0, 3.25, 7.0, 6.0]  # quarters: 2, 7, 3, 1; trailing means: 0, 2, 6, 7, 4, 3, 2, 1
    # half of 7 is reached at the third, (7 + 1) / 2 at the fifth
    assert run.rise_step("kl") == 30 and run.fall_step("kl") == 50
    noisy = Runs(results(a=[0.0, 4.0, 0.0, 8.0, 0.0, 0.0]), 1, window=2)("a")  # trailing means: 0, 2, 2, 4, 4, 0
    assert noisy.rise_step("kl") == 20


def test_first_value_before_the_window_is_full_is_no_peak() -> None:
    run = Runs(results(a=[9.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0]), 1, window=3)("a")
    assert run.highest("kl") == 3.0 and run.fall("kl") == 3.0  # the last quarter, 0
    assert run.fall_step("kl") == 40  # trailing means from the third on: 3, 4/3, 8/3, 8/3, 4/3


def test_several_runs_are_their_mean() -> None:
    runs = Runs(results(a=[1.0] * 4, b=[4.0, 4.0, 4.0, 2.0]), 1, window=1)
    assert runs("a", "b").late("kl") == 1.5 and runs("a", "b").fall("kl") == 1.0
    assert runs("a").late("kl") == 1.0


def test_quarters() -> None:
    assert quarters([float(i) for i in range(8)]) == [0.5, 2.5, 4.5, 6.5]
    assert quarters([1.0, 2.0, 4.0, 8.0, 8.0]) == [1.0, 2.0, 6.0, 8.0]  # bounds 0, 1, 2, 4, 5
    assert quarters([3.0, 1.0]) == [3.0, 1.0] and quarters([3.0]) == [3.0]


def test_scores_are_those_of_the_benchmark() -> None:
    tables = {
        "arithmetic": {"pass": {"32": 90.0}, "pass_lenient": {"1": 50.0}},
        "arithmetic_hard": {"maj": {"64": 5.0}},
    }
    runs = Runs(Results({}, {"a": {name: {7: {"scores": table}} for name, table in tables.items()}}), 7, window=1)
    assert runs("a").held_out("pass@32") == 90.0 and runs("a").held_out("pass_lenient@1") == 50.0
    assert runs("a").harder("maj@64") == 5.0
    with pytest.raises(KeyError):
        runs("a").harder("pass@64")


# Claims


def synthetic(seeds: int = 10) -> Results:
    """Every run and evaluation of the matrix; run i is i above the first in everything, and seeds shift all alike."""
    names = runs_of(MATRIX, [*CLAIMS], "tiny")
    metrics = (
        "accuracy",
        "formatting",
        "entropy",
        "kl",
        "conflict_tokens",
        "conflict_push",
        "rewards/word_reward/mean",
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
        name: {
            benchmark: {
                seed: {"scores": {kind: dict.fromkeys(ks, float(i + seed)) for kind in ("pass", "maj", "pass_lenient")}}
                for seed in range(1, seeds + 1)
            }
            for benchmark in ("arithmetic", "arithmetic_hard")
        }
        for i, name in enumerate(names)
    }
    return Results(logged, scores)  # type: ignore[arg-type]


@each_claim
def test_a_claim_reads_only_what_its_figure_makes(figure: str, claim: Claim) -> None:
    read = read_by(claim)
    groups = groups_of(MATRIX, figure, "tiny")
    assert {*read.metrics, *read.benchmarks} <= set(runs_of(MATRIX, [figure], "tiny"))
    for run, benchmarks in read.benchmarks.items():
        made = {
            benchmark
            for title, curves in groups.items()
            if run in curves.values()
            for benchmark in find_figure(MATRIX, figure)["benchmarks"][title]
        }
        assert benchmarks <= made


@each_claim
def test_a_claim_is_measured_and_named(figure: str, claim: Claim) -> None:
    checked = check(claim, synthetic(), range(1, 12), window=2)
    assert list(checked["margins"]) == [str(seed) for seed in range(1, 11)]  # no seed 11
    assert checked["verdict"] in ("holds", "does not hold", "no difference", "undecided")
    assert checked["size"] == (SIZES[checked["unit"]] if compares_runs(claim) else None)
    assert claim.__name__.startswith(f"{figure}_") and checked["claim"].endswith(".") and "\n" not in checked["claim"]


def test_every_function_is_listed_once() -> None:
    functions = [
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and list(inspect.signature(function).parameters) == ["runs"]
    ]
    assert sorted(claim.__name__ for _, claim in EACH) == sorted(function.__name__ for function in functions)
    paper = {name for name in figure_names(MATRIX) if name[:3] in ("fig", "tab")}
    assert len(EACH) == 78 and paper <= {*CLAIMS} <= {*figure_names(MATRIX)}


def test_claims_about_a_threshold() -> None:
    """They have no verdict "no difference"; found because their margin is not 0 where all runs are alike, 1."""
    margins = {claim.__name__: claim(Recorder()) for _, claim in EACH if not compares_runs(claim)}
    assert margins == {
        "fig1_formatting_falls": -10,
        "fig1_formatting_falls_with_kl": -10,
        "fig2_stable_accuracy": 5,
        "fig2_stable_formatting": 5,
        "fig2_stable_grpo_does_not_collapse": 10,
        "fig3_correction_alone_degrades_in_accuracy": -10,
        "fig3_correction_alone_degrades_in_formatting": -10,
        "fig4a_entropy_rises_without_filter": 1 - math.log(2),
        "fig4a_entropy_stays_low_with_filter": math.log(2) - 1,
        "fig4d_grpo_loses_formatting": -10,
        "fig4d_grpo_loses_accuracy": -10,
        "fig4d_grpo_entropy_spikes": 1 - math.log(2),
        "baselines_grpo_pushes_conflict_tokens_down": -1000,
    }


def test_units() -> None:
    others = {claim.__name__: unit_of(claim) for _, claim in EACH if unit_of(claim) != "points"}
    assert others == {
        "fig1_kl_reacts_late": "steps",
        **{name: "nats" for name in (claim.__name__ for _, claim in EACH) if "entropy" in name and "repairs" not in name
           and "control" not in name},
        "fig5b_conflict_grows_with_groups": "tokens",
        "baselines_grpo_pushes_conflict_tokens_down": "10⁻³",
        "baselines_equal_weights_push_conflict_tokens_less_down": "10⁻³",
    }  # fmt: skip
    assert sum(unit == "nats" for unit in others.values()) == 10


def claim_of(name: str) -> Claim:
    return next(claim for _, claim in EACH if claim.__name__ == name)


def with_late(**values: dict[str, float]) -> Runs:
    """Runs with one value in the first three quarters, 0, and one in the last."""
    metrics: dict[str, Any] = {}
    for name, logged in values.items():
        metrics[name.replace("_", "-")] = {
            1: [{"step": step} | {key: value * (step == 4) for key, value in logged.items()} for step in (1, 2, 3, 4)]
        }
    return Runs(Results(metrics, {}), 1, window=1)


def test_the_sign_of_a_claim_is_that_of_the_paper() -> None:
    """GTPO ends 30 above GRPO with G = 8 and 10 above with 12: 20 points."""
    runs = with_late(**{
        "gtpo-late-g8": {"accuracy": 80.0},
        "gtpo-late-g12": {"accuracy": 90.0},
        "grpo-late-g8-beta0": {"accuracy": 40.0},
        "grpo-late-g8-beta1e-6": {"accuracy": 60.0},
        "grpo-late-g12-beta0": {"accuracy": 80.0},
    })  # fmt: skip
    assert claim_of("fig2_late_accuracy")(runs) == 20.0


@each_claim
def test_in_the_world_of_the_paper_every_claim_holds(figure: str, claim: Claim) -> None:
    assert check(claim, world(), [1, 2, 3], window=1)["verdict"] == "holds"


def test_recorder_finds_exactly_the_runs() -> None:
    read = read_by(claim_of("fig1_kl_reacts_late"))
    assert read.metrics == {"grpo-late-g8-beta1e-6": {"kl", "formatting"}} and read.benchmarks == {}
    read = read_by(claim_of("table1_late_maj_64"))
    names = ("gtpo-late-g8", "grpo-late-g8-beta0", "grpo-late-g8-beta1e-6", "gtpo-late-g12", "grpo-late-g12-beta0")
    assert read.metrics == {} and read.benchmarks == {name: {"arithmetic_hard"} for name in names}
    assert Recorder().metrics == {}  # not shared


def test_a_seed_that_lacks_a_run_is_left_out() -> None:
    found = synthetic()
    del found.metrics["grpo-late-w-reinforce"][3]
    checked = check(claim_of("baselines_w_reinforce_keeps_entropy"), found, [1, 2, 3, 4, 5], window=1)
    assert list(checked["margins"]) == ["1", "2", "4", "5"] and checked["verdict"] == "holds"
    assert set(checked["margins"].values()) == {checked["mean"]} and checked["half_width"] == 0
