"""The values of README.md's findings that no planned comparison has: differences and counts in stored runs."""

import math
from collections.abc import Mapping
from pathlib import Path

from gtpo.files import read_yaml
from paper.results import Results
from study import Row, Values
from study.bench import numbers_of
from study.comparison import Pair, compare
from study.measures import SeedRuns, fall, highest, statistic

WINDOW = 50  # steps of the trailing means that a run loses and that pass ln 2
LOSES = 20.0  # points
WITHOUT_FORMAT = 20.0  # % of the format reward, 10 of which any tag earns
NOT_COMPARED = ("bits1", "control", "smol")  # another sampler, another reward, another model


def findings(found: Mapping[str, Results]) -> Row:
    """Finding -> its difference (:func:`study.comparison.compare`), and in how many pairs it is above 0.

    Args:
        found: Scale -> stored results.
    """
    rows: Row = {}
    for name, spec in read_yaml(Path(__file__).with_name("findings.yaml")).items():
        differences: list[float] = []
        for pair in spec["pairs"]:
            differences += _differences(found[pair["scale"]], pair, spec["measure"])
        above = sum(difference > 0 for difference in differences)
        rows[name] = compare(differences) | {"above": above}
    rows["without_format"] = _without_format(found["collapse"])
    rows["entropy_alarm"] = _entropy_alarm(found["collapse"])
    return rows


def _differences(results: Results, pair: Values, metric: str) -> list[float]:
    arms = Pair(results, pair["arms"], numbers_of([pair["seeds"]]), WINDOW)
    values = arms.values(f"{metric} {pair['steps']}")
    return [second - first for first, second in values.values()]


def ends_without_format(runs: SeedRuns, name: str) -> bool:
    formatting = runs.curve(name, "formatting")
    return statistic("last_third")(formatting, WINDOW) < WITHOUT_FORMAT


def _without_format(results: Results) -> dict[str, Row]:
    """Arm under the reward for length -> how many of its runs and of GRPO's end without the format, and McNemar's p."""
    rows = {}
    for name in ("gtpo-control-correction", "grpo-control-dr"):
        seeds = sorted({*results.seeds(name)} & {*range(431, 451)})
        lost = Pair(results, ("grpo-control", name), seeds, WINDOW).lost(ends_without_format)
        rows[name] = lost | {"seeds": len(seeds)}
    return rows


def _entropy_alarm(results: Results) -> dict[str, int]:
    """Of the runs that lose accuracy, how many ever have a trailing mean of the entropy above ln 2."""
    highest_entropy = []
    for name, seed in results.runs:
        if any(part in name for part in NOT_COMPARED):
            continue
        accuracy = results.curve(name, seed, "accuracy")
        if fall(accuracy, WINDOW) >= LOSES:
            highest_entropy.append(highest(results.curve(name, seed, "entropy"), WINDOW))
    above = sum(value > math.log(2) for value in highest_entropy)
    return {"lost": len(highest_entropy), "above": above}
