"""The rules of a collapse and the families at the best rates, by hand."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.results import results_of
from helpers.settings import CLASSES

from gtpo.cli.parse import parse
from gtpo.files import CONFIGS, read_yaml
from gtpo.runs.directory import to_argv
from study.bench import known_comparison, known_comparisons, read_experiments
from study.families import Rule, family_values
from study.length_reward import longer
from study.measures import SeedRuns


def run(accuracy: list[float], formatting: list[float], entropy: list[float], steps: int = 50) -> list[dict[str, Any]]:
    """Parts of 50 steps each, the window of the trailing mean."""
    parts = [values for values in zip(accuracy, formatting, entropy, strict=True) for _ in range(steps)]
    return [{"step": i, "accuracy": a, "formatting": f, "entropy": e} for i, (a, f, e) in enumerate(parts, 1)]


def values(title: str, metrics: dict[str, Any], **origins: list[str]) -> dict[str, Any]:
    """What a family has found in some runs."""
    return family_values(title, results_of(metrics), origins)


FLAT = [90.0] * 4
LOW = [0.4] * 4


def test_the_rule_by_hand() -> None:
    """The base has 49 %: 54 % is learned. 20 points of accuracy or 10 of formatting, with 0.05 nats, are lost."""
    seeds = {
        301: run([50, 54, 40, 34], FLAT, [0.4, 0.4, 0.4, 0.46]),  # learns, loses 20
        302: run([50, 53.9, 40, 20], FLAT, [0.4, 0.4, 0.4, 0.6]),  # does not learn, loses 33.9
        303: run([50, 70, 60, 50], FLAT, [0.4, 0.4, 0.4, 0.449]),  # learns; loses 20, but entropy stays
        304: run([50, 70, 60, 51], [90, 95, 90, 85.1], [0.4, 0.4, 0.4, 0.6]),  # learns; 19 and 9.9 are not lost
        305: run([0] * 4, FLAT, LOW),  # not a seed of the rule
    }
    row = values("published", {"grpo-1e-3": seeds})["admission"]["grpo-1e-3"]
    assert (row["seeds"], row["learns"], row["lost"], row["admitted"]) == ([301, 302, 303, 304], 3, 2, True)
    assert row["accuracy"] == [34.0, 20.0, 50.0, 51.0] and row["entropy"] == [0.06, 0.2, 0.049, 0.2]
    seeds[302] = run([50, 53, 53, 53], FLAT, LOW)
    row = values("published", {"grpo-1e-3": seeds})["admission"]["grpo-1e-3"]
    assert (row["learns"], row["lost"], row["admitted"]) == (3, 1, False)
    seeds[304] = run([50, 70, 60, 51], [90, 95, 90, 85], [0.4, 0.4, 0.4, 0.6])  # 10 points of formatting
    assert values("published", {"grpo-1e-3": seeds})["admission"]["grpo-1e-3"]["admitted"]
    assert values("published", {"grpo-headroom-1e-3": seeds})["admission"] == {}
    assert list(values("guessing", {"grpo-headroom-1e-3": seeds})["admission"]) == ["grpo-headroom-1e-3"]


def test_half_of_the_gain_is_lost_from_the_base_that_guesses() -> None:
    """33.6 %: from 73.6 a fall of 20.1 is half of the gain, of 19.9 is not."""
    rising = [0.4, 0.4, 0.4, 0.5]
    found = results_of({"a": {1: run([40, 73.6, 60, 53.5], FLAT, rising), 2: run([40, 73.6, 60, 53.7], FLAT, rising)}})
    rule = Rule(**read_experiments()["families"]["guessing"]["rule"])
    assert [rule.is_lost(SeedRuns(found, seed, 50), "a") for seed in (1, 2)] == [True, False]


def test_each_arm_is_compared_at_its_own_best_rate() -> None:
    """GRPO is best at 0.3e-3, GTPO at 1e-3; 3, 5 and 7 points; a pair of two origins and a single run are out."""
    of_rates = {"grpo-0.3e-3": 60, "grpo-0.6e-3": 40, "grpo-1e-3": 50, "grpo-headroom-1e-3": 99}
    of_rates |= {"gtpo-0.3e-3": 55, "gtpo-0.6e-3": 45, "gtpo-1e-3": 65}
    metrics: dict[str, Any] = {
        name: {seed: run([value] * 4, FLAT, LOW) for seed in (305, 306, 307)} for name, value in of_rates.items()
    }
    for seed, more in ((351, 3), (352, 5), (353, 7), (354, 90)):
        metrics["grpo-0.3e-3"][seed] = run([60, 60, 60, 30], FLAT, [0.4, 0.4, 0.4, 0.5])
        metrics["gtpo-1e-3"][seed] = run([30 + more] * 4, FLAT, LOW)
    metrics["gtpo-1e-3"][355] = run([99] * 4, FLAT, LOW)
    found = values("published", metrics, **{"grpo-0.3e-3-s354": ["a"], "gtpo-1e-3-s354": ["b"]})
    assert found["arms"] == ["grpo-0.3e-3", "gtpo-1e-3"] and (found["seeds"], found["mixed"]) == (3, 1)
    row = found["rates"]["grpo-1e-3"]
    assert (row["accuracy"], row["formatting"], row["seeds"]) == ((50.0, 0.0), (90.0, 0.0), 3)
    row = found["rows"]["accuracy"]
    assert (row["seeds"], row["mean"], row["p"], row["holm"]) == (3, 5.0, 0.25, 0.5) and row["primary"]
    assert found["rows"]["formatting"]["holm"] == 1.0 and "holm" not in found["rows"]["entropy"]
    assert found["lost"]["is_lost"] == {"grpo": 3, "gtpo": 0, "p": 0.25}
    assert found["command"] == "python -m study compare published"


def test_the_arm_of_another_loss_has_its_own_best_rate() -> None:
    """Dr. GRPO is best at 0.6e-3, and its runs are not GRPO's."""
    scores = {"grpo": (60, 40, 50), "grpo-dr": (10, 70, 20)}
    named = {}
    for arm, of_arm in scores.items():
        for rate, score in zip(("0.3e-3", "0.6e-3", "1e-3"), of_arm, strict=True):
            named[f"{arm}-{rate}"] = score
    runs = {name: {seed: run([score] * 4, FLAT, LOW) for seed in (331, 332, 333)} for name, score in named.items()}
    assert values("Dr. GRPO", runs)["arms"] == ["grpo-0.3e-3", "grpo-dr-0.6e-3"]


