"""The paper's figures and Table 1."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from pandas import DataFrame, Series

from gtpo.arguments import hub_name
from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.reports.curves import PANELS, add_legend, arm_of, grid, interval, line_styles, plot_ln2, plot_mean
from paper.matrix import (
    RUNS,
    SCALES,
    Matrix,
    experiment,
    find_figure,
    groups_of,
    load_matrix,
    models_of_runs,
    runs_of,
    scored_name,
    select_figures,
    settings_of,
)
from paper.results import Results, read_results, read_wandb

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
SCORES_OF_BASE = {"accuracy": "pass@1", "formatting": "format"}
PERCENT = (*SCORES_OF_BASE, *SCORES)
BASE = {"color": "0.35", "linestyle": "--", "linewidth": 1.0}
WIDTH = 9.0  # inches; 900 pixels, what a README shows
METHODS = {"sft": "SFT", "grpo": "GRPO", "gtpo": "GTPO"}  # rows of Table 1


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper, a matplotlib figure; runs and groups of curves without results are omitted."""
    spec = find_figure(matrix, name)
    every = groups_of(matrix, name, scale)
    groups = {title: curves for title, curves in every.items() if results.names & {*curves.values()}} or every
    seeds: dict[str, int] = {}
    arms = {}
    for curves in groups.values():
        for legend, run in curves.items():
            seeds[legend] = max(seeds.get(legend, 0), len(results.seeds(run)))
            arms[legend] = arm_of(run.partition("-")[0], settings_of(matrix, scale, run))
    styles = line_styles(arms)  # one for a label in all groups
    rates = matrix[scale].get("rates", {})
    trained_on = spec.get("benchmarks") or matrix["figures"].get("fig2", {}).get("benchmarks", {})
    figure, columns = _panels(len(spec["panels"]), len(groups))
    for (title, curves), column in zip(groups.items(), columns, strict=True):
        benchmark, *_ = trained_on.get(title, [None])
        base = _base_of(results, benchmark, experiment(matrix, scale, next(iter(curves.values())), 0).model)
        evaluated = {run: scored_name(matrix, scale, run) for run in curves.values()}
        for axis, metric in zip(column, spec["panels"], strict=True):
            for legend, run in curves.items():
                if metric in SCORES:
                    curve = _over_k(results.scored(evaluated[run], benchmark), metric)
                else:
                    curve = results.smoothed(run, metric, matrix[scale]["window"])
                plot_curves(axis, f"{legend} (n = {seeds[legend]})", curve, styles[legend])
            _finish_panel(axis, metric, base)
            if metric in SCORES and [*evaluated] != [*evaluated.values()]:
                axis.set_title("GRPO at its best step", loc="left", fontsize=9)
        fewer = {len(results.seeds(run)) for run in curves.values()} - {0, *(seeds[legend] for legend in curves)}
        if title in rates:
            title += f", learning rate {rates[title]}"
        if fewer:
            title += f", n = {', '.join(map(str, sorted(fewer)))}"
        column[0].set_title(title, loc="left", fontsize=10)
    add_legend(figure, "mean over n seeds, where all have a value; band: its 95 % interval")
    return figure


def _finish_panel(axis: Any, metric: str, base: DataFrame) -> None:
    """The base model, ln 2, labels and limits of a panel."""
    axis.set_ylabel(LABELS[metric])
    axis.set_xlabel("k" if metric in SCORES else "training step")
    if metric == "entropy":
        plot_ln2(axis)
    if metric in SCORES:
        plot_curves(axis, "base model", _over_k(base, metric), BASE)
    for value in base.get(SCORES_OF_BASE.get(metric), ()):
        axis.axhline(value, label="base model", **BASE)
    if metric in SCORES and axis.lines:
        axis.set_xscale("log", base=2)
        ks = axis.lines[0].get_xdata()
        axis.set_xticks(ks, map(str, ks))
        for line in axis.lines:
            line.set(marker="o", markersize=3)
    if metric in PERCENT:  # an interval may reach further
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -2), min(high, 102))


