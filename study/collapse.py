"""When a run collapses (the rules of docs/log.md), arms compared at the best rate of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from paper.results import Results
from study.bench import numbers_of, read_experiments
from study.comparison import Row, add_holm, best_of, pair_of, rate_rows
from study.measures import SeedRuns, fall, highest, late, quarters

LEARNS = 5.0  # points above the base, in a trailing mean
ACCURACY, FORMATTING = 20.0, 10.0  # points from the highest trailing mean to the last quarter: lost
ENTROPY = 0.05  # nats that the last quarter of a lost run is above the first
ADMISSION = range(301, 305)  # seeds of GRPO that admit a rate


@dataclass(frozen=True)
class Rule:
    """When a run from a base learns and is lost; a rate is admitted if so many seeds or more learn and are lost.

    Attributes:
        base: Accuracy of the base, percent.
        share: A run falls if it loses this share of its gain over the base; None: ``ACCURACY`` points.
    """

    base: float
    learn: int
    lose: int
    share: float | None = None

    def learns(self, runs: SeedRuns, name: str) -> bool:
        return highest(runs.curve(name, "accuracy"), runs.window) >= self.base + LEARNS

    def falls(self, runs: SeedRuns, name: str) -> bool:
        """Whether a run has lost accuracy or formatting at its end."""
        accuracy, formatting = runs.curve(name, "accuracy"), runs.curve(name, "formatting")
        limit = ACCURACY
        if self.share is not None:
            limit = self.share * max(highest(accuracy, runs.window) - self.base, 0.0)
        return fall(accuracy, runs.window) >= limit or fall(formatting, runs.window) >= FORMATTING

    def is_lost(self, runs: SeedRuns, name: str) -> bool:
        """Whether it falls, and its entropy has risen."""
        return self.falls(runs, name) and round(_rise(runs, name), 9) >= ENTROPY


def _rise(runs: SeedRuns, name: str) -> float:
    """The entropy of the last quarter minus that of the first."""
    entropy = runs.curve(name, "entropy")
    return late(entropy) - quarters(entropy)[0]


@dataclass(frozen=True)
class Family:
    """A comparison of two arms whose results are stored, a row of study/experiments.yaml; Holm's is over ``primary``.

    Attributes:
        arms: Their runs, the first is subtracted; with {rate}, where each gets its own best of ``rates``.
        rate_seeds, seeds: The seeds that choose the rates, and those that are compared.
        admission: Runs of GRPO of which the rule admits some.
    """

    title: str
    scale: str
    rule: Rule
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    measures: Mapping[str, str]
    primary: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    rate_seeds: tuple[int, ...] = ()
    admission: tuple[str, ...] = ()

    def at_rates(self, arm: str) -> list[str]:
        """The runs of an arm at every rate; of a given rate none."""
        return [arm.format(rate=rate) for rate in self.rates]

    def command(self, arms: Sequence[str]) -> str:
        """What makes the runs of the comparison, or first those that choose the arms."""
        names, seeds = list(arms), self.seeds
        if not names:
            names = [name for arm in self.arms for name in self.at_rates(arm)]
            seeds = self.rate_seeds or seeds
        return f"python -m study {self.scale} --only {' '.join(names)} --seeds $(seq {seeds[0]} {seeds[-1]})"


@cache
def families() -> dict[str, Family]:
    """Title -> family, in the order of study/experiments.yaml."""
    known = read_experiments()
    found = {}
    for title, row in known["families"].items():
        lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
        seeds = {key: numbers_of(row.get(key, ())) for key in ("seeds", "rate_seeds")}
        rest = {"rule": Rule(**known["rules"][row["rule"]]), "measures": known["measures"][row["measures"]]}
        found[title] = Family(title, **{**row, **lists, **seeds, **rest})
    return found


def admission(results: Results, window: int, family: Family) -> dict[str, Row]:
    """Run of GRPO -> its seeds of ``ADMISSION``, how many learn and are lost, and whether the rule admits it."""
    rows = {}
    for name in family.admission:
        runs = [SeedRuns(results, seed, window) for seed in results.seeds(name) if seed in ADMISSION]
        if not runs:
            continue
        rule = family.rule
        learns = sum(rule.learns(run, name) for run in runs)
        lost = sum(rule.is_lost(run, name) for run in runs)
        row = {"seeds": [run.seed for run in runs], "learns": learns, "lost": lost}
        row["admitted"] = learns >= rule.learn and lost >= rule.lose
        for key in ("accuracy", "formatting"):
            row[key] = [round(late(run.curve(name, key)), 1) for run in runs]
        row["entropy"] = [round(_rise(run, name), 3) for run in runs]
        rows[name] = row
    return rows


def comparison(
    results: Results, window: int, family: Family, origins: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The second arm minus the first: ``rates`` of each, ``arms``, ``rows`` by measure, the seeds ``lost``.

    ``origins``: run -> revision and machine; a pair of two is not compared.
    """
    rates: dict[str, Row] = {}
    arms = []
    for arm in family.arms:
        names = family.at_rates(arm)
        rates |= rate_rows(results, names, family.rate_seeds, window)
        best = best_of(rates, names, len(family.rate_seeds)) if names else arm
        arms += [best] if best else []
    found: dict[str, Any] = {"rates": rates, "arms": arms, "seeds": 0, "mixed": 0, "rows": {}, "lost": {}}
    found["command"] = family.command(arms)
    if len(arms) < 2:
        return found
    pair, mixed = pair_of(results, arms, family.seeds, origins, window)
    rows = {label: pair.row(text) | {"primary": label in family.primary} for label, text in family.measures.items()}
    add_holm([rows[label] for label in family.primary])
    lost = {"is_lost": pair.lost(family.rule.is_lost), "falls": pair.lost(family.rule.falls)}
    return found | {"seeds": len(pair.seeds), "mixed": mixed, "rows": rows, "lost": lost}
