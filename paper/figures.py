"""The paper's figures and Table 1."""

from collections.abc import Iterable, Sequence
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from gtpo.arguments import MODEL_ALIASES
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
PERCENT = ("accuracy", "formatting", *SCORES)
BASE = {"color": "0.35", "linestyle": "--", "linewidth": 1.0}
WIDTH = 9.0  # inches; 900 pixels, what a README shows
METHODS = {"sft": "SFT", "grpo": "GRPO", "gtpo": "GTPO"}  # rows of Table 1


def draw(matrix: Matrix, name: str, scale: str, results: Results) -> Any:
    """A figure of the paper, a matplotlib figure; runs and groups of curves without results are omitted."""
    spec = find_figure(matrix, name)
    window = matrix[scale]["window"]
    every = groups_of(matrix, name, scale)
    groups = {title: curves for title, curves in every.items() if results.names & {*curves.values()}} or every
    figure, columns = _panels(len(spec["panels"]), len(groups))
    pairs = [pair for curves in groups.values() for pair in curves.items()]
    seeds = {legend: max(len(results.seeds(run)) for name, run in pairs if name == legend) for legend, _ in pairs}
    arms = {legend: arm_of(run.partition("-")[0], settings_of(matrix, scale, run)) for legend, run in pairs}
    styles = line_styles(arms)  # one for a label in all groups
    for (title, curves), column in zip(groups.items(), columns, strict=True):
        benchmarks = spec.get("benchmarks") or matrix["figures"].get("fig2", {}).get("benchmarks", {})
        benchmark = benchmarks.get(title, [None])[0]  # of the task that is trained on
        base = results.scored("base", benchmark)
        if not base.empty:
            base = _of_model(base, experiment(matrix, scale, next(iter(curves.values())), 0).model)
        at_best = any(scored_name(matrix, scale, run) != run for run in curves.values())
        for axis, metric in zip(column, spec["panels"], strict=True):
            for legend, run in curves.items():
                label = f"{legend} (n = {seeds[legend]})"
                if metric in SCORES:
                    scored = results.scored(scored_name(matrix, scale, run), benchmark)
                    _plot_scores(axis, label, scored, metric, styles[legend])
                else:
                    _plot(axis, label, results.smoothed(run, metric, window), styles[legend])
            if metric == "entropy":
                plot_ln2(axis)
            if metric in SCORES:
                _plot_scores(axis, "base model", base, metric, BASE)
            for value in base.get({"accuracy": "pass@1", "formatting": "format"}.get(metric), ()):
                axis.axhline(value, label="base model", **BASE)
            if metric in PERCENT:  # an interval may reach further
                low, high = axis.get_ylim()
                axis.set_ylim(max(low, -2), min(high, 102))
            axis.set_xlabel(("k; GRPO at its best step" if at_best else "k") if metric in SCORES else "training step")
            axis.set_ylabel(LABELS[metric])
        fewer = {len(results.seeds(run)) for legend, run in curves.items()} - {0, *map(seeds.__getitem__, curves)}
        counts = f", n = {', '.join(map(str, sorted(fewer)))}" if fewer else ""
        column[0].set_title(title + _rate_of_all(matrix, scale, curves.values()) + counts, loc="left", fontsize=10)
    add_legend(figure, "mean over n seeds, where all have a value; band: its 95 % interval")
    return figure


def _rate_of_all(matrix: Matrix, scale: str, runs: Iterable[str]) -> str:
    flags = [experiment(matrix, scale, run, 0).argv for run in runs if not run.startswith("sft")]
    rates = {argv[argv.index("--learning_rate") + 1] for argv in flags if "--learning_rate" in argv}
    return f", learning rate {rates.pop()}" if len(rates) == 1 else ""