def _panels(count: int, groups: int) -> tuple[Any, Any]:
    """A figure as wide as a README, and for each group its panels: a column, or two rows of a single group."""
    if groups > 1:
        figure, axes = grid(count, groups, width=WIDTH / groups, height=2.6)
        return figure, axes.T
    rows = 2 if count == 4 else 1
    figure, axes = grid(rows, count // rows, width=WIDTH * rows / count, height=2.6)
    return figure, [axes.flatten()]


def plot_curves(axis: Any, legend: str, curves: DataFrame, style: dict[str, Any]) -> None:
    """The mean over the columns, one per seed, with its band."""
    if not curves.empty:
        plot_mean(axis, legend, curves.index.tolist(), curves.T.to_numpy().tolist(), style)


def _over_k(scored: DataFrame, score: str) -> DataFrame:
    """pass@k or maj@k by k, a column per seed; ``scored``: a row per seed."""
    complete = scored.filter(regex=rf"^{score}@").dropna(axis=1)
    return complete.rename(columns=lambda name: int(name.split("@")[1])).T


def _base_of(results: Results, benchmark: str | None, model: str) -> DataFrame:
    """The evaluations of a base model before training, among those of several."""
    scored = results.scored("base", benchmark)
    name = Path(hub_name(model)).name.lower()  # Unsloth's copy has it in its name too
    return scored[[name in entry["label"].lower() for entry in scored.get("entry", ())]]


def table1(matrix: Matrix, scale: str, results: Results) -> DataFrame:
    """Table 1: a row per group, method and score, in percent; NaN for a number that does not exist.

    As in the paper, a method is represented by its variant with the highest in-distribution pass@k at the largest k.
    """
    spec = matrix["table1"]
    trained_on = matrix["figures"]["fig2"]["benchmarks"]
    columns = [(benchmark, score, k) for benchmark, score, ks in spec["columns"] for k in ks]
    rows = []
    for group, curves in groups_of(matrix, "table1", scale).items():
        for method, title in METHODS.items():
            runs = [scored_name(matrix, scale, run) for run in curves.values() if run.startswith(method)]
            run = best_variant(results, runs, trained_on[group][0])
            published = spec["values"].get(group, {}).get(title, [])
            for (benchmark, score, k), paper in zip_longest(columns, published):
                if benchmark not in spec["benchmarks"][group]:
                    continue
                scored = results.scored(run, benchmark)
                values = scored.get(f"{score}@{k}", Series(dtype=float)).dropna().tolist()
                ours, half_width = mean_of(values)
                rows.append(
                    {
                        "group": group,
                        "method": title,
                        "run": run,
                        "seeds": len(values),
                        "benchmark": benchmark,
                        "score": score,
                        "k": k,
                        "ours": ours,
                        "half_width": half_width,
                        "paper": paper,
                    }
                )
    return DataFrame(rows).astype({"ours": float, "half_width": float, "paper": float})


def best_variant(results: Results, runs: Sequence[str], benchmark: str) -> str | None:
    """The run with the highest mean pass@k at the largest k that all its seeds have; None if none is evaluated."""
    scores = {}
    for run in runs:
        passed = _over_k(results.scored(run, benchmark), "pass")
        if not passed.empty:
            scores[run] = passed.loc[max(passed.index)].mean()
    return max(scores, key=scores.__getitem__, default=None)


def mean_of(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean over seeds, and the half width of its 95 % interval; None if there are too few."""
    if not values:
        return None, None
    found = interval(values)
    return fmean(values), found and found.half_width


def table_markdown(rows: DataFrame) -> str:
    """Table 1 in Markdown: one table per benchmark and score; ours next to the paper's number, where it has one."""
    blocks = []
    for (benchmark, score), part in rows.groupby(["benchmark", "score"], sort=False):
        kind, _, lenient = score.partition("_")
        title = f"{benchmark}, {kind}@k (%)"
        if lenient:
            title += ", in any format"
        has_paper = bool(part["paper"].notna().any())
        if has_paper:
            title += ", ours / paper"
        ks = part["k"].unique()
        lines = [
            f"| {title} | | {' | '.join(f'k = {k}' for k in ks)} |",
            "|---" * (2 + len(ks)) + "|",
        ]
        for (group, method), cells in part.groupby(["group", "method"], sort=False):
            numbers = [*map(mean_cell, cells["ours"], cells["half_width"])]
            if has_paper:
                published = map(mean_cell, cells["paper"])
                numbers = [*map("{} / {}".format, numbers, published)]
            run = cells["run"].fillna("not run").iloc[0]
            lines.append(f"| {group} | {method} ({run}) | {' | '.join(numbers)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def mean_cell(value: float, half_width: float = nan) -> str:
    """``12.3 ± 1.2``; a dash for a missing number."""
    if isnan(value):
        return "-"
    return f"{value:.1f}" if isnan(half_width) else f"{value:.1f} ± {half_width:.1f}"


def draw_found(
    figures: Sequence[str], scale: str | None, search: Sequence[str] | None, wandb: str | None, output: str
) -> list[str]:
    """Draw what figures.py found in directories or in wandb, below ``output``; the files, and what is missing."""
    matrix = load_matrix()
    names = select_figures(matrix, figures or ["all"])
    places = search or ["outputs"]
    results = read_wandb(wandb) if wandb else read_results([*map(Path, places)], models_of_runs(matrix))
    lines = []
    drawn = False
    for each in [scale] if scale else SCALES:
        written, missing = draw_all(matrix, names, each, results, Path(output) / each)
        if not (written or scale):
            missing = [f"No runs at {each} scale: `python reproduce.py all --scale {each}` makes them."]
        lines += [*map(str, written), *missing]
        drawn |= bool(written)
    if not drawn:
        where = f"no run of configs/experiments.yaml in {wandb or ' '.join(places)}"
        raise UsageError(f"{where}: `python reproduce.py fig3 --scale tiny` makes some; --runs draws any other runs.")
    return lines


def draw_all(
    matrix: Matrix,
    names: Sequence[str],
    scale: str,
    results: Results,
    directory: Path | None = None,
    suffixes: Sequence[str] = ("png", "pdf"),
) -> tuple[list[Path], list[str]]:
    """Write every figure that has a run, with its caption, and Table 1; the files, and what is missing."""
    directory = directory or RUNS / scale / "figures"
    written = []
    messages = []
    for name in names:
        messages += missing(matrix, name, scale, results)
        runs = runs_of(matrix, [name], scale)
        scored = [scored_name(matrix, scale, run) for run in runs]
        if results.names.isdisjoint([*runs, *scored]):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        text = caption(matrix, name, scale, results)
        if name == "table1":
            rows = table1(matrix, scale, results)
            if rows["ours"].notna().any():
                written += [directory / "table1.md", directory / "table1.csv"]
                write_atomically(written[-2], f"{text}\n{table_markdown(rows)}")
                write_atomically(written[-1], partial(rows.to_csv, index=False, lineterminator="\r\n"))
            continue
        figure = draw(matrix, name, scale, results)
        for kind in suffixes:
            path = directory / f"{name}.{kind}"
            save = partial(figure.savefig, dpi=100, format=kind, metadata={"CreationDate": None})
            write_atomically(path, save)
            written.append(path)
        write_atomically(directory / f"{name}.md", text)
    return written, messages


def missing(matrix: Matrix, name: str, scale: str, results: Results) -> list[str]:
    """What a figure lacks, with the command that makes it: its runs, and its evaluations by benchmark."""
    wanted: dict[str, list[str]] = {}
    if name != "table1":
        runs = runs_of(matrix, [name], scale)
        wanted["no run of"] = [run for run in runs if not results.seeds(run)]
    groups = groups_of(matrix, name, scale)
    for group, benchmarks in find_figure(matrix, name).get("benchmarks", {}).items():
        for benchmark in benchmarks:
            lacking = wanted.setdefault(f"no evaluation on {benchmark} of", [])
            for run in groups.get(group, {}).values():
                if results.scored(scored_name(matrix, scale, run), benchmark).empty:
                    lacking.append(run)
    messages = []
    for what, lacking in wanted.items():
        if lacking:
            names = ", ".join(dict.fromkeys(lacking))
            messages.append(f"{name}: {what} {names}: `python reproduce.py {name} --scale {scale}`")
    return messages


SCORES_TEXT = (
    "Mean over seeds and its 95 % interval (Student's t, from three seeds on), percent; pass@k is the unbiased "
    "estimate, the paper's that of the first k samples."
)
CURVES_TEXT = (
    "Curves over training: trailing mean over {window} steps; line: mean over seeds, band: its 95 % interval "
    "(Student's t, from three seeds on). Accuracy and formatting in percent of the maximum reward. Dashed: the base "
    "model on held-out problems; its formatting is the share of completions with all tags."
)

AT_BEST_TEXT = (
    "pass@k is the unbiased estimate; the runs {best} are evaluated at their highest accuracy reward, as the "
    "paper's GRPO on LLaMA (Section 6.1)."
)


def caption(matrix: Matrix, name: str, scale: str, results: Results) -> str:
    """The text below a figure: title, what is drawn, runs and seeds, the command, what is missing."""
    spec = find_figure(matrix, name)
    text = SCORES_TEXT if name == "table1" else CURVES_TEXT.format(window=matrix[scale]["window"])
    lines = [f"**{spec['title']}** ({scale} scale)", "", text]
    if not {*SCORES}.isdisjoint(spec.get("panels", ())):
        best = " and ".join(f"{name}..." for name in matrix[scale]["best"])
        lines.append(AT_BEST_TEXT.format(best=best))
    lines += ["", "| | curve | run | seeds |", "|---|---|---|---|"]
    for group, curves in groups_of(matrix, name, scale).items():
        for legend, run in curves.items():
            scored = scored_name(matrix, scale, run)
            evaluated = [seed for name, _, seed in results.scores.index if name == scored]
            seeds = sorted({*results.seeds(run), *evaluated})
            lines.append(f"| {group} | {legend} | {run} | {', '.join(map(str, seeds)) or 'missing'} |")
    lines += ["", f"`python reproduce.py {name} --scale {scale}` makes the runs and draws them."]
    lines += [f"\nMissing: {message}" for message in missing(matrix, name, scale, results)]
    return "\n".join(lines) + "\n"
