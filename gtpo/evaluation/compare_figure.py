"""The figure of a paired comparison: differences with their intervals, and every problem of both sides."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.evaluation.compare import Comparison
from gtpo.reports.curves import COLORS, grid, plain_text


def draw_comparisons(comparisons: Sequence[Comparison], output: str) -> list[str]:
    """Write one row of panels per pair of sides: the differences, then pass@1 per problem of each benchmark.

    Args:
        comparisons: As :func:`gtpo.evaluation.compare.compare_sides` returns them.
        output: Path of the figure; a PDF is written beside it.

    Returns:
        The paths of the figure.
    """
    pairs = list(dict.fromkeys(comparison.names for comparison in comparisons))
    rows = [[c for c in comparisons if c.names == names] for names in pairs]
    columns = max(sum(c.metric == "pass@1" for c in row) for row in rows)
    figure, axes = grid(len(rows), 1 + columns)
    for panels, row in zip(axes, rows, strict=True):
        _plot_differences(panels[0], row)
        scatters = [c for c in row if c.metric == "pass@1"]
        for axis, comparison in zip(panels[1:], scatters, strict=False):
            _plot_problems(axis, comparison)
        for axis in panels[1 + len(scatters) :]:
            axis.set_visible(False)
    paths = list(dict.fromkeys([output, str(Path(output).with_suffix(".pdf"))]))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _plot_differences(axis: Any, comparisons: Sequence[Comparison]) -> None:
    """A line per score: the difference in points and its 95 % interval; standard error over seeds as a thick bar."""
    first, second = (plain_text(name) for name in comparisons[0].names)
    benchmarks = list(dict.fromkeys(c.benchmark for c in comparisons))
    for height, c in enumerate(reversed(comparisons)):
        color = COLORS[benchmarks.index(c.benchmark) % len(COLORS)]
        low, high = c.interval
        axis.plot([low, high], [height, height], color=color, linewidth=1.5)
        if (error := c.errors[2]) is not None:
            span = [c.difference - error, c.difference + error]
            axis.plot(span, [height, height], color=color, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axis.plot([c.difference], [height], color=color, marker="o", markersize=5)
    labels = [f"{_title(c.benchmark)}, {c.metric}" for c in reversed(comparisons)]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(-0.6, len(labels) - 0.4)
    axis.axvline(0, color="black", linewidth=1)
    over_seeds = any(c.errors[2] is not None for c in comparisons)
    note = "\nbar: standard error over seeds" if over_seeds else ""
    axis.set_xlabel(f"difference (points); line: 95 % interval over problems{note}", fontsize=8)
    axis.set_title(f"{second}\nminus {first}", fontsize=9)


def _plot_problems(axis: Any, comparison: Comparison) -> None:
    """Each problem at its two scores; the area of a circle is the number of problems there."""
    first, second = (plain_text(name) for name in comparison.names)
    pairs = Counter(zip(*([round(100 * value, 1) for value in side] for side in comparison.per_problem), strict=True))
    sides = {"better": lambda x, y: y > x, "worse": lambda x, y: y < x, "equal": lambda x, y: y == x}
    for (name, holds), color, count in zip(
        sides.items(), (COLORS[2], COLORS[1], "grey"), comparison.counts, strict=True
    ):
        chosen = {point: number for point, number in pairs.items() if holds(*point)}
        axis.scatter(
            [x for x, _ in chosen],
            [y for _, y in chosen],
            s=[14 * number for number in chosen.values()],
            color=color,
            alpha=0.6,
            linewidths=0,
            label=f"{name}: {count}",
            clip_on=False,
        )
    axis.plot([0, 100], [0, 100], color="black", linewidth=0.8)
    axis.set_xlim(-3, 103)
    axis.set_ylim(-3, 103)
    axis.set_xlabel(f"pass@1 of {first} (%)", fontsize=8)
    axis.set_ylabel(f"pass@1 of {second} (%)", fontsize=8)
    axis.set_title(f"{_title(comparison.benchmark)}: problems", fontsize=9)
    legend = axis.legend(fontsize=7, loc="best", title=f"{second}:", title_fontsize=7)
    for handle in legend.legend_handles:
        handle.set_sizes([20])


def _title(benchmark: str) -> str:
    return BENCHMARK_TITLES.get(benchmark, plain_text(benchmark))
