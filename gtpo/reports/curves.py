"""Training curves of any runs, and the mean over seeds with its 95 % interval. Matplotlib is imported when needed."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.reports.metrics import Rows, curve_of, reward_names
from gtpo.runs.directory import existing_run

PANELS = {  # metric -> axis label; percent of the maximum reward, as in the paper
    "accuracy": "accuracy (%)",
    "formatting": "formatting (%)",
    "entropy": "entropy ⟨H⟩ (nats)",
    "conflict_tokens": "conflict tokens per completion",
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")  # Okabe and Ito, and Tol's wine
LINE_STYLES = ("-", "--", ":", "-.")  # the next one where the colors repeat
LN2 = math.log(2)
LEAST_SEEDS = 3  # with two the interval is nine times as wide as their difference
# 97.5 % quantiles of Student's t distribution with 2 to 30 degrees of freedom; with more, that of 30, which is wider
T = (
    *(4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def plot_training(runs: dict[str, list[dict[str, Any]]], window: int = 10) -> Any:
    """Panels over the steps of each run, by legend label: logged values thin, their trailing mean bold, held-out rows
    dotted, the base model on them dashed (``--eval_on_start``), accuracy in any format dash-dotted.
    """
    panels = {metric: plain_text(label) for metric, label in panels_of(runs.values()).items()}
    runs = {plain_text(name): rows for name, rows in runs.items()}
    dotted = {"linestyle": ":", "linewidth": 1.2, "marker": "o", "markersize": 3}  # a marker per evaluation
    rows_of_panels = 2 if len(panels) == 4 else 1
    figure, axes = grid(rows_of_panels, len(panels) // rows_of_panels)
    for axis, (metric, label) in zip(axes.flat, panels.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            style = line_style(number)
            plot_run(axis, None, rows, metric, 1, {"color": style["color"], "alpha": 0.25, "linewidth": 0.8})
            plot_run(axis, name, rows, metric, window, style)
            plot_run(axis, f"{name}, held out", rows, f"eval_{metric}", 1, style | dotted)
            for row in rows:
                if row.get("step") == 0 and row.get(f"eval_{metric}") is not None:
                    dashed = {"color": style["color"], "linestyle": "--", "linewidth": 1.0}
                    axis.axhline(row[f"eval_{metric}"], label=f"{name}, base model, held out", **dashed)
            if metric == "accuracy":
                thin = style | {"linestyle": "-.", "linewidth": 1.0}
                plot_run(axis, f"{name}, any format", rows, "accuracy_lenient", window, thin)
        if metric == "entropy":
            plot_ln2(axis)
        axis.set_xlabel("training step")
        axis.set_title(label)
    add_legend(figure)
    figure.suptitle(f"Training on samples of the policy; bold: mean of the last {window} steps", fontsize=10)
    return figure


def plain_text(text: str) -> str:
    """Text as matplotlib shows it unchanged; between two dollar signs it reads mathematics."""
    return text.replace("$", r"\$")


def panels_of(runs: Collection[list[dict[str, Any]]]) -> dict[str, str]:
    """The panels of some runs: custom rewards, the metrics of ``PANELS`` that were logged; the loss if that is one."""
    logged = {key for rows in runs for row in rows for key, value in row.items() if value is not None}
    custom = sorted({name for rows in runs for name in reward_names(rows)} - {"format_reward", "accuracy_reward"})
    panels = {f"rewards/{name}/mean": name for name in custom}
    panels |= {metric: label for metric, label in PANELS.items() if metric in logged}
    return panels if len(panels) > 1 else {"loss": "loss"} | panels


def draw_runs(runs: Sequence[str], labels: Sequence[str] | None, output: str, window: int) -> str:
    """Write one figure that compares some run directories, labelled by their names by default; return its path."""
    labels = labels or [Path(run).name for run in runs]
    if not len(runs) == len(labels) == len(set(labels)):
        raise UsageError(f"{len(runs)} runs have the labels {', '.join(labels)}: give each its own with --labels.")
    if window < 1:
        raise UsageError(f"--window is {window}: expected at least 1 step.")
    rows = {label: existing_run(run).read_metrics() for label, run in zip(labels, runs, strict=True)}
    figure = plot_training(rows, window)
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda unfinished: figure.savefig(unfinished, dpi=150, format=path.suffix[1:]))
    return output


def grid(rows: int, columns: int, width: float = 3.7, height: float = 3.0) -> tuple[Any, Any]:
    """A figure with panels of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)],
        "linewidth": max(1.0, 3.4 - 0.5 * number),  # identical curves stay visible behind each other
    }


def plot_run(axis: Any, legend: str | None, rows: Rows, metric: str, window: int, style: dict[str, Any]) -> None:
    steps, values = curve_of(rows, metric, window)
    if steps:
        axis.plot(steps, values, label=legend, **style)


def plot_mean(axis: Any, legend: str, x: Sequence[float], curves: list[list[float]], style: dict[str, Any]) -> None:
    """The mean of one curve per seed, and from three seeds on its 95 % interval as a band; gaps where a seed is NaN."""
    bands = [interval(values) for values in zip(*curves, strict=True)]
    if any(bands):
        low, high = ([getattr(band, end, math.nan) for band in bands] for end in ("low", "high"))
        axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axis.plot(x, [fmean(values) for values in zip(*curves, strict=True)], label=legend, **style)


def plot_ln2(axis: Any) -> None:
    axis.axhline(LN2, color="black", linestyle="--", linewidth=1, label="ln 2")
    axis.set_ylim(bottom=0)


def add_legend(figure: Any, title: str | None = None) -> None:
    """One legend below all panels, without duplicate labels."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        columns = max(1, min(len(handles), int(figure.get_size_inches()[0] / (0.07 * max(map(len, handles)) + 0.5))))
        options = {"ncols": columns, "frameon": False, "fontsize": 9, "title": title, "title_fontsize": 9}
        figure.legend(handles.values(), handles, loc="outside lower center", **options)


class Interval(NamedTuple):
    """A mean over seeds with its 95 % t-interval."""

    mean: float
    half_width: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval | None:
    """The mean and 95 % t-interval of one value per seed; None of fewer than ``LEAST_SEEDS``, or of a NaN."""
    if len(values) < LEAST_SEEDS or any(map(math.isnan, values)):
        return None
    mean = fmean(values)
    half_width = T[min(len(values) - 1, 30) - 2] * stdev(values) / math.sqrt(len(values))
    return Interval(mean, half_width, mean - half_width, mean + half_width)
