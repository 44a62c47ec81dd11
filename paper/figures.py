"""The paper's figures and Table 1."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

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


class Curve(NamedTuple):
    """A run of a figure, a line in each panel of its group.

    Attributes:
        label: In the legend; several groups may have it.
        arm: Decides the colour.
        scored: The name of its scores.
        seeds: How many have metrics.
    """

    label: str
    run: str
    arm: str
    scored: str
    seeds: int


class Group(NamedTuple):
    """What the panels of a group of curves are drawn from.

    Attributes:
        benchmark: Of the scores.
        base: The evaluations of the base model on it.
    """

    title: str
    curves: list[Curve]
    benchmark: str | None
    base: DataFrame

    @property
    def has_best(self) -> bool:
        """Whether the scores of a run are those at its best step."""
        return any(curve.scored != curve.run for curve in self.curves)

    def values(self, curve: Curve, metric: str, results: Results, window: int) -> DataFrame:
        """A score of a run by k, or a metric by step; a column per seed."""
        if metric in SCORES:
            return _over_k(results.scored(curve.scored, self.benchmark), metric)
        return results.smoothed(curve.run, metric, window)

    def title_with(self, seeds: dict[str, int]) -> str:
        """The title, and the numbers of seeds where they are not those that the legend has by label."""
        usual = {seeds[curve.label] for curve in self.curves}
        fewer = sorted({curve.seeds for curve in self.curves} - {0, *usual})
        return f"{self.title}, n = {', '.join(map(str, fewer))}" if fewer else self.title


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper, a matplotlib figure; runs and groups of curves without results are omitted."""
    metrics = find_figure(matrix, name)["panels"]
    groups = read_groups(matrix, name, scale, results)
    every = [curve for group in groups for curve in group.curves]
    styles = line_styles({curve.label: curve.arm for curve in every})  # one for a label in all groups
    seeds: dict[str, int] = {}
    for curve in every:
        seeds[curve.label] = max(seeds.get(curve.label, 0), curve.seeds)
    figure, columns = _panels(len(metrics), len(groups))
    for group, column in zip(groups, columns, strict=True):
        for metric, axis in zip(metrics, column, strict=True):
            for curve in group.curves:
                values = group.values(curve, metric, results, matrix[scale]["window"])
                plot_curves(axis, f"{curve.label} (n = {seeds[curve.label]})", values, styles[curve.label])
            _finish_panel(axis, metric, group)
        column[0].set_title(group.title_with(seeds), loc="left", fontsize=10)
    add_legend(figure, "mean over n seeds, where all have a value; band: its 95 % interval")
    return figure


def read_groups(matrix: Matrix, name: str, scale: str, results: Results) -> list[Group]:
    """The groups of a figure that have results; all if none has."""
    spec = find_figure(matrix, name)
    benchmarks = spec.get("benchmarks") or matrix["figures"].get("fig2", {}).get("benchmarks", {})
    rates = matrix[scale].get("rates", {})
    found = []
    for title, runs in groups_with_results(matrix, name, scale, results).items():
        curves = []
        for label, run in runs.items():
            arm = arm_of(run.partition("-")[0], settings_of(matrix, scale, run))
            curves.append(Curve(label, run, arm, scored_name(matrix, scale, run), len(results.seeds(run))))
        benchmark, *_ = benchmarks.get(title, [None])
        base = _base_of(results, benchmark, experiment(matrix, scale, curves[0].run, 0).model)
        with_rate = f"{title}, learning rate {rates[title]}" if title in rates else title
        found.append(Group(with_rate, curves, benchmark, base))
    return found


def groups_with_results(matrix: Matrix, name: str, scale: str, results: Results) -> dict[str, dict[str, str]]:
    """As :func:`paper.matrix.groups_of`, without the groups that have no results; all if none has."""
    every = groups_of(matrix, name, scale)
    return {title: runs for title, runs in every.items() if results.names & {*runs.values()}} or every


def _finish_panel(axis: Any, metric: str, group: Group) -> None:
    """The base model, ln 2, labels and limits of a panel."""
    axis.set_ylabel(LABELS[metric])
    axis.set_xlabel("k" if metric in SCORES else "training step")
    if metric == "entropy":
        plot_ln2(axis)
    if metric in SCORES:
        _finish_scores(axis, metric, group)
    for value in group.base.get(SCORES_OF_BASE.get(metric), ()):
        axis.axhline(value, label="base model", **BASE)
    if metric in PERCENT:  # an interval may reach further
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -2), min(high, 102))


def _finish_scores(axis: Any, score: str, group: Group) -> None:
    """The base model by k, and a logarithmic axis of k with a marker at each."""
    plot_curves(axis, "base model", _over_k(group.base, score), BASE)
    if axis.lines:
        axis.set_xscale("log", base=2)
        ks = axis.lines[0].get_xdata()
        axis.set_xticks(ks, map(str, ks))
        for line in axis.lines:
            line.set(marker="o", markersize=3)
    if group.has_best:
        axis.set_title("GRPO at its best step", loc="left", fontsize=9)


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


class Cell(NamedTuple):
    """A row of the table: the mean over seeds, and the half width of its 95 % interval, next to the paper's number."""

    group: str
    method: str
    run: str | None
    seeds: int
    benchmark: str
    score: str
    k: int
    ours: float | None
    half_width: float | None
    paper: float | None


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
                if benchmark in spec["benchmarks"][group]:
                    scored = results.scored(run, benchmark)
                    values = scored.get(f"{score}@{k}", Series(dtype=float)).dropna().tolist()
                    rows.append(Cell(group, title, run, len(values), benchmark, score, k, *mean_of(values), paper))
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
    written: list[Path] = []
    messages = []
    for name in names:
        messages += missing(matrix, name, scale, results)
        runs = runs_of(matrix, [name], scale)
        scored = [scored_name(matrix, scale, run) for run in runs]
        if results.names.isdisjoint([*runs, *scored]):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        if name == "table1":
            written += _write_table1(matrix, scale, results, directory)
        else:
            written += _write_figure(matrix, name, scale, results, directory, suffixes)
    return written, messages


def _write_table1(matrix: Matrix, scale: str, results: Results, directory: Path) -> list[Path]:
    """Markdown with the caption, and CSV; neither if there is no score."""
    rows = table1(matrix, scale, results)
    if rows["ours"].isna().all():
        return []
    markdown, csv = directory / "table1.md", directory / "table1.csv"
    write_atomically(markdown, f"{caption(matrix, 'table1', scale, results)}\n{table_markdown(rows)}")
    write_atomically(csv, partial(rows.to_csv, index=False, lineterminator="\r\n"))
    return [markdown, csv]


def _write_figure(
    matrix: Matrix, name: str, scale: str, results: Results, directory: Path, suffixes: Sequence[str]
) -> list[Path]:
    """The figure in each format, and its caption, which is not among the files returned."""
    figure = draw(matrix, name, scale, results)
    paths = [directory / f"{name}.{suffix}" for suffix in suffixes]
    for suffix, path in zip(suffixes, paths, strict=True):
        save = partial(figure.savefig, dpi=100, format=suffix, metadata={"CreationDate": None})
        write_atomically(path, save)
    write_atomically(directory / f"{name}.md", caption(matrix, name, scale, results))
    return paths


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
