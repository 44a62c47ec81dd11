"""The paper's figures and Table 1."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES
from gtpo.paper.matrix import RUNS, Matrix, experiment, find_figure, groups_of, runs_of, scored_name
from gtpo.paper.results import Results
from gtpo.reports.curves import PANELS, add_legend, grid, interval, line_style, plot_ln2, plot_mean, plot_seeds

LABELS = PANELS | {
    "kl": "KL divergence (nats)",
    "conflict_tokens": "conflict tokens",
    "filtered_fraction": "filtered, δ = 0 (share)",
    "conflict_push": "push on conflict tokens",
    "conflict_push_corrected": "push after λ",
    "pass": "pass@k (%)",
    "maj": "maj@k (%)",
}
SCORES = ("pass", "maj")  # panels of an evaluation, over k
PERCENT = ("accuracy", "formatting", *SCORES)
BASE = {"color": "0.35", "linestyle": "--", "linewidth": 1.0}
WIDTH = 9.0  # inches; 900 pixels, what a README shows
METHODS = {"sft": "SFT", "grpo": "GRPO", "gtpo": "GTPO"}  # rows of Table 1


# The paper's figures


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper, a matplotlib figure; runs and groups of curves without results are omitted.

    Lines are the mean over seeds of the smoothed curves, bands its 95 % interval. A dashed line is the base model.
    """
    spec = find_figure(matrix, name)
    found = {*results.metrics, *results.scores}
    every = groups_of(matrix, name, scale)
    groups = {title: curves for title, curves in every.items() if found & {*curves.values()}} or every
    figure, rows = _panels(len(spec["panels"]), len(groups), spec.get("groups") == "columns")
    legends = list(dict.fromkeys(legend for curves in groups.values() for legend in curves))  # one style in all groups
    for (title, curves), row in zip(groups.items(), rows, strict=True):
        benchmarks = spec.get("benchmarks") or matrix["figures"].get("fig2", {}).get("benchmarks", {})
        benchmark = benchmarks.get(title, [None])[0]  # of the task that is trained on
        of_base = results.scores.get("base", {}).get(benchmark, {})
        for axis, metric in zip(row, spec["panels"], strict=True):
            for legend, run in curves.items():
                style = line_style(legends.index(legend))
                if metric in SCORES:
                    entries = results.scores.get(scored_name(matrix, scale, run), {}).get(benchmark, {})
                    _plot_scores(axis, legend, entries, metric, style)
                else:
                    plot_seeds(axis, legend, results.metrics.get(run, {}), metric, matrix[scale]["window"], style)
            if metric == "entropy":
                plot_ln2(axis)
            if of_base:
                _plot_base(axis, experiment(matrix, scale, next(iter(curves.values())), 0).model, of_base, metric)
            if metric in PERCENT:  # an interval may reach further
                low, high = axis.get_ylim()
                axis.set_ylim(max(low, -2), min(high, 102))
            axis.set_xlabel("k" if metric in SCORES else "training step")
            axis.set_ylabel(LABELS[metric])
        row[0].set_title(title, loc="left", fontsize=10)
    add_legend(figure)
    return figure


def _panels(count: int, groups: int, in_columns: bool) -> tuple[Any, Any]:
    """A figure as wide as a README, and for each group its panels: a row, a column, or two rows of a single group."""
    if groups == 1:
        rows = 2 if count > 3 and count % 2 == 0 else 1
        figure, axes = grid(rows, count // rows, width=WIDTH * rows / count, height=2.6)
        return figure, [axes.flatten()]
    shape = (count, groups) if in_columns else (groups, count)
    figure, axes = grid(*shape, width=WIDTH / min(3, shape[1]), height=2.6)
    return figure, axes.T if in_columns else axes


def _plot_scores(axis: Any, legend: str, entries: dict[int, dict[str, Any]], score: str, style: dict[str, Any]) -> None:
    """pass@k or maj@k over k on a logarithmic axis; ``entries``: seed -> entry of an evaluation."""
    tables = [{int(k): value for k, value in entry["scores"][score].items()} for entry in entries.values()]
    ks = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if ks:
        dots = style | {"marker": "o", "markersize": 3}
        plot_mean(axis, legend, ks, [[table[k] for k in ks] for table in tables], dots)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])


