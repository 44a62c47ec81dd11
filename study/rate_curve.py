"""The rate curve of each arm: what it reaches over its learning rate, with a band over seeds."""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

from gtpo.files import write_atomically
from gtpo.reports.curves import add_legend, grid, interval, plot_mean
from paper.figures import WIDTH
from paper.results import Results
from study.comparison import Arm, Base, Comparison
from study.measures import SeedRuns, measure_of

PANELS = MappingProxyType(
    {
        "accuracy late": "accuracy, last quarter (%)",
        "pass@1 sampled": "held-out pass@1 (%)",
        "formatting late": "formatting, last quarter (%)",
    }
)
APART = 0.012  # of the rate: arms at one rate stand beside one another


def rate_curve(comparison: Comparison, results: Results, base: Base, arm: Arm, measure: str) -> list[list[float]]:
    """A measure at each rate of an arm, a row for every seed that has a run at all of them."""
    names = [arm.run_name(rate) for rate in comparison.rates_for(arm)]
    measures = [measure_of(measure, name, base.benchmark_name, arm.prompts) for name in names]
    found = []
    for seed in comparison.seeds:
        runs = SeedRuns(results, seed, comparison.window)
        with suppress(KeyError):
            found.append([each.value(runs) for each in measures])
    return found


def draw_rate_curves(comparison: Comparison, every: Iterable[tuple[Base, Results]], path: Path) -> None:
    """A row per base, a column per measure of ``PANELS``; a point is the mean over seeds, with its 95 % interval."""
    every = [*every]
    figure, axes = grid(len(every), len(PANELS), width=WIDTH / len(PANELS), height=3.2)
    for (base, results), row in zip(every, axes, strict=True):
        for (measure, label), axis in zip(PANELS.items(), row, strict=True):
            axis.set(xlabel="learning rate", ylabel=label, xscale="log")
            if len(every) > 1:
                axis.set_title(base.title, loc="left", fontsize=10)
            for place, arm in enumerate(comparison.arms):
                curve = rate_curve(comparison, results, base, arm, measure)
                if not curve:
                    continue
                beside = (1 + APART) ** (place - len(comparison.arms) / 2)
                rates = [float(rate) * beside for rate in comparison.rates_for(arm)]
                style = {"color": arm.color, "linewidth": 1.6, "marker": "o", "markersize": 4}
                plot_mean(axis, arm.label, rates, curve, style)
                if len(rates) == 1 and (bar := interval([value for (value,) in curve])):  # a band of one point
                    axis.errorbar(rates, bar.mean, bar.half_width, color=arm.color, linewidth=1.6)
            axis.set_xticks([float(rate) for rate in comparison.every_rate], comparison.every_rate)
            axis.minorticks_off()
    add_legend(figure, "mean over seeds at each rate; band: its 95 % interval")
    write_atomically(path, partial(figure.savefig, dpi=100, format="png"))
