"""When a run collapses (the rules of docs/log.md), the figure of survival, GTPO minus GRPO at the best rate of each."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from pandas import DataFrame, Series

from gtpo.paper.figures import WIDTH, mean_of
from gtpo.paper.matrix import Matrix, groups_of
from gtpo.paper.results import Results
from gtpo.reports.curves import COLORS, add_legend, grid, plot_ln2
from study.comparison import compare, holm, mcnemar_p
from study.measures import Measure, SeedRuns, fall, highest, late, quarters, trailing

STORED = (  # metrics of its runs beyond those of the figures
    *("completion_length", "empty_blocks", "frac_reward_zero_std"),
    *(f"tag_logps/{tag}" for tag in ("reasoning_start", "reasoning_end", "answer_start", "answer_end")),
)
LEARNS = 5.0  # points above the base, in a trailing mean
ACCURACY, FORMATTING = 20.0, 10.0  # points from the highest trailing mean to the last quarter: lost
ENTROPY = 0.05  # nats that the last quarter of a lost run is above the first


@dataclass(frozen=True)
class Seed:
    """What one run did."""

    learns: bool
    falls: bool
    entropy_rises: bool = True

    @property
    def is_lost(self) -> bool:
        return self.falls and self.entropy_rises


@dataclass(frozen=True)
class Rule:
    """``judge`` is given a run by its seed and name; a rate is admitted if so many seeds or more learn and are lost."""

    judge: Callable[[SeedRuns, str], Seed]
    learn: int
    lose: int

    def admits(self, seeds: Sequence[Seed]) -> bool:
        return sum(seed.learns for seed in seeds) >= self.learn and sum(seed.is_lost for seed in seeds) >= self.lose


def lost_step(values: Series, window: int, points: float = 0.0, above: float = -inf, below: float = inf) -> int | None:
    """The first step at which the trailing mean is below a level, and so many points below its highest before.

    The highest has to be above a level too.
    """
    means = trailing(values, window)
    high = means.cummax()
    lost = (high > above) & (means < below) & (high - means >= points)
    return int(lost.idxmax()) if lost.any() else None


def at_the_end(base: float, share: float | None = None) -> Callable[[SeedRuns, str], Seed]:
    """A run is lost if it has lost ``ACCURACY``, or a share of its gain over the base, or ``FORMATTING`` at its end."""

    def judge(runs: SeedRuns, name: str) -> Seed:
        accuracy, formatting, entropy = (runs.curve(name, metric) for metric in ("accuracy", "formatting", "entropy"))
        best, (first, *_, last) = highest(accuracy, runs.window), quarters(entropy)
        limit = ACCURACY if share is None else share * max(best - base, 0.0)
        falls = fall(accuracy, runs.window) >= limit or fall(formatting, runs.window) >= FORMATTING
        return Seed(best >= base + LEARNS, falls, round(last - first, 9) >= ENTROPY)

    return judge


def of_format_reward(runs: SeedRuns, name: str) -> Seed:
    """A run of the paper is lost if the format reward, 10 at most, is below 9.0 after it was above 9.5."""
    formatting = runs.curve(name, "formatting")
    collapses = lost_step(formatting, runs.window, above=95.0, below=90.0) is not None
    return Seed(highest(formatting, runs.window) > 95.0, collapses)


TINY = Rule(at_the_end(49.0), learn=3, lose=2)  # base-16f86973: pass@1 on 60 problems (results/tiny/evaluation.json)
GUESSING = Rule(at_the_end(33.6, share=0.5), learn=3, lose=2)  # base-97e8bdbf: 200 (results/demo/summary.json)
PAPER = Rule(of_format_reward, learn=0, lose=2)  # of three seeds


@dataclass(frozen=True)
class Family:
    """A comparison of GTPO and GRPO, each at its own best of three rates; Holm's correction is over ``primary``.

    Attributes:
        names: What follows the method in the names of its runs, before the rate: a regular expression.
        rates, seeds: The seeds that choose the rates, and those that are compared.
        rate: Of both arms, if it is not chosen.
    """

    title: str
    scale: str
    names: str
    rule: Rule
    rates: Sequence[int]
    seeds: Sequence[int]
    primary: tuple[str, ...]
    rate: str = ""

    def command(self, arms: Sequence[str]) -> str:
        """What makes the runs of the comparison, or first those that choose the arms."""
        of_rates = [f"{method}-{self.names}{rate}" for method in ("grpo", "gtpo") for rate in RATES]
        chosen, seeds = (of_rates, self.rates) if self.rates and len(arms) < 2 else (arms, self.seeds)
        return f"python -m study {self.scale} --only {' '.join(chosen)} --seeds $(seq {seeds[0]} {seeds[-1]})"


RATES = ("0.3e-3", "0.6e-3", "1e-3")
ADMISSION = range(301, 305)  # seeds of GRPO that admit a rate
CONDITIONS = "(?:same|bits4|bits2|bits1|cool|hot)-"
FAMILIES = (
    Family("published", "collapse", "", TINY, range(305, 308), range(351, 371), ("accuracy", "formatting")),
    Family("guessing", "collapse", "headroom-", GUESSING, range(305, 308), range(351, 371), ("accuracy", "formatting")),
    Family("losing", "collapse", "headroom-", GUESSING, (), range(311, 323), ("accuracy",), "1.2e-3"),
    Family("conditions", "collapse", CONDITIONS, GUESSING, (), range(311, 331), ("accuracy", "formatting")),
    Family("plain", "headroom", "", GUESSING, range(331, 334), range(341, 361), ("greedy accuracy", "pass@1")),
)
MEASURES = {
    "greedy accuracy": ("pass@1", "arithmetic_greedy"),
    "pass@1": ("pass@1", "arithmetic"),
    **{name: (name, "late") for name in ("accuracy", "formatting", "entropy", "completion_length")},
}


def admission(results: Results, window: int, family: Family) -> dict[str, dict[str, Any]]:
    """Run of GRPO -> its seeds of ``ADMISSION``, how many learn and are lost, and whether the rule admits it."""
    rows = {}
    for name in _of_method(results, "grpo", family):
        runs = [SeedRuns(results, seed, window) for seed in results.seeds(name) if seed in ADMISSION]
        found = [family.rule.judge(run, name) for run in runs]
        if found:
            rows[name] = {
                "seeds": [run.seed for run in runs],
                "learns": sum(seed.learns for seed in found),
                "lost": sum(seed.is_lost for seed in found),
                "admitted": family.rule.admits(found),
                **{key: [round(late(run.curve(name, key)), 1) for run in runs] for key in ("accuracy", "formatting")},
                "entropy": [round(late(e) - quarters(e)[0], 3) for e in (run.curve(name, "entropy") for run in runs)],
            }
    return rows


def comparison(
    results: Results, window: int, family: Family, origins: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """GTPO minus GRPO, paired by seed: ``rates`` of each arm, ``arms``, ``rows`` by measure, and the seeds ``lost``.

    ``origins``: run -> revision and machine; a pair of two is not compared.
    """
    rates: dict[str, dict[str, Any]] = {
        name: {metric: mean_of([late(results.curve(name, seed, metric)) for seed in seeds]) for metric in MEANS}
        | {"seeds": len(seeds)}
        for method in ("grpo", "gtpo")
        for name in _of_method(results, method, family)
        if (seeds := [seed for seed in results.seeds(name) if seed in family.rates])
    }
    complete = [name for name, row in rates.items() if row["seeds"] == len(family.rates)]
    of_arm = [[name for name in complete if name.startswith(method)] for method in ("grpo", "gtpo")]
    best = [max(names, key=lambda name: rates[name]["accuracy"][0]) for names in of_arm if len(names) == len(RATES)]
    arms = [f"{method}-{family.names}{family.rate}" for method in ("grpo", "gtpo")] if family.rate else best
    found: dict[str, Any] = {"rates": rates, "arms": arms, "seeds": 0, "mixed": 0, "rows": {}, "lost": {}}
    found["command"] = family.command(arms)
    if len(arms) < 2:
        return found
    both = [seed for seed in family.seeds if all((arm, seed) in results.runs for arm in arms)]
    pairs = [s for s in both if origins.get(f"{arms[0]}-s{s}") == origins.get(f"{arms[1]}-s{s}")]
    for name, (score, of) in MEASURES.items():
        differences = []
        for seed in pairs:
            with suppress(KeyError):
                grpo, gtpo = (Measure(score, of, (arm,)).value(SeedRuns(results, seed, window)) for arm in arms)
                differences.append(gtpo - grpo)
        found["rows"][name] = compare(differences) | {"primary": name in family.primary}
    ps = {name: found["rows"][name]["p"] for name in family.primary}
    if None not in ps.values():
        for name, p in holm(ps).items():
            found["rows"][name]["holm"] = p
    judged = [[family.rule.judge(SeedRuns(results, seed, window), arm) for seed in pairs] for arm in arms]
    for kind in ("is_lost", "falls"):
        lost = [[bool(getattr(seed, kind)) for seed in seeds] for seeds in judged]
        found["lost"][kind] = {"grpo": sum(lost[0]), "gtpo": sum(lost[1]), "p": mcnemar_p(*lost)}
    return found | {"seeds": len(pairs), "mixed": len(both) - len(pairs)}


MEANS = ("accuracy", "formatting", "entropy")


def _of_method(results: Results, method: str, family: Family) -> list[str]:
    names = dict.fromkeys(name for name, _ in results.runs)
    found = [name for name in names if re.fullmatch(rf"{method}-{family.names}[0-9.]+e-[0-9]+", name)]
    return sorted(found, key=lambda name: float("e-".join(re.findall(r"([0-9.]+)e-([0-9]+)", name)[-1])))


def draw_survival(matrix: Matrix, figure: str, results: Results, window: int) -> Any:
    """A row per group: share of seeds that have not lost ``ACCURACY`` points of trailing accuracy, and the entropy."""
    groups = {
        title: {legend: run for legend, run in curves.items() if results.seeds(run)}
        for title, curves in groups_of(matrix, figure, figure).items()
    }
    shown = {title: curves for title, curves in groups.items() if curves}
    drawing, axes = grid(max(1, len(shown)), 2, width=WIDTH / 2, height=2.6)
    for (title, curves), (left, right) in zip(shown.items(), axes, strict=False):
        rates = sorted({legend.split()[-1] for legend in curves}, key=float)
        for legend, run in curves.items():
            style = {"color": COLORS[rates.index(legend.split()[-1])], "linestyle": "-" if "GRPO" in legend else "--"}
            share = survival(results, run, window)
            seeds = dict.fromkeys(len(results.seeds(row[legend])) for row in shown.values() if legend in row)
            label = f"{legend} (n = {' and '.join(map(str, seeds))})"  # one entry for the row of each group
            left.step(share.index, share, where="post", label=label, **style)
            means = results.smoothed(run, "entropy", window).mean(axis=1)
            right.plot(means.index, means, **style)
        plot_ln2(right)
        left.set_title(title, loc="left", fontsize=10)
        left.set(ylim=(-2, 102), xlabel="training step", ylabel="seeds not lost (%)")
        right.set(xlabel="training step", ylabel="entropy ⟨H⟩ (nats)")
    lost = f"lost: accuracy {ACCURACY:g} points below an earlier trailing mean"
    add_legend(drawing, f"{lost}; right: mean over n seeds; color: learning rate")
    return drawing


def survival(results: Results, run: str, window: int) -> Series:
    """By step, the percentage of seeds whose trailing accuracy has never been ``ACCURACY`` below its highest before."""
    curves = {seed: results.curve(run, seed, "accuracy") for seed in results.seeds(run)}
    lost = {seed: lost_step(curve, window, ACCURACY) for seed, curve in curves.items()}
    steps = sorted({step for curve in curves.values() for step in curve.index})
    alive = DataFrame({seed: [step is None or at < step for at in steps] for seed, step in lost.items()}, index=steps)
    return 100 * alive.mean(axis=1)
