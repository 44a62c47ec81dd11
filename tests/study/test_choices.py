"""Rates that the other half of the seeds chooses, metrics by generation, and a primary that names what it subtracts."""

from pathlib import Path

import pytest
from helpers.results import results_of

from paper.results import Results
from study import Row
from study.choices import by_generation, chosen_by_halves, with_copies
from study.comparison import Arm, Comparison
from study.found import Found, with_choices
from study.measures import measure_of
from study.page import plan_text, primary_rows, write_page
from study.pairs import Pair

SEEDS = [1, 2, 3, 4]
RATES = ["0.1", "0.2"]
# arm -> rate -> pass@1 of seeds 1 to 4; formatting of the last quarter is 95 but for the cases below
SCORES = {
    "grpo": {"0.1": [50, 52, 60, 62], "0.2": [60, 62, 54, 56]},  # 1 and 2 choose 0.2 for 3 and 4, and the reverse
    "gtpo": {"0.1": [40, 40, 40, 40], "0.2": [90, 90, 90, 90]},  # 0.2 solves most, without the format
}
LOW_FORMAT = ("gtpo", "0.2")


def comparison_of(**keys: object) -> Comparison:
    given = {
        "arms": ["grpo", "gtpo"],
        "seeds": ["1-4"],
        "rates": RATES,
        "choices": {"own": {"by": "pass@1 sampled", "least": {"formatting late": 90}}},
        "views": ["own", "0.1"],
        "steps": 4,
        "primary": [{"measure": "pass@1 sampled", "at": "own"}, {"measure": "pass@1 sampled", "at": "0.1"}],
        "measures": ["formatting late"],
    }
    return Comparison.of("", given | keys)


def results(without: tuple[str, int] | None = None) -> Results:
    metrics: Row = {}
    scores: Row = {}
    for arm, of_arm in SCORES.items():
        for rate, values in of_arm.items():
            name = f"{arm}-{rate}"
            formatting = 50.0 if (arm, rate) == LOW_FORMAT else 95.0
            rows = [{"step": step, "formatting": formatting, "accuracy": 10.0 * step} for step in (1, 2, 3, 4)]
            kept = {seed: score for seed, score in zip(SEEDS, values, strict=True) if (name, seed) != without}
            metrics[name] = dict.fromkeys(kept, rows)
            scores[name] = {"arithmetic": {s: {"scores": {"pass": {1: float(kept[s])}}} for s in kept}}
    return results_of(metrics, scores)


def chosen(found: Results, arm: str, comparison: Comparison) -> dict[int, str]:
    of = next(each for each in comparison.arms if each.name == arm)
    return chosen_by_halves(comparison, comparison.choices["own"], found, comparison.bases[0], of)


def test_each_half_chooses_for_the_other_half() -> None:
    comparison = comparison_of()
    assert chosen(results(), "grpo", comparison) == {1: "0.1", 2: "0.1", 3: "0.2", 4: "0.2"}
    assert set(chosen(results(), "gtpo", comparison).values()) == {"0.1"}  # 0.2 does not format
    higher = {"by": "pass@1 sampled", "least": {"formatting late": 96}}
    comparison = comparison_of(choices={"own": higher})
    assert set(chosen(results(), "gtpo", comparison).values()) == {"0.2"}  # none does: all may be chosen


@pytest.mark.parametrize(("seed", "left"), [(2, {1, 2}), (3, {3, 4})])
def test_a_half_without_a_run_chooses_nothing(seed: int, left: set[int]) -> None:
    assert set(chosen(results(without=("grpo-0.2", seed)), "grpo", comparison_of())) == left


def test_an_arm_can_have_one_rate_or_those_of_another() -> None:
    comparison = comparison_of(rates_of={"grpo": ["0.2"]})
    assert set(chosen(results(), "grpo", comparison).values()) == {"0.2"}
    comparison = comparison_of(rates_as={"gtpo": "grpo"})
    assert chosen(results(), "gtpo", comparison) == chosen(results(), "grpo", comparison)


