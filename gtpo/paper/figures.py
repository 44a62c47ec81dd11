"""The paper's figures and Table 1, and training curves of any runs. Matplotlib is imported when a figure is drawn."""

import csv
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError
from gtpo.paper.matrix import Matrix, experiments_of, find_figure, groups_of, runs_of
from gtpo.paper.results import Results
from gtpo.runs import run_of

PANELS = {  # metric -> axis label; percent of the maximum reward, as in the paper
    "accuracy": "accuracy (%)",
    "formatting": "formatting (%)",
    "entropy": "entropy ⟨H⟩ (nats)",
    "conflict_tokens": "conflict tokens per completion",
}
LABELS = PANELS | {
    "kl": "KL divergence (nats)",
    "filtered_fraction": "completions filtered, δ = 0 (share)",
    "rewards/word_reward/mean": "required word (reward, 0 to 10)",
    "pass": "pass@k (%)",
    "maj": "maj@k (%)",
}
SCORES = ("pass", "maj")  # panels of an evaluation, over k
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, colorblind-safe
LINE_STYLES = ("-", "--", ":", "-.")  # the next one where the colors repeat
LN2 = math.log(2)
METHODS = {"sft": "SFT", "grpo": "GRPO", "gtpo": "GTPO"}  # rows of Table 1


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over the last ``window`` values; over fewer at the start."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def seed_curves(runs: dict[int, list[dict[str, Any]]], metric: str, window: int) -> tuple[list[int], list[list[float]]]:
    """The smoothed curve of each seed, at the steps that all seeds logged.

    Args:
        runs: Seed -> the rows of its metrics.
        metric: Name of the metric.
        window: Steps of the trailing mean.

    Returns:
        The steps, and for each seed its value at every step; both empty if no run logged the metric.
    """
    curves = []
    for rows in runs.values():
        logged = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
        if logged:
            curves.append(dict(zip(logged, smooth(list(logged.values()), window), strict=True)))
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return steps, [[curve[step] for step in steps] for curve in curves]


# Training curves of any runs