def _plot_base(axis: Any, model: str, entries: dict[int, dict[str, Any]], metric: str) -> None:
    """The scores of a model before training; ``entries``: of an evaluation of base models, whose last one is stored.

    The line in a panel of the accuracy is pass@1. That of the formatting is the share of completions with all tags, of
    which the curves count those with some as a tenth.
    """
    name = Path(MODEL_ALIASES.get(model, model)).name.lower()  # Unsloth's copy has it in its name too
    of_model = {seed: entry for seed, entry in entries.items() if name in entry["label"].lower()}
    if metric in SCORES:
        _plot_scores(axis, "base model", of_model, metric, BASE)
    for entry in of_model.values() if metric in ("accuracy", "formatting") else ():
        scores = entry["scores"]
        axis.axhline(scores["pass"]["1"] if metric == "accuracy" else scores["format"], label="base model", **BASE)


# Table 1


def table1(matrix: Matrix, scale: str, results: Results) -> list[dict[str, Any]]:
    """Table 1 as rows: group, method, run, seeds, benchmark, score, k; in percent ours, half_width (95 %), paper.

    As in the paper, GRPO and GTPO are represented by the variant with the highest in-distribution pass@k at the largest
    k. Our pass@k is the unbiased estimate. A number that does not exist is None.
    """
    spec = matrix["table1"]
    benchmarks = {name for group in groups_of(matrix, "table1", scale) for name in spec["benchmarks"][group]}
    rows = []
    for group, curves in groups_of(matrix, "table1", scale).items():
        paper = spec["values"].get(group, {})
        for method, title in METHODS.items():
            runs = [scored_name(matrix, scale, run) for run in curves.values() if run.startswith(method)]
            run = best_variant(results, runs, matrix["figures"]["fig2"]["benchmarks"][group][0])
            published = iter(paper.get(title, []))
            for benchmark, score, ks in spec["columns"]:
                for k in ks:
                    theirs = next(published, None)
                    if benchmark not in benchmarks:
                        continue
                    entries = results.scores.get(run or "", {}).get(benchmark, {})
                    tables = [entry["scores"].get(score, {}) for entry in entries.values()]
                    values = [table[str(k)] for table in tables if str(k) in table]
                    ours, half_width = mean_of(values)
                    row = {"group": group, "method": title, "run": run, "seeds": len(values), "benchmark": benchmark}
                    row |= {"score": score, "k": k, "ours": ours, "half_width": half_width, "paper": theirs}
                    rows.append(row)
    return rows


def best_variant(results: Results, runs: Sequence[str], benchmark: str) -> str | None:
    """The run with the highest pass@k at its largest k, mean over seeds; None if no run was evaluated."""

    def score(run: str) -> float:
        tables = [entry["scores"]["pass"] for entry in results.scores[run][benchmark].values()]
        return sum(table[max(table, key=int)] for table in tables) / len(tables)

    return max((run for run in runs if results.scores.get(run, {}).get(benchmark)), key=score, default=None)