def _panels(count: int, groups: int) -> tuple[Any, Any]:
    """A figure as wide as a README, and for each group its panels: a column, or two rows of a single group."""
    if groups > 1:
        figure, axes = grid(count, groups, width=WIDTH / groups, height=2.6)
        return figure, axes.T
    rows = 2 if count > 3 and count % 2 == 0 else 1
    figure, axes = grid(rows, count // rows, width=WIDTH * rows / count, height=2.6)
    return figure, [axes.flatten()]


def _plot(axis: Any, legend: str, curves: DataFrame, style: dict[str, Any]) -> None:
    """The mean over the columns, one per seed, with its band."""
    if not curves.empty:
        plot_mean(axis, legend, curves.index.tolist(), curves.T.to_numpy().tolist(), style)


def _plot_scores(axis: Any, legend: str, scored: DataFrame, score: str, style: dict[str, Any]) -> None:
    """pass@k or maj@k over k on a logarithmic axis; ``scored``: a row per seed."""
    curves = scored.filter(regex=rf"^{score}@").dropna(axis=1).rename(columns=lambda name: int(name.split("@")[1])).T
    _plot(axis, legend, curves, style | {"marker": "o", "markersize": 3})
    if not curves.empty:
        axis.set_xscale("log", base=2)
        axis.set_xticks(curves.index, curves.index.astype(str))


def _of_model(scored: DataFrame, model: str) -> DataFrame:
    """The evaluations of a base model before training, among those of several."""
    name = Path(MODEL_ALIASES.get(model, model)).name.lower()  # Unsloth's copy has it in its name too
    return scored[[name in entry["label"].lower() for entry in scored["entry"]]]


def table1(matrix: Matrix, scale: str, results: Results) -> DataFrame:
    """Table 1: a row per group, method and score, in percent; NaN for a number that does not exist.

    As in the paper, a method is represented by its variant with the highest in-distribution pass@k at the largest k.
    """
    spec = matrix["table1"]
    rows = []
    for group, curves in groups_of(matrix, "table1", scale).items():
        for method, title in METHODS.items():
            runs = [scored_name(matrix, scale, run) for run in curves.values() if run.startswith(method)]
            run = best_variant(results, runs, matrix["figures"]["fig2"]["benchmarks"][group][0])
            published = iter(spec["values"].get(group, {}).get(title, []))
            for benchmark, score, ks in spec["columns"]:
                scored = results.scored(run, benchmark)
                for k in ks:
                    theirs = next(published, None)
                    if benchmark not in spec["benchmarks"][group]:
                        continue
                    values = scored.get(f"{score}@{k}", Series(dtype=float)).dropna().tolist()
                    ours, half_width = mean_of(values)
                    row = {"group": group, "method": title, "run": run, "seeds": len(values), "benchmark": benchmark}
                    rows.append(row | {"score": score, "k": k, "ours": ours, "half_width": half_width, "paper": theirs})
    return DataFrame(rows).astype({"ours": float, "half_width": float, "paper": float})


def best_variant(results: Results, runs: Sequence[str], benchmark: str) -> str | None:
    """The run with the highest mean pass@k at the largest k, over its seeds; None if none is evaluated."""
    scores = {}
    for run in runs:
        if not (passed := results.scored(run, benchmark).filter(regex="^pass@")).empty:
            scores[run] = passed[max(passed, key=lambda name: int(name.split("@")[1]))].mean()
    return max(scores, key=scores.__getitem__, default=None)


def mean_of(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean over seeds, and the half width of its 95 % interval; None if there are too few."""
    found = interval(values)
    return sum(values) / len(values) if values else None, found.half_width if found else None


def table_markdown(rows: DataFrame) -> str:
    """Table 1 in Markdown: one table per benchmark and score; ours next to the paper's number, where it has one."""
    blocks = []
    for (benchmark, score), part in rows.groupby(["benchmark", "score"], sort=False):
        kind, _, lenient = score.partition("_")
        beside = bool(part["paper"].notna().any())
        title = f"{benchmark}, {kind}@k (%){', in any format' if lenient else ''}{', ours / paper' if beside else ''}"
        ks = part["k"].unique()
        lines = [f"| {title} | | {' | '.join(f'k = {k}' for k in ks)} |", "|---" * (2 + len(ks)) + "|"]
        for (group, method), cells in part.groupby(["group", "method"], sort=False):
            numbers = [
                mean_cell(*ours) + (f" / {mean_cell(paper)}" if beside else "")
                for *ours, paper in zip(cells["ours"], cells["half_width"], cells["paper"], strict=True)
            ]
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
    matrix, places = load_matrix(), [Path(place) for place in search or ["outputs"]]
    names = select_figures(matrix, figures or ["all"])
    results = read_wandb(wandb) if wandb else read_results(places, models_of_runs(matrix))
    lines = []
    drawn = False
    for each in [scale] if scale else SCALES:
        written, missing = draw_all(matrix, names, each, results, Path(output) / each)
        if not (written or scale):
            missing = [f"No runs at {each} scale: `python reproduce.py all --scale {each}` makes them."]
        lines += [*map(str, written), *missing]
        drawn |= bool(written)
    if not drawn:
        where = f"no run of configs/experiments.yaml in {wandb or ' '.join(map(str, places))}"
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
        if not results.names & {*runs, *(scored_name(matrix, scale, run) for run in runs)}:
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
            written.append(path := directory / f"{name}.{kind}")
            write_atomically(path, partial(figure.savefig, dpi=100, format=kind, metadata={"CreationDate": None}))
        write_atomically(directory / f"{name}.md", text)
    return written, messages


def command_of_figure(name: str, scale: str) -> str:
    return f"python reproduce.py {name} --scale {scale}"


def missing(matrix: Matrix, name: str, scale: str, results: Results) -> list[str]:
    """What a figure lacks, with the command that makes it: its runs, and its evaluations by benchmark."""
    wanted: dict[str, list[str]] = {}
    if name != "table1":
        wanted["no run of"] = [run for run in runs_of(matrix, [name], scale) if not results.seeds(run)]
    for group, benchmarks in find_figure(matrix, name).get("benchmarks", {}).items():
        for benchmark in benchmarks:
            runs = groups_of(matrix, name, scale).get(group, {}).values()
            lacking = [run for run in runs if results.scored(scored_name(matrix, scale, run), benchmark).empty]
            wanted.setdefault(f"no evaluation on {benchmark} of", []).extend(lacking)
    command = command_of_figure(name, scale)
    return [f"{name}: {what} {', '.join(dict.fromkeys(runs))}: `{command}`" for what, runs in wanted.items() if runs]


SCORES_TEXT = (
    "Mean over seeds and its 95 % interval (Student's t, from three seeds on), percent; pass@k is the unbiased "
    "estimate, the paper's that of the first k samples."
)
CURVES_TEXT = (
    "Curves over training: trailing mean over {window} steps; line: mean over seeds, band: its 95 % interval "
    "(Student's t, from three seeds on). Accuracy and formatting in percent of the maximum reward. Dashed: the base "
    "model on held-out problems; its formatting is the share of completions with all tags."
)


def caption(matrix: Matrix, name: str, scale: str, results: Results) -> str:
    """The text below a figure: title, what is drawn, runs and seeds, the command, what is missing."""
    spec = find_figure(matrix, name)
    text = SCORES_TEXT if name == "table1" else CURVES_TEXT.format(window=matrix[scale]["window"])
    lines = [f"**{spec['title']}** ({scale} scale)", "", text]
    if {*SCORES} & {*spec.get("panels", ())}:
        best = " and ".join(f"{name}..." for name in matrix[scale]["best"])
        lines.append(
            f"pass@k is the unbiased estimate; the runs {best} are evaluated at their highest accuracy reward, as the "
            "paper's GRPO on LLaMA (Section 6.1)."
        )
    lines += ["", "| | curve | run | seeds |", "|---|---|---|---|"]
    for group, curves in groups_of(matrix, name, scale).items():
        for legend, run in curves.items():
            scored = results.scores[results.scores.index.get_level_values("run") == scored_name(matrix, scale, run)]
            seeds = sorted({*results.seeds(run), *scored.index.get_level_values("seed")})
            lines.append(f"| {group} | {legend} | {run} | {', '.join(map(str, seeds)) or 'missing'} |")
    lines += ["", f"`{command_of_figure(name, scale)}` makes the runs and draws them."]
    lines += [f"\nMissing: {message}" for message in missing(matrix, name, scale, results)]
    return "\n".join(lines) + "\n"
