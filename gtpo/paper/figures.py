"""The paper's figures and Table 1, from runs: directories, wandb, or condensed results.

    python figures.py                                       # all that the runs under outputs/ allow
    python figures.py fig3 table1 --scale paper             # these, as far as their runs are there
    python figures.py --search results/tiny                 # from the numbers that this repository keeps
    python figures.py --wandb ENTITY/PROJECT                # from wandb
    python figures.py --runs outputs/A outputs/B --labels GTPO GRPO --output curves.png    # any runs, side by side

A figure is a PNG, a PDF and a caption beside them. Which runs it shows stands in configs/experiments.yaml; a run is
known by its name, with or without its seed (gtpo-g8-s1).
"""

import argparse
import csv
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from gtpo.cli import run_script
from gtpo.errors import UsageError
from gtpo.paper.matrix import SCALES, Matrix, experiments_of, figure_names, find_figure, groups_of, load_matrix, runs_of
from gtpo.paper.results import Results, read_results, split_name
from gtpo.runs import read_metrics

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
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)  # Okabe and Ito: safe for colour-blind eyes
LINES = ("-", "--", ":", "-.")  # past the last colour
LN2 = math.log(2)
METHODS = {"sft": "SFT", "grpo": "GRPO", "gtpo": "GTPO"}  # rows of Table 1


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over the last ``window`` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def seed_curves(runs: dict[int, list[dict[str, Any]]], metric: str, window: int) -> tuple[list[int], list[list[float]]]:
    """The smoothed curve of each seed, at the steps that all of them logged.

    Args:
        runs: Seed -> the rows of :func:`read_metrics`.
        metric: A name of ``metrics.jsonl``.
        window: Steps of the trailing mean.

    Returns:
        The steps, and for each seed a value at every one of them; both empty if no run logged the metric.
    """
    curves = []
    for rows in runs.values():
        logged = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
        if logged:
            curves.append(dict(zip(logged, smooth(list(logged.values()), window), strict=True)))
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return steps, [[curve[step] for step in steps] for curve in curves]


def plot_training(runs: dict[str, list[dict[str, Any]]], window: int = 10, panels: dict[str, str] | None = None) -> Any:
    """One row of panels over the training steps: every run's raw values faint, their trailing mean bold.

    Args:
        runs: Legend name -> the rows of :func:`read_metrics`.
        window: Steps of the trailing mean.
        panels: Metric -> title of its panel; those of :func:`panels_of` by default.

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
            _draw_seeds(axis, name, {0: rows}, metric, window, number)
        if metric == "entropy":
            _draw_ln2(axis)
        axis.set_xlabel("training step")
        axis.set_title(label)
    _legend(figure)
    figure.suptitle(f"Training on samples of the policy; bold: mean of the last {window} steps", fontsize=10)
    return figure


def reward_names(rows: list[dict[str, Any]]) -> list[str]:
    """The reward functions of a run, from its metrics."""
    names = (re.fullmatch("rewards/(.+)/mean", key) for key in rows[0])
    return [match[1] for match in names if match]


def panels_of(runs: Collection[list[dict[str, Any]]]) -> dict[str, str]:
    """The panels for some runs: those of ``PANELS`` that one of them logged, and the rewards of a user's own."""
    logged = {key for rows in runs for row in rows for key, value in row.items() if value is not None}
    own = sorted({name for rows in runs for name in reward_names(rows)} - {"format_reward", "accuracy_reward"})
    panels = {f"rewards/{name}/mean": name for name in own}
    panels |= {metric: label for metric, label in PANELS.items() if metric in logged}
    return panels if len(panels) > 1 else {"loss": "loss"} | panels


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper from the runs at hand; a curve whose run is missing is left out.

    Lines are the mean over seeds of the smoothed curves, bands reach from the lowest seed to the highest.

    Returns:
        The matplotlib figure; the first panel of a group bears its title.
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
                    _draw_scores(axis, legend, entries, metric, number)
                else:
                    _draw_seeds(axis, legend, results.metrics.get(run, {}), metric, matrix[scale]["window"], number)
            if metric == "entropy":
                _draw_ln2(axis)
            axis.set_xlabel("k" if metric in SCORES else "training step")
            axis.set_ylabel(LABELS[metric])
        row[0].set_title(title, loc="left", fontsize=10)
    _legend(figure)
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
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
        "linewidth": max(1.0, 3.4 - 0.5 * number),  # of equal curves each is seen behind the next
    }


