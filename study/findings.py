"""The values of the pages that no planned comparison has: differences and means of stored runs."""

import re
from collections.abc import Mapping
from pathlib import Path

from gtpo.files import read_yaml
from paper.results import Results, Run
from study import Numbers, Row
from study.bench import numbers_of
from study.compare import slope_row
from study.comparison import Pair
from study.measures import SeedRuns, measure_of

WINDOW = 50  # steps of a trailing mean
Places = Mapping[str, Results]  # by their names on the pages


def findings(found: Places) -> Row:
    """Finding -> a row (:meth:`study.comparison.Pair.row`) per pair of arms; ``slopes``: over the shares of several
    scales; ``counts``: name -> of how many runs all measures are within bounds.

    Args:
        found: Scale -> stored results.
    """
    specs = read_yaml(Path(__file__).with_name("findings.yaml"))
    rows: Row = {"counts": {}}
    for name, spec in specs["counts"].items():
        results = found[spec.pop("scale")]
        rows["counts"][name] = len(runs_within(results, **spec))
    for name, spec in specs["pairs"].items():
        rows[name] = []
        for pair in spec["pairs"]:
            measure = f"{spec['measure']} {pair['steps']}"
            rows[name].append({"label": pair.get("label"), **_pair(found, pair["scale"], pair).row(measure)})
    for name, spec in specs["slopes"].items():
        pairs = [_pair(found, scale, spec) for scale in spec["scales"]]
        shares = [*spec["scales"].values()]
        rows[name] = slope_row(shares, pairs, spec["measure"])
    return rows


def _pair(found: Places, scale: str, spec: Row) -> Pair:
    return Pair(found[scale], spec["arms"], numbers_of([spec["seeds"]]), WINDOW)


def runs_within(results: Results, runs: str, window: int, **bounds: Numbers) -> list[Run]:
    """The runs, of which ``runs`` matches the label, with each measure within bounds, the upper one excluded."""
    found = []
    for name, seed in results.runs:
        if re.fullmatch(runs, f"{name}-s{seed}"):
            of_run = SeedRuns(results, seed, window)
            are_within = [
                low <= measure_of(measure, name).value(of_run) < high for measure, (low, high) in bounds.items()
            ]
            if all(are_within):
                found.append((name, seed))
    return found
