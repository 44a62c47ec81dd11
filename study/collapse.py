"""When a run collapses (the rules of docs/log.md), the figure of survival, arms compared at the best rate of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import fill
from types import MappingProxyType
from typing import Any

from pandas import DataFrame, Series

from gtpo.reports.curves import COLORS, add_legend, grid, plot_ln2
from paper.figures import WIDTH
from paper.matrix import Matrix, groups_of
from paper.results import Results
from study.bench import numbers_of, read_experiments
from study.comparison import Row, add_holm, best_of, pair_of, rate_rows
from study.measures import SeedRuns, fall, highest, late, quarters, trailing

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


def draw_survival(matrix: Matrix, found: Mapping[str, Results]) -> Any:
    """A column per optimizer and base: share of seeds that have not lost ``ACCURACY`` points, and the entropy."""
    columns: dict[str, dict[str, tuple[str, str]]] = {}  # title -> legend -> scale and run
    for scale in found:
        for title, runs in groups_of(matrix, scale, scale).items():
            stored = {legend: (scale, run) for legend, run in runs.items() if found[scale].seeds(run)}
            if stored and title.startswith("Adam"):
                columns.setdefault(title, {}).update(stored)
    rates = sorted({legend.split()[-1] for curves in columns.values() for legend in curves}, key=float)
    drawing, axes = grid(2, len(columns), width=WIDTH / 3, height=2.4)
    for (title, curves), (top, bottom) in zip(columns.items(), axes.T, strict=True):
        count = {legend: len(found[scale].seeds(run)) for legend, (scale, run) in curves.items()}
        for legend, (scale, run) in curves.items():
            color, line = COLORS[rates.index(legend.split()[-1])], "-" if "GRPO" in legend else "--"
            style: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": 2.2 if count[legend] >= 10 else 1}
            share = survival(found[scale], run, matrix[scale]["window"])
            means = found[scale].smoothed(run, "entropy", matrix[scale]["window"]).mean(axis=1)
            top.step(share.index, share, where="post", label=legend.replace(" ", ", "), **style)
            bottom.plot(means.index, means, **style)
        plot_ln2(bottom)
        top.set(ylim=(-2, 102), title=title)
        seeds = {rate: [str(count.get(f"{method} {rate}", 0)) for method in ("GRPO", "GTPO")] for rate in rates}
        of_rates = ", ".join(
            f"{rate}\N{NO-BREAK SPACE}{'/'.join(counts)}" for rate, counts in seeds.items() if counts != ["0", "0"]
        )
        bottom.set_xlabel("training step\n" + fill(f"seeds GRPO/GTPO: {of_rates}", 46), fontsize=8)
    axes[0, 0].set_ylabel("seeds not lost (%)")
    axes[1, 0].set_ylabel("mean entropy ⟨H⟩ (nats)")
    add_legend(drawing, f"lost: accuracy {ACCURACY:g} points below an earlier trailing mean; thin: below ten seeds")
    return drawing


def survival(results: Results, run: str, window: int) -> Series:
    """By step, the percentage of seeds whose trailing accuracy has never been ``ACCURACY`` below its highest before."""
    curves = {seed: results.curve(run, seed, "accuracy") for seed in results.seeds(run)}
    lost = {seed: lost_step(curve, window) for seed, curve in curves.items()}
    steps = sorted({step for curve in curves.values() for step in curve.index})
    alive = DataFrame({seed: [step is None or at < step for at in steps] for seed, step in lost.items()}, index=steps)
    return 100 * alive.mean(axis=1)


def lost_step(values: Series, window: int) -> int | None:
    """The first step at which the trailing mean is ``ACCURACY`` points below its highest before."""
    means = trailing(values, window)
    lost = means.cummax() - means >= ACCURACY
    return int(lost.idxmax()) if lost.any() else None