def test_a_rate_that_a_rule_adds_is_chosen_of_and_is_not_in_the_plan() -> None:
    own = {"own": {"by": "pass@1 sampled"}}
    before, after = (comparison_of(rates=["0.1"], choices=own, added_rates=added) for added in ({}, {"gtpo": ["0.2"]}))
    assert set(chosen(results(), "gtpo", before).values()) == {"0.1"}
    assert set(chosen(results(), "gtpo", after).values()) == {"0.2"}
    assert set(chosen(results(), "grpo", after).values()) == {"0.1"}
    assert chosen(results(without=("gtpo-0.2", 3)), "gtpo", after).keys() == {3, 4}  # of seeds 1 and 2, complete
    assert after.run_names == ["grpo-0.1", "grpo-0.2", "gtpo-0.1", "gtpo-0.2"]
    assert plan_text(after) == plan_text(before)


def test_the_page_names_the_rates_that_a_rule_has_added(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_xticks", lambda axis, places, labels=(): ticks.extend(labels))
    write_page(comparison_of(added_rates={"gtpo": ["0.4"]}), here, "python -m study compare mine")
    page = (here / "comparison.md").read_text()
    assert "By a rule of the plan gtpo was trained at 0.4 too. A rate at an end of 0.1, 0.2, 0.4 brackets" in page
    assert "| GTPO minus GRPO | wrong-mode, own | pass@1 sampled | 0 of 4 |" in page  # of the rows at two views
    assert "| GRPO | wrong-mode, 0.1 | 0 |" in page and "## From wrong-mode, own\n" in page
    assert ticks[:3] == ["0.1", "0.2", "0.4"]


def test_the_primary_differences_at_the_chosen_and_at_a_common_rate() -> None:
    """By hand: GTPO at 0.1 has 40; GRPO at its own rates 50, 52, 54, 56, at the common one 50, 52, 60, 62."""
    comparison = comparison_of(primary=[{"measure": "pass@1 sampled"}, *comparison_of().primary])
    found = Found(comparison.bases[0], results(), {}, comparison.chosen_rates(results()))
    first, own, common = primary_rows(comparison, [with_choices(comparison, found)])
    assert first["mean"] == own["mean"] == pytest.approx(40 - 53)  # one that names no view is of the first
    assert common["mean"] == pytest.approx(40 - 56)
    assert own["seeds"] == common["seeds"] == 4


def test_a_run_that_is_missing_at_a_chosen_rate_has_no_origin() -> None:
    """The page of a comparison that is not complete names the revisions of the others."""
    comparison = comparison_of(rates_as={"gtpo": "grpo"})  # the rates chosen of grpo, also where gtpo has not run
    origins = {"grpo-0.1-s1": ["a"], "grpo-0.2-s3": ["b"], "gtpo-0.1-s1": ["c"]}
    found = Found(comparison.bases[0], results(), origins, comparison.chosen_rates(results()))
    assert with_choices(comparison, found).origins == origins | {
        "grpo-own-s1": ["a"],
        "grpo-own-s3": ["b"],
        "gtpo-own-s1": ["c"],
    }


def test_a_primary_names_the_arm_that_is_subtracted() -> None:
    primary = [{"measure": "pass@1 sampled", "arms": ["correction"], "minus": "gtpo"}]
    comparison = comparison_of(
        arms=["grpo", "gtpo", "correction"], choices={}, views=[], rates=["0.1"], primary=primary
    )
    values = {"grpo-0.1": 10.0, "gtpo-0.1": 20.0, "correction-0.1": 50.0}
    rows = [{"step": 1, "accuracy": 1.0}]
    found = results_of(
        {name: dict.fromkeys(SEEDS, rows) for name in values},
        {name: {"arithmetic": {s: {"scores": {"pass": {1: value}}} for s in SEEDS}} for name, value in values.items()},
    )
    (row,) = primary_rows(comparison, [Found(comparison.bases[0], found, {}, comparison.chosen_rates(found))])
    assert (row["mean"], row["minus"].name) == (30.0, "gtpo")


def test_primaries_of_each_base_over_bases_and_over_what_differs() -> None:
    """GTPO minus GRPO is 10 from one base and 30 from the other, whose x is larger by 0.5: 40 for each 1 of x."""
    measure = "pass@1 sampled"
    primary = [{"measure": measure, "slope": True}, {"measure": measure, "over_bases": True, "above": 5.0}]
    bases = ["wrong-mode", "missing-50"]
    plan = {"choices": {}, "views": [], "rates": ["0.1"], "base": bases}
    comparison = comparison_of(primary=[*primary, {"measure": measure}], **plan)
    every = []
    for base, x, gain in zip(comparison.bases, (0.25, 0.75), (10.0, 30.0), strict=True):
        values = {"grpo-0.1": 10.0, "gtpo-0.1": 10.0 + gain}
        metrics = {name: {seed: [{"step": 1, "accuracy": 1.0}] for seed in SEEDS} for name in values}
        scores = {n: {"arithmetic": {s: {"scores": {"pass": {1: v}}} for s in SEEDS}} for n, v in values.items()}
        found = results_of(metrics, scores)
        every.append(Found(base._replace(x=x), found, {}, comparison.chosen_rates(found)))
    rows = primary_rows(comparison, every)
    assert [row["where"] for row in rows] == ["slope over x", "mean over bases", *bases]
    assert [row["mean"] for row in rows] == pytest.approx([40.0, 20.0, 10.0, 30.0])
    assert [row.get("bound") for row in rows] == [None, 5.0, None, None]
    assert {row["seeds"] for row in rows} == {4} and [row["p"] for row in rows] == [0.125] * 4
    assert [row["holm"] for row in rows] == [0.5] * 4  # over all of them


def test_metrics_by_generation() -> None:
    """Two updates a generation: rewards are logged with the first, the entropy with each; the other arm stays."""
    twice = Arm("twice", "twice-{rate}", "grpo", "", "", {}, prompts=2, updates=2)
    once = Arm("once", "once-{rate}", "grpo", "", "", {})
    rows = [
        {"step": step, "accuracy": value, "entropy": float(step)}
        for step, value in ((1, 10.0), (2, None), (3, 30.0), (4, None))
    ]
    found = by_generation(results_of({"twice-0.1": {1: rows}, "once-0.1": {1: rows}}), [twice, once], ["0.1"])
    assert found.curve("twice-0.1", 1, "accuracy").to_dict() == {1: 10.0, 2: 30.0}
    assert found.curve("twice-0.1", 1, "entropy").to_dict() == {1: 1.5, 2: 3.5}
    assert found.curve("once-0.1", 1, "entropy").to_dict() == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_a_measure_over_prompts() -> None:
    """Prompts 3 to 4 are steps 3 and 4 of one prompt, and step 2 of two."""
    rows = [{"step": step, "accuracy": float(step)} for step in (1, 2, 3, 4)]
    found = results_of({"a": {1: rows}, "b": {1: rows}})
    pair = Pair(found, ["a", "b"], [1], 1, prompts={"b": 2})
    assert pair.values("accuracy prompts 3-4") == {1: [3.5, 2.0]}
    assert measure_of("accuracy 3-4", "a").of == "3-4"


def test_copies_have_metrics_and_scores() -> None:
    found = with_copies(results(), {("grpo-own", 3): "grpo-0.2"})
    assert found.seeds("grpo-own") == [3]
    assert found.scored("grpo-own", "arithmetic")["pass@1"].to_dict() == {3: 54.0}
    assert len(found.metrics) == len(results().metrics) + 4
