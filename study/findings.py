"""The values of the pages that no planned comparison has: differences and means of stored runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gtpo.files import read_yaml
from paper.results import Results
from study import Row
from study.bench import numbers_of
from study.comparison import Pair
from study.measures import SeedRuns, measure_of

WINDOW = 50  # steps of a trailing mean


def findings(found: Mapping[str, Results]) -> Row:
    """Finding -> a row (:meth:`study.comparison.Pair.row`) per pair of arms; ``counts``: name -> of how many runs all
    measures are within bounds.

    Args:
        found: Scale -> stored results.
    """
    specs = read_yaml(Path(__file__).with_name("findings.yaml"))
    rows: Row = {"counts": {name: _count(found, **spec) for name, spec in specs["counts"].items()}}
    for name, spec in specs["pairs"].items():
        rows[name] = []
        for pair in spec["pairs"]:
            arms = Pair(found[pair["scale"]], pair["arms"], numbers_of([pair["seeds"]]), WINDOW)
            rows[name].append({"label": pair.get("label")} | arms.row(f"{spec['measure']} {pair['steps']}"))
    return rows


def _count(found: Mapping[str, Results], scale: str, runs: str, window: int, **bounds: Sequence[float]) -> int:
    """How many runs, of which ``runs`` matches the label, have each measure within bounds, the upper one excluded."""
    results = found[scale]
    number = 0
    for name, seed in results.runs:
        if re.fullmatch(runs, f"{name}-s{seed}"):
            of_run = SeedRuns(results, seed, window)
            values = {measure: measure_of(measure, name).value(of_run) for measure in bounds}
            number += all(low <= values[measure] < high for measure, (low, high) in bounds.items())
    return number