def mean_of(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean over seeds, and the half width of its 95 % interval; None if there are too few."""
    found = interval(values)
    return sum(values) / len(values) if values else None, found.half_width if found else None


def table_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Table 1 in Markdown: one table per benchmark and score; ours next to the paper's number, where it has one."""
    blocks = []
    for benchmark, score in dict.fromkeys((row["benchmark"], row["score"]) for row in rows):
        part = [row for row in rows if (row["benchmark"], row["score"]) == (benchmark, score)]
        ks = list(dict.fromkeys(row["k"] for row in part))
        kind, _, lenient = score.partition("_")
        beside = any(row["paper"] is not None for row in part)
        title = f"{benchmark}, {kind}@k (%){', in any format' if lenient else ''}{', ours / paper' if beside else ''}"
        methods = [row | {"method": f"{row['method']} ({row['run'] or 'not run'})"} for row in part]
        blocks.append(method_table([title, "", *(f"k = {k}" for k in ks)], methods, beside))
    return "\n\n".join(blocks) + "\n"


def method_table(head: Sequence[str], rows: Sequence[dict[str, Any]], beside: bool) -> str:
    """Rows of Table 1 in Markdown: a line per group and method; with ``beside`` also the paper's number."""
    lines = ["".join(f"| {name} " if name else "| " for name in head) + "|", "|---" * len(head) + "|"]
    for group, method in dict.fromkeys((row["group"], row["method"]) for row in rows):
        cells = [row for row in rows if (row["group"], row["method"]) == (group, method)]
        papers = [f" / {mean_cell(row['paper'])}" if beside else "" for row in cells]
        numbers = [mean_cell(row["ours"], row["half_width"]) + p for row, p in zip(cells, papers, strict=True)]
        lines.append(f"| {group} | {method} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def mean_cell(value: float | None, half_width: float | None = None) -> str:
    """``12.3 ± 1.2``; a dash for a missing number."""
    if value is None:
        return "-"
    return f"{value:.1f}" if half_width is None else f"{value:.1f} ± {half_width:.1f}"


# Files


def draw_all(
    matrix: Matrix,
    names: Sequence[str],
    scale: str,
    results: Results,
    directory: Path | None = None,
    suffixes: Sequence[str] = ("png", "pdf"),
) -> tuple[list[Path], list[str]]:
    """Write every figure that has a run, with a caption, and Table 1 as Markdown and CSV.

    Args:
        directory: By default ``figures/`` beside the runs.

    Returns:
        The files written, and a message for each missing run or evaluation.
    """
    directory = directory or RUNS / scale / "figures"
    written: list[Path] = []
    messages: list[str] = []
    for name in names:
        messages += missing(matrix, name, scale, results)
        runs = runs_of(matrix, [name], scale)
        if not any(run in results.metrics or scored_name(matrix, scale, run) in results.scores for run in runs):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        text = caption(matrix, name, scale, results)
        if name == "table1":
            rows = table1(matrix, scale, results)
            if any(row["ours"] is not None for row in rows):
                written += [directory / "table1.md", directory / "table1.csv"]
                (directory / "table1.md").write_text(f"{text}\n{table_markdown(rows)}", encoding="utf-8")
                with (directory / "table1.csv").open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
            continue
        figure = draw(matrix, name, scale, results)
        for suffix in suffixes:
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=100, metadata={"CreationDate": None} if suffix == "pdf" else None)
            written.append(path)
        (directory / f"{name}.md").write_text(text, encoding="utf-8")
    return written, messages


def missing(matrix: Matrix, name: str, scale: str, results: Results) -> list[str]:
    """What a figure lacks, with the command that makes it: its runs, and its evaluations by benchmark."""
    wanted: dict[str, list[str]] = {}
    if name != "table1":
        wanted["no run of"] = [run for run in runs_of(matrix, [name], scale) if run not in results.metrics]
    for group, benchmarks in find_figure(matrix, name).get("benchmarks", {}).items():
        for benchmark in benchmarks:
            runs = groups_of(matrix, name, scale).get(group, {}).values()
            lacking = [run for run in runs if benchmark not in results.scores.get(scored_name(matrix, scale, run), {})]
            wanted.setdefault(f"no evaluation on {benchmark} of", []).extend(lacking)
    command = f"`python reproduce.py {name} --scale {scale}`"
    return [f"{name}: {what} {', '.join(dict.fromkeys(runs))}: {command}" for what, runs in wanted.items() if runs]


def caption(matrix: Matrix, name: str, scale: str, results: Results) -> str:
    """The text below a figure: title, what is drawn, runs and seeds, the command, what is missing."""
    spec = find_figure(matrix, name)
    window = matrix[scale]["window"]
    lines = [f"**{spec['title']}** ({scale} scale)", ""]
    if name == "table1":
        lines.append(
            "Mean over seeds and its 95 % interval (Student's t, from three seeds on), percent; pass@k is the unbiased "
            "estimate, the paper's that of the first k samples."
        )
    else:
        lines.append(
            f"Curves over training: trailing mean over {window} steps; line: mean over seeds, band: its 95 % interval "
            "(Student's t, from three seeds on). Accuracy and formatting in percent of the maximum reward. Dashed: the "
            "base model on held-out problems; its formatting is the share of completions with all tags."
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
            scored = results.scores.get(scored_name(matrix, scale, run), {}).values()
            seeds = sorted({*results.metrics.get(run, {}), *(seed for entries in scored for seed in entries)})
            lines.append(f"| {group} | {legend} | {run} | {', '.join(map(str, seeds)) or 'missing'} |")
    lines += ["", f"`python reproduce.py {name} --scale {scale}` makes the runs and draws them."]
    lines += [f"\nMissing: {message}" for message in missing(matrix, name, scale, results)]
    return "\n".join(lines) + "\n"