def _draw_seeds(
    axis: Any, legend: str, runs: dict[int, list[dict[str, Any]]], metric: str, window: int, number: int
) -> None:
    steps, curves = seed_curves(runs, metric, window)
    if not steps:
        return
    style = _style(number)
    if len(curves) > 1:
        _band(axis, steps, curves, style)
    axis.plot(steps, _means(curves), label=legend, **style)


def _draw_scores(axis: Any, legend: str, entries: dict[int, dict[str, Any]], score: str, number: int) -> None:
    """pass@k or maj@k over k, a logarithmic axis, from the entries of the seeds."""
    tables = [{int(k): value for k, value in entry["scores"][score].items()} for entry in entries.values()]
    ks = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not ks:
        return
    curves, style = [[table[k] for k in ks] for table in tables], _style(number)
    if len(curves) > 1:
        _band(axis, ks, curves, style)
    axis.plot(ks, _means(curves), marker="o", markersize=3, label=legend, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])


def _means(curves: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def _band(axis: Any, x: Sequence[float], curves: list[list[float]], style: dict[str, Any]) -> None:
    columns = list(zip(*curves, strict=True))
    low, high = [min(values) for values in columns], [max(values) for values in columns]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _draw_ln2(axis: Any) -> None:
    axis.axhline(LN2, color="black", linestyle="--", linewidth=1, label="ln 2")
    axis.set_ylim(bottom=0)


def _legend(figure: Any) -> None:
    """One legend below all panels, each name once."""
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

    As in the paper, GRPO and GTPO are shown by the variant of the highest in-distribution pass@k, at the largest k.
    Ours is the unbiased pass@k. A number that is not there, or not in the paper, is None.
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
    """The run of the highest pass@k on a benchmark, at its largest k, mean over seeds; None if none was evaluated."""

    def score(run: str) -> float:
        passes = [entry["scores"]["pass"] for entry in results.scores[run][benchmark].values()]
        return sum(table[max(table, key=int)] for table in passes) / len(passes)

    return max((run for run in runs if results.scores.get(run, {}).get(benchmark)), key=score, default=None)


def table_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Table 1 in Markdown: a table for each benchmark and score, our value before the paper's, a dash for none."""
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
    matrix: Matrix, names: Sequence[str], scale: str, results: Results, folder: Path
) -> tuple[list[Path], list[str]]:
    """Draw every figure that has a run, each as PNG and PDF with its caption; Table 1 as Markdown and CSV.

    Returns:
        The files made, and a sentence for each run or evaluation that a figure lacks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    sentences: list[str] = []
    for name in names:
        lacking = missing(matrix, name, scale, results)
        sentences += lacking
        shown = [run for run in runs_of(matrix, [name], scale) if run in results.metrics or run in results.scores]
        if not shown:
            continue
        if name == "table1":
            rows = table1(matrix, scale, results)
            if all(row["ours"] is None for row in rows):
                continue
            (folder / "table1.md").write_text(f"{caption(matrix, name, scale, results)}\n{table_markdown(rows)}")
            with (folder / "table1.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            drawn += [folder / "table1.md", folder / "table1.csv"]
            continue
        figure = draw(matrix, name, scale, results)
        for suffix in ("png", "pdf"):
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=100, metadata={"CreationDate": None} if suffix == "pdf" else None)
            drawn.append(path)
        (folder / f"{name}.md").write_text(caption(matrix, name, scale, results))
    return drawn, sentences


def missing(matrix: Matrix, name: str, scale: str, results: Results) -> list[str]:
    """A sentence for each run that a figure lacks, with the command that makes it."""
    spec, sentences = find_figure(matrix, name), []
    for run in runs_of(matrix, [name], scale):
        if run not in results.metrics and name != "table1":
            made_by = experiments_of(matrix, [name], scale)[runs_of(matrix, [name], scale).index(run)].command
            sentences.append(f"{name}: no run {run}: python reproduce.py {name} --scale {scale}, or alone: {made_by}")
    for group, benchmarks in spec.get("benchmarks", {}).items():
        for run in groups_of(matrix, name, scale).get(group, {}).values():
            for benchmark in benchmarks:
                if benchmark not in results.scores.get(run, {}):
                    made_by = f"python reproduce.py {name} --scale {scale}"
                    sentences.append(f"{name}: {run} is not evaluated on {benchmark}: {made_by}")
    return sentences


def caption(matrix: Matrix, name: str, scale: str, results: Results) -> str:
    """What stands beside a figure: title, what is drawn, its runs with their seeds, the command, what is missing."""
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
    lines += [f"\nMissing: {sentence}" for sentence in missing(matrix, name, scale, results)]
    return "\n".join(lines) + "\n"


def read_wandb(project: str) -> Results:
    """The runs of a wandb project: same names, same metrics.

    Raises:
        UsageError: If wandb cannot be reached or knows no such project.
    """
    import wandb

    results = Results({}, {})
    try:
        for run in wandb.Api().runs(project):
            name, seed = split_name(Path(run.name))
            rows = [row for row in run.scan_history() if row.get("step") is not None]
            if rows:
                seed = int(run.config.get("seed", 0)) if seed is None else seed
                results.metrics.setdefault(name, {})[seed] = rows
    except (wandb.errors.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"cannot read {project!r} from wandb: {reason} Expected ENTITY/PROJECT and a login."
        ) from error
    return results


# The command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help="fig1, fig2, fig3, fig4a ... fig4d, fig5a, fig5b, fig6, table1; all by default.",
    )
    parser.add_argument("--scale", choices=SCALES, help="Both by default.")
    parser.add_argument("--search", nargs="+", metavar="DIR", help="Where runs are looked for. [outputs]")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="Read the runs from wandb instead.")
    parser.add_argument("--runs", nargs="+", metavar="RUN", help="Draw these run directories side by side instead.")
    parser.add_argument(
        "--labels", nargs="+", metavar="NAME", help="Legend names of --runs; the directories' by default."
    )
    parser.add_argument("--output", metavar="PATH", help="Picture of --runs [curves.png]; else a folder [figures].")
    parser.add_argument(
        "--window", metavar="N", type=int, default=10, help="Steps of the trailing mean of --runs. [10]"
    )
    flags = parser.parse_args()
    if flags.runs:
        print(draw_runs(flags.runs, flags.labels, flags.output or "curves.png", flags.window))
        return
    matrix = load_matrix()
    names = flags.figures or figure_names(matrix)
    for name in names:
        find_figure(matrix, name)
    results = (
        read_wandb(flags.wandb) if flags.wandb else read_results([Path(place) for place in flags.search or ["outputs"]])
    )
    made: list[Path] = []
    for scale in [flags.scale] if flags.scale else SCALES:
        drawn, lacking = draw_all(matrix, names, scale, results, Path(flags.output or "figures") / scale)
        made += drawn
        print(*drawn, sep="\n")
        if drawn or flags.scale or flags.figures:
            print(*lacking, sep="\n")
        else:
            print(f"No runs of the {scale} scale here: python reproduce.py all --scale {scale} makes them.")
    if not made:
        where = flags.wandb or " ".join(flags.search or ["outputs"])
        raise UsageError(
            f"no run of configs/experiments.yaml in {where}: `python reproduce.py fig3 --scale tiny` makes some; other "
            "runs are drawn with --runs."
        )


def draw_runs(runs: Sequence[str], labels: Sequence[str] | None, output: str, window: int) -> str:
    """Write one picture of some runs side by side; the path of the picture.

    Raises:
        UsageError: If labels are missing or double, or a run has no metrics.
    """
    labels = labels or [Path(run).name for run in runs]
    if len(labels) != len(runs):
        raise UsageError(f"{len(labels)} labels for {len(runs)} runs: give one for each.")
    if twice := next((label for label in labels if list(labels).count(label) > 1), None):
        raise UsageError(f"two runs are called {twice!r}: tell them apart with --labels.")
    if window < 1:
        raise UsageError(f"--window is {window}: expected at least 1 step.")
    rows = {label: read_metrics(run) for label, run in zip(labels, runs, strict=True)}
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    plot_training(rows, window).savefig(output, dpi=150)
    return output


if __name__ == "__main__":
    run_script(main)
