"""When a run collapses (the rules of docs/log.md), the figure of survival, GTPO minus GRPO at the best rate of each."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean
from textwrap import fill
from types import MappingProxyType
from typing import Any

from pandas import DataFrame, Series

from gtpo.reports.curves import COLORS, add_legend, grid, plot_ln2
from paper.figures import WIDTH, mean_of
from paper.matrix import Matrix, groups_of
from paper.results import Results
from study.comparison import compare, holm, mcnemar_p
from study.measures import Measure, SeedRuns, fall, highest, late, quarters, rounded, trailing

STORED = (  # metrics of its runs beyond those of the figures
    *("completion_length", "empty_blocks", "frac_reward_zero_std", "prefix_push", "sampler_gap"),
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
REAL = Rule(at_the_end(3.1), learn=2, lose=2)  # SmolLM2 after its warm start: pass@1 on 64 harder problems
PAPER = Rule(of_format_reward, learn=0, lose=2)  # of three seeds


@dataclass(frozen=True)
class Family:
    """A comparison of two arms, each at its own best of three rates; Holm's is over ``primary``.

    Attributes:
        names: What follows ``methods`` in the names of the runs, before the rate: a regular expression.
        rates, seeds: The seeds that choose the rates, and those that are compared.
        arms: Their runs, if the rates are not chosen; the first is subtracted.
    """

    title: str
    scale: str
    names: str
    rule: Rule
    rates: Sequence[int]
    seeds: Sequence[int]
    primary: tuple[str, ...]
    arms: tuple[str, ...] = ()
    methods: tuple[str, str] = ("grpo", "gtpo")

    def command(self, arms: Sequence[str]) -> str:
        """What makes the runs of the comparison, or first those that choose the arms."""
        of_rates = [f"{method}-{self.names}{rate}" for method in self.methods for rate in RATES]
        chosen, seeds = (of_rates, self.rates) if self.rates and len(arms) < 2 else (arms, self.seeds)
        return f"python -m study {self.scale} --only {' '.join(chosen)} --seeds $(seq {seeds[0]} {seeds[-1]})"


MEANS = ("accuracy", "formatting", "entropy")
RATES = ("0.3e-3", "0.6e-3", "1e-3")
ADMISSION = range(301, 305)  # seeds of GRPO that admit a rate
LOSING, OWN_BETAS = ((f"grpo-{base}-1.2e-3", f"gtpo-{base}-1.2e-3") for base in ("headroom", "plain"))
CORRECTION, DR = "gtpo-control-correction", "grpo-control-dr"
_control = partial(Family, scale="collapse", names="control", rule=GUESSING, rates=(), seeds=range(401, 409))
_part = partial(Family, scale="headroom", names="", rule=GUESSING, rates=range(331, 334), seeds=range(361, 381))
_again = partial(_control, seeds=range(431, 451))
CONDITIONS = "(?:same|bits4|bits2|bits1|cool|hot)-"
FAMILIES = (
    Family("published", "collapse", "", TINY, range(305, 308), range(351, 371), ("accuracy", "formatting")),
    Family("guessing", "collapse", "headroom-", GUESSING, range(305, 308), range(351, 371), ("accuracy", "formatting")),
    Family("losing", "collapse", "headroom-", GUESSING, (), range(311, 323), ("accuracy",), LOSING),
    Family("own betas", "collapse", "plain-", GUESSING, (), range(311, 321), ("accuracy",), OWN_BETAS),
    Family("real model", "collapse", "smol-", REAL, (), range(301, 307), ("accuracy", "formatting")),
    Family("conditions", "collapse", CONDITIONS, GUESSING, (), range(311, 331), ("accuracy", "formatting")),
    Family("plain", "headroom", "", GUESSING, range(331, 334), range(341, 361), ("greedy accuracy", "pass@1")),
    Family("greedy", "collapse", "first-", TINY, (), range(381, 401), (), ("grpo-first-1e-3", "gtpo-first-1e-3")),
    _part("correction alone", primary=(), methods=("grpo", "gtpo-correction")),
    _part("entropy control alone", primary=(), methods=("grpo", "gtpo-entropy")),
    _part("Dr. GRPO", primary=(), methods=("grpo", "grpo-dr")),
    _control("correction minus GRPO", primary=("tag_logps/reasoning_start",), arms=("grpo-control", CORRECTION)),
    _control("Dr. GRPO minus GRPO", primary=(), arms=("grpo-control", DR)),
    _control("GTPO minus GRPO", primary=(), arms=("grpo-control", "gtpo-control")),
    _control("correction minus Dr. GRPO", primary=(), arms=(DR, CORRECTION)),
    _control("kept: GTPO", primary=("late formatting",), arms=("grpo-control", "gtpo-control"), seeds=range(411, 423)),
    _control("kept: correction", primary=(), arms=("grpo-control", CORRECTION), seeds=range(411, 423)),
    _again("again: correction", primary=("late formatting",), arms=("grpo-control", CORRECTION)),
    _again("again: Dr. GRPO", primary=(), arms=("grpo-control", DR)),
    _again("again: correction minus Dr. GRPO", primary=(), arms=(DR, CORRECTION)),
)
MEASURES = {
    "greedy accuracy": ("pass@1", "arithmetic_greedy"),
    "pass@1": ("pass@1", "arithmetic"),
    **{name: (name, "late") for name in (*MEANS, "completion_length")},
}
CONTROL_MEASURES = {name: (name, "mean") for name in (*STORED[-4:], "formatting", "completion_length")}
CONTROL_MEASURES |= {f"late {name}": (name, "last_third") for name in (*MEANS, *STORED[:3])}


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
    """GTPO minus GRPO, paired by seed: ``rates`` of each arm, ``arms``, ``rows`` by measure, the seeds ``lost``.

    ``origins``: run -> revision and machine; a pair of two is not compared.
    """
    rates: dict[str, dict[str, Any]] = {
        name: {metric: mean_of([late(results.curve(name, seed, metric)) for seed in seeds]) for metric in MEANS}
        | {"seeds": len(seeds)}
        for method in family.methods
        for name in _of_method(results, method, family)
        if (seeds := [seed for seed in results.seeds(name) if seed in family.rates])
    }
    complete = [name for name, row in rates.items() if row["seeds"] == len(family.rates)]
    of_arm = [[name for name in _of_method(results, method, family) if name in complete] for method in family.methods]
    best = [max(names, key=lambda name: rates[name]["accuracy"][0]) for names in of_arm if len(names) == len(RATES)]
    arms = list(family.arms) or best
    found: dict[str, Any] = {"rates": rates, "arms": arms, "seeds": 0, "mixed": 0, "rows": {}, "lost": {}}
    found["command"] = family.command(arms)
    if len(arms) < 2:
        return found
    both = [seed for seed in family.seeds if all((arm, seed) in results.runs for arm in arms)]
    pairs = [s for s in both if origins.get(f"{arms[0]}-s{s}") == origins.get(f"{arms[1]}-s{s}")]
    for name, (score, of) in (CONTROL_MEASURES if family.names == "control" else MEASURES).items():
        values = []  # of both arms
        for seed in pairs:
            with suppress(KeyError):
                values.append([Measure(score, of, (arm,)).value(SeedRuns(results, seed, window)) for arm in arms])
        means = [rounded(fmean(column)) for column in zip(*values, strict=True)]
        found["rows"][name] = compare([b - a for a, b in values]) | {"primary": name in family.primary, "means": means}
    ps = {name: found["rows"][name]["p"] for name in family.primary}
    if None not in ps.values():
        for name, p in holm(ps).items():
            found["rows"][name]["holm"] = p
    judged = [[family.rule.judge(SeedRuns(results, seed, window), arm) for seed in pairs] for arm in arms]
    for kind in ("is_lost", "falls"):
        lost = [[bool(getattr(seed, kind)) for seed in seeds] for seeds in judged]
        found["lost"][kind] = {"grpo": sum(lost[0]), "gtpo": sum(lost[1]), "p": mcnemar_p(*lost)}
    return found | {"seeds": len(pairs), "mixed": len(both) - len(pairs)}


def _of_method(results: Results, method: str, family: Family) -> list[str]:
    names = dict.fromkeys(name for name, _ in results.runs)
    found = [name for name in names if re.fullmatch(rf"{method}-{family.names}[0-9.]+e-[0-9]+", name)]
    return sorted(found, key=lambda name: float("e-".join(re.findall(r"([0-9.]+)e-([0-9]+)", name)[-1])))


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
    lost = {seed: lost_step(curve, window, ACCURACY) for seed, curve in curves.items()}
    steps = sorted({step for curve in curves.values() for step in curve.index})
    alive = DataFrame({seed: [step is None or at < step for at in steps] for seed, step in lost.items()}, index=steps)
    return 100 * alive.mean(axis=1)
