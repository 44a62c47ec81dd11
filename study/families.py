"""Comparisons whose runs are stored together: when a run collapses (the rules of docs/log.md), and what was found."""

import shlex
from typing import NamedTuple

from paper.results import Results
from study import Row, Values
from study.bench import Comparison, read_experiments
from study.compare import Found
from study.comparison import add_holm, rate_rows
from study.measures import LOST, SeedRuns, has_fallen

LEARNS = 5.0  # points above the base, in a trailing mean
ENTROPY = 0.05  # nats that the last quarter of a lost run is above the first
ADMISSION = range(301, 305)  # seeds of GRPO that admit a rate


class Rule(NamedTuple):
    """When a run from a base learns and is lost; a rate is admitted if so many seeds or more learn and are lost.

    Attributes:
        base: Accuracy of the base, percent.
        share: A run falls if it loses this share of its gain over the base; None: the points of ``LOST``.
    """

    base: float
    learn: int
    lose: int
    share: float | None = None

    def learns(self, runs: SeedRuns, name: str) -> bool:
        return runs.curve(name, "accuracy").highest() >= self.base + LEARNS

    def falls(self, runs: SeedRuns, name: str) -> bool:
        """Whether a run has lost accuracy or formatting at its end."""
        if self.share is None:
            return has_fallen(runs, name)
        gain = runs.curve(name, "accuracy").highest() - self.base
        points = self.share * max(gain, 0.0)
        return has_fallen(runs, name, LOST | {"accuracy": points})

    def is_lost(self, runs: SeedRuns, name: str) -> bool:
        """Whether it falls, and its entropy has risen."""
        rise = runs.curve(name, "entropy").rise()
        return self.falls(runs, name) and round(rise, 9) >= ENTROPY


def family_values(title: str, results: Results, origins: Values) -> Row:
    """What docs/reproduction.md shows of a family: the second arm minus the first.

    Returns:
        ``admission`` of :func:`admission`; ``rates``: run -> means at each of several; ``arms``: the names of the runs
        that are compared; ``seeds`` of them, ``mixed`` pairs that are left out, ``planned``; ``rows`` by name in the
        table; the seeds ``lost``; the ``command``.
    """
    experiments = read_experiments()
    spec = experiments["families"][title]
    comparison = Comparison(title, spec)
    rule = Rule(**spec["rule"])
    chosen = comparison.chosen_rates(results)
    found = Found(comparison.bases[0], results, origins, chosen)
    names = comparison.run_names if len(comparison.rates) > 1 else ()
    values = {
        "rates": rate_rows(results, names, comparison.rate_seeds),
        "arms": [found.name(arm) for arm in comparison.arms if arm.name in chosen],
        "seeds": 0,
        "mixed": 0,
        "rows": {},
        "lost": {},
        "command": f"python -m study compare {shlex.quote(title)}",
        "admission": admission(results, comparison, rule),
        "planned": len(comparison.seeds),
    }
    if len(chosen) < 2:
        return values
    pair = found.pair(comparison, comparison.arms[1])
    rows = {}
    for measure in spec["measures"]:
        label = experiments["measures"][measure]
        rows[label] = {**pair.row(measure), "primary": measure in comparison.planned}
    add_holm([row for row in rows.values() if row["primary"]])
    return values | {
        "seeds": len(pair.seeds),
        "mixed": pair.mixed,
        "rows": rows,
        "lost": {"is_lost": pair.lost(rule.is_lost), "falls": pair.lost(rule.falls)},
    }


def admission(results: Results, comparison: Comparison, rule: Rule) -> Row:
    """Run of GRPO -> its seeds of ``ADMISSION``, how many learn and are lost, and whether the rule admits it."""
    rows = {}
    for name in comparison.admission:
        seeds = [seed for seed in results.seeds(name) if seed in ADMISSION]
        runs = [SeedRuns(results, seed, comparison.window) for seed in seeds]
        learns = sum(rule.learns(run, name) for run in runs)
        lost = sum(rule.is_lost(run, name) for run in runs)
        row = {"seeds": seeds, "learns": learns, "lost": lost}
        row["admitted"] = learns >= rule.learn and lost >= rule.lose
        for key, statistic, digits in (("accuracy", "late", 1), ("formatting", "late", 1), ("entropy", "rise", 3)):
            row[key] = [round(run.curve(name, key).of(statistic), digits) for run in runs]
        if seeds:
            rows[name] = row
    return rows
