"""The values of README.md's findings that no planned comparison has: differences and counts in stored runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo.files import read_yaml
from paper.results import Results
from study.comparison import Pair, Row, compare
from study.measures import SeedRuns, fall, statistic, trailing

WINDOW = 50  # steps of the trailing means that a run loses and that pass ln 2
LOSES = 20.0  # points
WITHOUT_FORMAT = 20.0  # % of the format reward, 10 of which any tag earns
NOT_COMPARED = ("bits1", "control", "smol")  # another sampler, another reward, another model


def findings(found: Mapping[str, Results]) -> dict[str, Any]:
    """Finding -> its difference (:func:`study.comparison.compare`), and in how many pairs it is above 0.

    Args:
        found: Scale -> stored results.
    """
    rows: dict[str, Any] = {}
    for name, spec in read_yaml(Path(__file__).with_name("findings.yaml")).items():
        differences: list[float] = []
        for pair in spec["pairs"]:
            differences += _differences(found[pair["scale"]], pair, spec["measure"])
        rows[name] = compare(differences) | {"above": sum(difference > 0 for difference in differences)}
    rows["without_format"] = _without_format(found["collapse"])
    rows["entropy_alarm"] = _entropy_alarm(found["collapse"])
    return rows


def _differences(results: Results, pair: Mapping[str, Any], metric: str) -> list[float]:
    first, last = map(int, pair["seeds"].split("-"))
    values = Pair(results, pair["arms"], range(first, last + 1), WINDOW).values(f"{metric} {pair['steps']}")
    return [second - first for first, second in values.values()]


def _without_format(results: Results) -> dict[str, Row]:
    """Arm under the reward for length -> how many of its runs and of GRPO's end without the format, and McNemar's p."""

    def ends_without(runs: SeedRuns, name: str) -> bool:
        return statistic("last_third")(runs.curve(name, "formatting"), WINDOW) < WITHOUT_FORMAT

    rows = {}
    for name in ("gtpo-control-correction", "grpo-control-dr"):
        seeds = [seed for seed in range(431, 451) if (name, seed) in results.runs]
        rows[name] = Pair(results, ("grpo-control", name), seeds, WINDOW).lost(ends_without) | {"seeds": len(seeds)}
    return rows


def _entropy_alarm(results: Results) -> dict[str, int]:
    """Of the runs that lose accuracy, how many ever have a trailing mean of the entropy above ln 2."""
    lost = above = 0
    for name, seed in results.runs:
        accuracy = results.curve(name, seed, "accuracy")
        if any(part in name for part in NOT_COMPARED) or fall(accuracy, WINDOW) < LOSES:
            continue
        lost += 1
        above += bool(trailing(results.curve(name, seed, "entropy"), WINDOW).max() > math.log(2))
    return {"lost": lost, "above": above}
