"""The values of the pages that no planned comparison has: differences and means of stored runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gtpo.files import read_yaml
from paper.results import Results
from study import Row
from study.bench import numbers_of
from study.compare import slope_row
from study.comparison import Pair
from study.measures import SeedRuns, measure_of

WINDOW = 50  # steps of a trailing mean


def findings(found: Mapping[str, Results]) -> Row:
    """Finding -> a row (:meth:`study.comparison.Pair.row`) per pair of arms; ``slopes``: over the shares of several
    scales; ``counts``: name -> of how many runs all measures are within bounds.

    Args:
        found: Scale -> stored results.
    """
    specs = read_yaml(Path(__file__).with_name("findings.yaml"))
    rows: Row = {"counts": {}}
    for name, spec in specs["counts"].items():
        rows["counts"][name] = _count(found, **spec)
    for name, spec in specs["pairs"].items():
        rows[name] = []
        for pair in spec["pairs"]:
            measure = f"{spec['measure']} {pair['steps']}"
            row = _pair(found, pair["scale"], pair).row(measure)
            rows[name].append({"label": pair.get("label"), **row})
    for name, spec in specs["slopes"].items():
        pairs = [_pair(found, scale, spec) for scale in spec["scales"]]
        shares = [*spec["scales"].values()]
        rows[name] = slope_row(shares, pairs, spec["measure"])
    return rows


def _pair(found: Mapping[str, Results], scale: str, spec: Row) -> Pair:
    seeds = numbers_of([spec["seeds"]])
    return Pair(found[scale], spec["arms"], seeds, WINDOW)


def _count(found: Mapping[str, Results], scale: str, runs: str, window: int, **bounds: Sequence[float]) -> int:
    """How many runs, of which ``runs`` matches the label, have each measure within bounds, the upper one excluded."""
    results = found[scale]
    number = 0
    for name, seed in results.runs:
        if re.fullmatch(runs, f"{name}-s{seed}"):
            of_run = SeedRuns(results, seed, window)
            is_within = True
            for measure, (low, high) in bounds.items():
                value = measure_of(measure, name).value(of_run)
                is_within &= low <= value < high
            number += is_within
    return number
