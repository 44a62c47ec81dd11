"""The values of the pages that no planned comparison has: differences and means of stored runs."""

import logging
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from gtpo.files import read_yaml
from paper.results import Results, Run
from study import Numbers, Row
from study.bench import numbers_of
from study.compare import pooled_row, slope_row
from study.comparison import Pair, compare
from study.measures import SeedRuns, measure_of

WINDOW = 50  # steps of a trailing mean
Places = Mapping[str, Results]  # by their names on the pages


def findings(found: Places) -> Row:
    """Finding -> a row (:meth:`study.comparison.Pair.row`) per pair of arms.

    ``slopes``: one row, over the shares of several scales; ``means``: measure -> row of the mean over scales and pairs
    of arms; ``pools``: one row of all differences; ``counts``: name -> of how many runs all measures are within bounds;
    ``alarms``: name -> in how many runs :class:`gtpo.CollapseAlarm` rings, and how many there are.

    Args:
        found: Scale -> stored results.
    """
    specs = read_yaml(Path(__file__).with_name("findings.yaml"))
    rows: Row = {"counts": {}, "alarms": {}}
    for name, spec in specs["counts"].items():
        results = found[spec.pop("scale")]
        rows["counts"][name] = len(runs_within(results, **spec))
    for name, spec in specs["pairs"].items():
        rows[name] = []
        for pair in spec["pairs"]:
            steps = pair.get("steps") or spec["steps"]
            measure = f"{spec['measure']} {steps}"
            rows[name].append({"label": pair.get("label"), **_pair(found, pair["scale"], pair).row(measure)})
    for name, spec in specs["slopes"].items():
        pairs = [_pair(found, scale, spec) for scale in spec["scales"]]
        shares = [*spec["scales"].values()]
        rows[name] = slope_row(shares, pairs, spec["measure"])
    for name, spec in specs["means"].items():
        pairs = [_pair(found, scale, spec | {"arms": arms}) for scale, arms in product(spec["scales"], spec["arms"])]
        rows[name] = {measure: pooled_row(pairs, measure, 0.0) for measure in spec["measures"]}
    for name, spec in specs["pools"].items():
        differences: list[float] = []
        for pair in spec["pairs"]:
            differences += _pair(found, pair["scale"], pair).differences(spec["measure"]).values()
        rows[name] = compare(differences)
    for name, places in specs["alarms"].items():
        rang = [alarm for place in places for alarm in alarms_in(found[place["scale"]], place["runs"])]
        rows["alarms"][name] = [sum(rang), len(rang)]
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


def alarms_in(results: Results, runs: str) -> list[bool]:
    """Whether :class:`gtpo.CollapseAlarm` rings, of each run of which ``runs`` matches the label."""
    from transformers import TrainerControl, TrainerState

    from gtpo import CollapseAlarm

    logging.getLogger(CollapseAlarm.__module__).setLevel(logging.ERROR)  # one warning a run
    rang = []
    for (name, seed), table in results.runs.items():
        if re.fullmatch(runs, f"{name}-s{seed}"):
            alarm = CollapseAlarm()
            for step, logs in table[["accuracy", "grad_norm"]].iterrows():
                alarm.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=dict(logs))
            rang.append(alarm.rang_at is not None)
    return rang