def plot_training(runs: dict[str, list[dict[str, Any]]], window: int = 10, panels: dict[str, str] | None = None) -> Any:
    """One row of panels over the training steps: the logged values of each run thin, their trailing mean bold.

    Args:
        runs: Legend label -> the rows of :meth:`gtpo.runs.RunDirectory.read_metrics`.
        window: Steps of the trailing mean.
        panels: Metric -> panel title; by default :func:`panels_of`.

    Returns:
        The matplotlib figure.
    """
    panels = panels or panels_of(runs.values())
    figure, axes = _grid(1, len(panels))
    for axis, (metric, label) in zip(axes[0], panels.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            steps, raw = seed_curves({0: rows}, metric, 1)
            if steps:
                axis.plot(steps, raw[0], color=_style(number)["color"], alpha=0.25, linewidth=0.8)
            _plot_seeds(axis, name, {0: rows}, metric, window, number)
        if metric == "entropy":
            _plot_ln2(axis)
        axis.set_xlabel("training step")
        axis.set_title(label)
    _add_legend(figure)
    figure.suptitle(f"Training on samples of the policy; bold: mean of the last {window} steps", fontsize=10)
    return figure


def reward_names(rows: list[dict[str, Any]]) -> list[str]:
    """The reward functions of a run, from its metrics."""
    names = (re.fullmatch("rewards/(.+)/mean", key) for key in rows[0])
    return [match[1] for match in names if match]


def panels_of(runs: Collection[list[dict[str, Any]]]) -> dict[str, str]:
    """The panels of some runs: custom rewards, the metrics of ``PANELS`` that were logged; the loss if that is one."""
    logged = {key for rows in runs for row in rows for key, value in row.items() if value is not None}
    custom = sorted({name for rows in runs for name in reward_names(rows)} - {"format_reward", "accuracy_reward"})
    panels = {f"rewards/{name}/mean": name for name in custom}
    panels |= {metric: label for metric, label in PANELS.items() if metric in logged}
    return panels if len(panels) > 1 else {"loss": "loss"} | panels


def draw_runs(runs: Sequence[str], labels: Sequence[str] | None, output: str, window: int) -> str:
    """Write one figure that compares some runs.

    Args:
        runs: Run directories.
        labels: Legend labels; by default the directory names.
        output: Path of the figure; its suffix sets the format.
        window: Steps of the trailing mean.

    Returns:
        ``output``.

    Raises:
        UsageError: If labels are missing or duplicate, or a run has no metrics.
    """
    labels = labels or [Path(run).name for run in runs]
    if len(labels) != len(runs):
        raise UsageError(f"--labels has {len(labels)} labels for {len(runs)} runs: give one per run.")
    if duplicate := next((label for label in labels if list(labels).count(label) > 1), None):
        raise UsageError(f"two runs have the label {duplicate!r}: give each its own with --labels.")
    if window < 1:
        raise UsageError(f"--window is {window}: expected at least 1 step.")
    rows = {label: run_of(run).read_metrics() for label, run in zip(labels, runs, strict=True)}
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    plot_training(rows, window).savefig(output, dpi=150)
    return output


# The paper's figures


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper; runs without results are omitted.

    Lines are the mean over seeds of the smoothed curves, bands extend from the lowest to the highest seed.

    Returns:
        The matplotlib figure. The first panel of each group carries the group's title.
    """
    spec, groups = find_figure(matrix, name), groups_of(matrix, name, scale)
    in_columns = spec.get("groups") == "columns" and len(groups) > 1
    figure, axes = _grid(*((len(spec["panels"]), len(groups)) if in_columns else (len(groups), len(spec["panels"]))))
    for (title, curves), row in zip(groups.items(), axes.T if in_columns else axes, strict=True):
        benchmark = spec.get("benchmarks", {}).get(title, [None])[0]
        for axis, metric in zip(row, spec["panels"], strict=True):
            for number, (legend, run) in enumerate(curves.items()):
                if metric in SCORES:
                    entries = results.scores.get(run, {}).get(benchmark, {})
                    _plot_scores(axis, legend, entries, metric, number)
                else:
                    _plot_seeds(axis, legend, results.metrics.get(run, {}), metric, matrix[scale]["window"], number)
            if metric == "entropy":
                _plot_ln2(axis)
            axis.set_xlabel("k" if metric in SCORES else "training step")
            axis.set_ylabel(LABELS[metric])
        row[0].set_title(title, loc="left", fontsize=10)
    _add_legend(figure)
    return figure


def _grid(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7 * columns, 3.0 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)],
        "linewidth": max(1.0, 3.4 - 0.5 * number),  # identical curves stay visible behind each other
    }


def _plot_seeds(
    axis: Any, legend: str, runs: dict[int, list[dict[str, Any]]], metric: str, window: int, number: int
) -> None:
    steps, curves = seed_curves(runs, metric, window)
    if not steps:
        return
    style = _style(number)
    if len(curves) > 1:
        _plot_band(axis, steps, curves, style)
    axis.plot(steps, _means(curves), label=legend, **style)


def _plot_scores(axis: Any, legend: str, entries: dict[int, dict[str, Any]], score: str, number: int) -> None:
    """pass@k or maj@k over k on a logarithmic axis; ``entries``: seed -> entry of an evaluation."""
    tables = [{int(k): value for k, value in entry["scores"][score].items()} for entry in entries.values()]
    ks = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not ks:
        return
    curves, style = [[table[k] for k in ks] for table in tables], _style(number)
    if len(curves) > 1:
        _plot_band(axis, ks, curves, style)
    axis.plot(ks, _means(curves), marker="o", markersize=3, label=legend, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])


def _means(curves: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def _plot_band(axis: Any, x: Sequence[float], curves: list[list[float]], style: dict[str, Any]) -> None:
    columns = list(zip(*curves, strict=True))
    low, high = [min(values) for values in columns], [max(values) for values in columns]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _plot_ln2(axis: Any) -> None:
    axis.axhline(LN2, color="black", linestyle="--", linewidth=1, label="ln 2")
    axis.set_ylim(bottom=0)


def _add_legend(figure: Any) -> None:
    """One legend below all panels, without duplicate labels."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        columns = max(1, min(len(handles), int(figure.get_size_inches()[0] // 1.8)))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


# Table 1


def table1(matrix: Matrix, scale: str, results: Results) -> list[dict[str, Any]]:
    """Table 1 as rows: group, method, run, seeds, benchmark, score, k; in percent ours, low, high (over seeds), paper.

    As in the paper, GRPO and GTPO are represented by the variant with the highest in-distribution pass@k at the largest
    k. Our pass@k is the unbiased estimate. A number that does not exist is None.
    """
    spec = matrix["table1"]
    benchmarks = {name for group in groups_of(matrix, "table1", scale) for name in spec["benchmarks"][group]}
    rows = []
    for group, curves in groups_of(matrix, "table1", scale).items():
        paper = spec["values"].get(group, {})
        for method, title in METHODS.items():
            runs = [run for run in curves.values() if run.startswith(method)]
            run = best_variant(results, runs, matrix["figures"]["fig2"]["benchmarks"][group][0])
            published = iter(paper.get(title, []))
            for benchmark, score, ks in spec["columns"]:
                for k in ks:
                    theirs = next(published, None)
                    if benchmark not in benchmarks:
                        continue
                    entries = results.scores.get(run or "", {}).get(benchmark, {})
                    tables = [entry["scores"][score] for entry in entries.values()]
                    values = [table[str(k)] for table in tables if str(k) in table]
                    rows.append(
                        {
                            "group": group,
                            "method": title,
                            "run": run,
                            "seeds": len(values),
                            "benchmark": benchmark,
                            "score": score,
                            "k": k,
                            "ours": sum(values) / len(values) if values else None,
                            "low": min(values, default=None),
                            "high": max(values, default=None),
                            "paper": theirs,
                        }
                    )
    return rows


def best_variant(results: Results, runs: Sequence[str], benchmark: str) -> str | None:
    """The run with the highest pass@k at its largest k, mean over seeds; None if no run was evaluated."""

    def score(run: str) -> float:
        tables = [entry["scores"]["pass"] for entry in results.scores[run][benchmark].values()]
        return sum(table[max(table, key=int)] for table in tables) / len(tables)

    return max((run for run in runs if results.scores.get(run, {}).get(benchmark)), key=score, default=None)


def table_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Table 1 in Markdown: one table per benchmark and score, cells ``ours / paper``, a dash for a missing number."""
    blocks = []
    for benchmark, score in dict.fromkeys((row["benchmark"], row["score"]) for row in rows):
        part = [row for row in rows if (row["benchmark"], row["score"]) == (benchmark, score)]
        ks = list(dict.fromkeys(row["k"] for row in part))
        lines = [f"| {benchmark}, {score}@k (%), ours / paper | | {' | '.join(f'k = {k}' for k in ks)} |"]
        lines.append("|---" * (len(ks) + 2) + "|")
        for group, method in dict.fromkeys((row["group"], row["method"]) for row in part):
            cells = [row for row in part if (row["group"], row["method"]) == (group, method)]
            numbers = [f"{_cell(row['ours'])} / {_cell(row['paper'])}" for row in cells]
            lines.append(f"| {group} | {method} ({cells[0]['run'] or 'not run'}) | {' | '.join(numbers)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# Files


def draw_all(
    matrix: Matrix, names: Sequence[str], scale: str, results: Results, directory: Path
) -> tuple[list[Path], list[str]]:
    """Write every figure that has a run, as PNG and PDF with a caption, and Table 1 as Markdown and CSV.

    Returns:
        The files written, and a message for each missing run or evaluation.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    messages: list[str] = []
    for name in names:
        messages += missing(matrix, name, scale, results)
        runs = runs_of(matrix, [name], scale)
        if not any(run in results.metrics or run in results.scores for run in runs):
            continue
        text = caption(matrix, name, scale, results)
        if name == "table1":
            rows = table1(matrix, scale, results)
            if any(row["ours"] is not None for row in rows):
                written += _write_table(rows, text, directory)
            continue
        figure = draw(matrix, name, scale, results)
        for suffix in ("png", "pdf"):
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=100, metadata={"CreationDate": None} if suffix == "pdf" else None)
            written.append(path)
        (directory / f"{name}.md").write_text(text)
    return written, messages