def test_a_rate_that_is_given_is_not_chosen() -> None:
    """At 1.2e-3, although another rate is better; 2 and 4 points."""
    metrics: dict[str, Any] = {"grpo-headroom-1e-3": {305: run([90] * 4, FLAT, LOW)}}
    for name, more in (("grpo-headroom-1.2e-3", 0), ("gtpo-headroom-1.2e-3", 2)):
        metrics[name] = {seed: run([30 + more * (seed - 310)] * 4, FLAT, LOW) for seed in (311, 312)}
    found = values("losing", metrics)
    assert (found["arms"], found["seeds"]) == (["grpo-headroom-1.2e-3", "gtpo-headroom-1.2e-3"], 2)
    assert (found["rows"]["accuracy"]["mean"], found["rows"]["accuracy"]["holm"]) == (3.0, 0.5)
    tag = "tag_logps/reasoning_start"
    arms = ("grpo-control", "gtpo-control-correction")  # -2 and -1
    metrics = {arm: {401: [row | {tag: i - 2} for row in run(FLAT, FLAT, LOW)]} for i, arm in enumerate(arms)}
    rows = values("correction minus GRPO", metrics)["rows"]
    assert rows[tag]["mean"] == 1.0 and rows["formatting"]["mean"] == 0.0


def test_the_runs_of_a_family_are_those_of_its_stored_results() -> None:
    """Each arm has the name of its stored runs, and the settings that differ from the base's."""
    every = known_comparisons()
    assert {"published", "plain", "smol"} <= every.keys() and not {"real model", "conditions"} & every.keys()
    flags, place = first_run("losing", "1.2e-3", 311)
    assert flags["--output_dir"] == "outputs/study/losing/wrong-mode/gtpo-headroom-1.2e-3-s311"
    assert (flags["--adam_beta1"], flags["--max_steps"], flags["--G"]) == ("0.999999", "1000", "8")
    assert place == Path("results/collapse")
    flags, _ = first_run("again: Dr. GRPO", "1e-3", 431)
    assert flags["--output_dir"].endswith("/grpo-control-dr-s431") and flags["--loss_type"] == "dr_grpo"
    assert "study/length_reward.py:longer" in flags and "--reward_weights" in flags


def first_run(title: str, rate: str, seed: int) -> tuple[dict[str, str], Path]:
    """The words of the second arm's run, each with the one that follows it; where the results are stored."""
    comparison = known_comparison(title)
    [base] = comparison.bases
    words = comparison.run(base, comparison.arms[1], rate, seed).argv
    return dict(pairwise(words)), comparison.stored(base)


def test_smollm2_starts_from_its_warm_start() -> None:
    """study/warm_start.yaml, which `make smol` runs, makes the model of the base."""
    warm_start = read_yaml(CONFIGS.parent / "study" / "warm_start.yaml")
    resolved = parse("sft", CLASSES["sft"], [*to_argv(warm_start), "--dry_run", "true"]).to_dict()
    assert warm_start.items() <= resolved.items() and resolved["max_seq_length"] == 512  # of configs/sft/smol.yaml
    flags, _ = first_run("smol", "3e-4", 1)
    assert flags["--model"] == f"{warm_start['output_dir']}/merged"
    assert (flags["--config"], flags["--initial_entropy"]) == ("configs/gtpo/smol.yaml", "0.42")
    assert known_comparison("smol").settings_of["grpo"].keys() == {"save_steps", "save_total_limit"}


def test_what_a_group_shares_is_lowered_by_the_reward_for_length() -> None:
    """3 and 4 of 4 tokens win: A = -+5 / 5.77 = -+0.866. Then 8 lengths up to 101, and an unlike first token."""
    pushes: list[tuple[str, float]] = []
    drawn = [[5] * (1 + 37 * i % 101) for i in range(8)]
    for ids in ([[5], [5, 7], [5, 7, 7], [5, 7, 7, 7]], drawn, [[6], *drawn]):
        rewards = longer(["no tag"] * len(ids), ids, lambda *pair: pushes.append(pair))
        assert rewards[:4] == [0, 0, 10, 10] or len(ids) > 4
    by_hand, of_drawn = (value for name, value in pushes if name == "prefix_push")
    assert by_hand == pytest.approx(-0.866025 * (1 + 1 / 2 - 1 / 3 - 1 / 4)) and of_drawn < 0
