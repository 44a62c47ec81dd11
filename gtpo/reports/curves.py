"""Training curves of any runs, and the mean over seeds with its 95 % interval. Matplotlib is imported when needed."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from gtpo.arguments import Values
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.reports.metrics import Rows, curve_of, reward_names
from gtpo.runs.directory import RunDirectory, existing_run, method_of

PANELS = {  # metric -> axis label; percent of the maximum reward, as in the paper
    "accuracy": "accuracy (%)",
    "formatting": "formatting (%)",
    "entropy": "entropy ⟨H⟩ (nats)",
    "conflict_tokens": "conflict tokens per completion",
}
COLORS = {  # by arm, in every figure: the method of a run, or the part of GTPO that it keeps
    "grpo": "#777777",
    "gtpo": "#0072B2",
    "correction": "#D55E00",  # without the entropy terms of GTPO
    "dr_grpo": "#009E73",
    "entropy_control": "#CC79A7",  # without the conflict correction of GTPO
    "sft": "#882255",
}
STUDENT_T: list[float] = read_yaml(Path(__file__).with_name("intervals.yaml"))["quantiles"]
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (8, 4)))  # the conditions of one arm
LINE_WIDTH = 1.8
LN2 = math.log(2)
LEAST_SEEDS = 3  # with two the interval is nine times as wide as their difference


def plot_training(runs: Mapping[str, Rows], window: int = 10, arms: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Panels over the steps of some runs: logged values pale, and over them their trailing mean.

    Held-out rows have a marker per evaluation; at step 0 that of the base model (``--eval_on_start``). Accuracy in any
    format is dotted, and not seen where it equals accuracy.

    Args:
        runs: The logged rows by legend label.
        window: Logged steps of the mean.
        arms: The arm of each label, a key of ``COLORS``; by default the label, such as GTPO.
    """
    panels = panels_of(runs.values())
    styles = line_styles({label: arms.get(label, label.lower()) for label in runs})
    rows_of_panels = 2 if len(panels) == 4 else 1
    figure, axes = grid(rows_of_panels, len(panels) // rows_of_panels)
    for axis, (metric, title) in zip(axes.flat, panels.items(), strict=True):
        for label, rows in runs.items():
            _plot_metric(axis, plain_text(label), rows, metric, window, styles[label])
        if metric == "entropy":
            plot_ln2(axis)
        axis.set_xlabel("training step")
        axis.set_title(plain_text(title))
    add_legend(figure)
    figure.suptitle(
        f"Samples of the policy; pale: as logged, line: mean of the last {window} logged steps", fontsize=10
    )
    return figure


def _plot_metric(
    axis: Any,
    label: str,
    rows: Rows,
    metric: str,
    window: int,
    style: Values,
) -> None:
    """One metric of one run: as logged, smoothed, and on held-out rows."""
    pale = {"color": style["color"], "alpha": 0.35, "linewidth": 0.8}
    markers = style | {"marker": "o", "markersize": 4}
    plot_run(axis, None, rows, metric, 1, pale)
    plot_run(axis, label, rows, metric, window, style)
    if metric == "accuracy":
        dotted = style | {"linestyle": ":", "zorder": 1.9}  # below the line of accuracy
        any_format = f"{label}, any format, where it differs"
        plot_run(axis, any_format, rows, "accuracy_lenient", window, dotted)
    plot_run(axis, f"{label}, held out", rows, f"eval_{metric}", 1, markers)


def plain_text(text: str) -> str:
    """Text as matplotlib shows it unchanged; between two dollar signs it reads mathematics."""
    return text.replace("$", r"\$")


def panels_of(runs: Collection[Rows]) -> dict[str, str]:
    """The panels of some runs: custom rewards, the metrics of ``PANELS`` that were logged; the loss if that is one."""
    every: Rows = list(chain(*runs))
    own = sorted({*reward_names(every)} - {"format_reward", "accuracy_reward"})
    panels = {f"rewards/{name}/mean": name for name in own}
    for metric, label in PANELS.items():
        if any(row.get(metric) is not None for row in every):
            panels[metric] = label
    if len(panels) < 2:
        panels = {"loss": "loss"} | panels
    return panels


def draw_runs(runs: Sequence[str], labels: Sequence[str] | None, output: str, window: int) -> str:
    """Write one figure that compares some run directories, labelled by their names by default; return its path."""
    labels = labels or [Path(run).name for run in runs]
    if not len(runs) == len(labels) == len({*labels}):
        raise UsageError(f"{len(runs)} runs have the labels {', '.join(labels)}: give each its own with --labels.")
    rows = {}
    arms = {}
    for label, directory in zip(labels, runs, strict=True):
        run = existing_run(directory, having="metrics")
        rows[label] = run.read_metrics()
        if run.config.is_file():
            arms[label] = arm_of_run(run)
    figure = plot_training(rows, window, arms)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
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


def arm_of_run(run: RunDirectory) -> str:
    """The arm of a run in ``COLORS``, by its stored settings."""
    return arm_of(method_of(run) or "", run.read_config())


def arm_of(method: str, settings: Values) -> str:
    """The key of ``COLORS`` of gtpo, grpo or sft with some settings; those that are not given have their defaults."""
    if settings.get("objective"):
        return "objective"  # of a user: black
    if method == "grpo" and settings.get("loss_type") == "dr_grpo":
        return "dr_grpo"
    if method != "gtpo":
        return method
    if not settings.get("conflict_correction", True):
        return "entropy_control"
    is_filtered = settings.get("entropy_filter") != "off"
    return "gtpo" if is_filtered or settings.get("gamma") != 0 else "correction"


def line_styles(arms: Mapping[str, str]) -> dict[str, Values]:
    """The style of each legend label, by its arm: a color for the arm, a dash for each label of the same arm."""
    used: Counter[str] = Counter()
    styles = {}
    for label, arm in arms.items():
        styles[label] = {
            "color": COLORS.get(arm, "black"),
            "linestyle": DASHES[used[arm] % len(DASHES)],
            "linewidth": LINE_WIDTH,
        }
        used[arm] += 1
    return styles


def plot_run(axis: Any, legend: str | None, rows: Rows, metric: str, window: int, style: Values) -> None:
    steps, values = curve_of(rows, metric, window)
    if steps:
        axis.plot(steps, values, label=legend, **style)


def plot_mean(axis: Any, legend: str, x: Sequence[float], curves: list[list[float]], style: Values) -> None:
    """The mean of one curve per seed, and from three seeds on its 95 % interval as a band; gaps where a seed is NaN."""
    means = []
    low = []
    high = []
    for values in zip(*curves, strict=True):
        means.append(fmean(values))
        band = interval(values)
        low.append(band.low if band else math.nan)
        high.append(band.high if band else math.nan)
    if not all(map(math.isnan, low)):
        axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axis.plot(x, means, label=legend, **style)


def plot_ln2(axis: Any) -> None:
    axis.axhline(LN2, color="black", linestyle="--", linewidth=1, label="ln 2")
    axis.set_ylim(bottom=0)


def add_legend(figure: Any, title: str | None = None) -> None:
    """One legend below all panels, without duplicate labels."""
    handles: Values = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    entry_width = 0.07 * max(map(len, handles), default=0) + 0.6  # inches
    columns = int(figure.get_size_inches()[0] / entry_width)
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=max(1, min(len(handles), columns)),
        frameon=False,
        fontsize=9,
        handlelength=2.8,  # a whole period of each dash
        title=title,
        title_fontsize=9,
    )


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
    half_width = half_width_of(stdev(values), len(values))
    return Interval(mean, half_width, mean - half_width, mean + half_width)


def half_width_of(deviation: float, count: int) -> float:
    """Of the 95 % t-interval of the mean of ``count`` values, ``LEAST_SEEDS`` or more, with a standard deviation."""
    freedom = count - 1
    quantile = 1.96 + (2.3723 + 2.82 / freedom) / freedom  # an expansion in 1 / freedom
    if freedom <= 30:
        quantile = STUDENT_T[freedom - 2]
    spread = quantile * deviation
    return spread / math.sqrt(count)  # in this order: the stored digits