def _write_table(rows: Sequence[dict[str, Any]], text: str, directory: Path) -> list[Path]:
    (directory / "table1.md").write_text(f"{text}\n{table_markdown(rows)}")
    with (directory / "table1.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [directory / "table1.md", directory / "table1.csv"]


def missing(matrix: Matrix, name: str, scale: str, results: Results) -> list[str]:
    """A message for each run or evaluation that a figure lacks, with the command that makes it."""
    messages, command = [], f"python reproduce.py {name} --scale {scale}"
    runs = {run.name: run for run in reversed(experiments_of(matrix, [name], scale))}  # the first seed of each
    for run in runs_of(matrix, [name], scale):
        if run not in results.metrics and name != "table1":
            messages.append(f"{name}: run {run} is missing: `{command}`, or this run alone: `{runs[run].command}`")
    for group, benchmarks in find_figure(matrix, name).get("benchmarks", {}).items():
        for run in groups_of(matrix, name, scale).get(group, {}).values():
            for benchmark in benchmarks:
                if benchmark not in results.scores.get(run, {}):
                    messages.append(f"{name}: run {run} is not evaluated on {benchmark}: `{command}`")
    return messages


def caption(matrix: Matrix, name: str, scale: str, results: Results) -> str:
    """The text beside a figure: title, what is drawn, runs and seeds, the command, what is missing."""
    spec = find_figure(matrix, name)
    window = matrix[scale]["window"]
    lines = [f"**{spec['title']}** ({scale} scale)", ""]
    if name == "table1":
        lines.append(
            "Mean over seeds, percent; pass@k is the unbiased estimate, the paper's that of the first k samples."
        )
    else:
        lines.append(
            f"Curves over training: trailing mean over {window} steps; line: mean over seeds, band: lowest to highest "
            "seed. Accuracy and formatting in percent of the maximum reward."
        )
        if set(SCORES) & set(spec["panels"]):
            best = " and ".join(f"{name}..." for name in matrix[scale]["best"])
            lines.append(
                f"pass@k is the unbiased estimate; the runs {best} are evaluated at their highest accuracy reward, as "
                "the paper's GRPO on LLaMA (Section 6.1)."
            )
    lines += ["", "| | curve | run | seeds |", "|---|---|---|---|"]
    for group, curves in groups_of(matrix, name, scale).items():
        for legend, run in curves.items():
            scored = results.scores.get(run, {}).values()
            seeds = sorted({*results.metrics.get(run, {}), *(seed for entries in scored for seed in entries)})
            lines.append(f"| {group} | {legend} | {run} | {', '.join(map(str, seeds)) or 'missing'} |")
    lines += ["", f"`python reproduce.py {name} --scale {scale}` makes the runs and draws them."]
    lines += [f"\nMissing: {message}" for message in missing(matrix, name, scale, results)]
    return "\n".join(lines) + "\n"
