"""results/tiny/, docs/reproduction.md and the README's tables, from the runs of the tiny scale.

    python reproduce.py --page

Every number comes from results/tiny/, the condensed runs; docs/reproduction.template.md holds the text around them.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtpo.paper.claims import CLAIMS, GRPO, GTPO
from gtpo.paper.figures import (
    LABELS,
    SCORES,
    draw_all,
    draw_effects,
    mean_cell,
    mean_of,
    method_table,
    table1,
    table_markdown,
)
from gtpo.paper.matrix import (
    RUNS,
    Matrix,
    experiments_of,
    figure_names,
    find_figure,
    runs_of,
    seeds_of_all,
    select_figures,
)
from gtpo.paper.measures import Curve, SeedRuns, score
from gtpo.paper.results import METRICS_FILE, SCORES_FILE, Results, condense, read_results, rounded
from gtpo.paper.verdicts import SIZES, check, verdict
from gtpo.reports.intervals import LEAST_SEEDS

DIRECTORY = Path("results") / "tiny"
TEMPLATE, PAGE = Path("docs") / "reproduction.template.md", Path("docs") / "reproduction.md"
README = Path("README.md")
METRICS = tuple(name for name in LABELS if name not in SCORES)
MEASURES = (Curve.early, Curve.late, Curve.highest, Curve.mean)
VERDICTS = ("holds", "does not hold", "no difference", "undecided", "too few seeds", "not run")
EFFECTS = {  # the figure of the first page: group -> label -> claim
    f"{regime}, GTPO minus GRPO": {
        "accuracy": f"fig2_{regime}_accuracy",
        "formatting": f"fig2_{regime}_formatting",
        "pass@1": f"fig2_{regime}_pass_1",
        "pass@1 in any format": f"fig2_{regime}_lenient_pass_1",
        "maj@32": f"fig2_{regime}_maj_32",
        "harder, pass@64": f"table1_{regime}_pass_64",
        "harder, maj@64": f"table1_{regime}_maj_64",
    }
    for regime in ("stable", "late")
} | {
    "late, correction": {
        "minus GRPO, accuracy at first": "fig3_correction_alone_is_ahead_at_first",
        "added to entropy control, accuracy": "fig4d_correction_adds_accuracy",
        "added to entropy control, formatting": "fig4d_correction_adds_formatting",
    },
    "late, entropy control": {
        "added to GRPO, accuracy": "fig4d_entropy_control_helps_grpo",
        "added to GRPO, formatting": "fig4d_entropy_control_repairs_formatting",
        "added to correction, accuracy": "fig3_entropy_control_repairs_accuracy",
        "added to correction, formatting": "fig3_entropy_control_repairs_formatting",
    },
    "late, formatting": {
        "GTPO minus Dr. GRPO": "baselines_gtpo_ends_above_dr_grpo_in_formatting",
        "GTPO minus DAPO": "baselines_gtpo_ends_above_dapo_in_formatting",
        "GTPO x Dr. GRPO minus Dr. GRPO": "baselines_gtpo_improves_dr_grpo_in_formatting",
        "GTPO x DAPO minus DAPO": "baselines_gtpo_improves_dapo_in_formatting",
    },
}


def summarize(matrix: Matrix, results: Results) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, the main differences, each run, Table 1."""
    spec, seeds = matrix["tiny"], seeds_of_all(matrix, "tiny")
    claims = [
        {"figure": figure} | check(claim, results, seeds, spec["window"])
        for figure, of_figure in CLAIMS.items()
        for claim in of_figure
    ]
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {"seeds": seeds} | {key: spec[key] for key in ("window", "base", "late", "evaluation")},
        "sizes": SIZES,
        "least_seeds": LEAST_SEEDS,
        "claims": claims,
        "effects": effects_of(claims),
        "verdicts": {name: sum(claim["verdict"] == name for claim in claims) for name in VERDICTS},
        "by_chance": round(0.025 * sum(claim["size"] is not None for claim in claims), 1),
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "drawn": [name for name in names if {*runs_of(matrix, [name], "tiny")} & {*results.metrics, *results.scores}],
        "runs": {name: _summary_of(results, name, spec["window"]) for name in sorted(results.metrics)},
        "table1": table_markdown(table1(matrix, "tiny", results)),
    }


def effects_of(claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The differences of ``EFFECTS``, in points, also of a claim that allows some."""
    by_name = {claim["name"]: claim for claim in claims}
    allowed = {claim.name: claim.allowed for of_figure in CLAIMS.values() for claim in of_figure}
    effects = []
    for group, names in EFFECTS.items():
        for label, name in names.items():
            margins = [margin - allowed[name] for margin in by_name[name]["margins"].values()]
            mean, half_width = _pair(margins) if len(margins) >= LEAST_SEEDS else (None, None)
            effect = {"group": group, "label": label, "claim": name, "mean": mean, "half_width": half_width}
            effects.append(effect | {"verdict": verdict(margins, SIZES["points"])})
    return effects


def _summary_of(results: Results, name: str, window: int) -> dict[str, Any]:
    """Seeds, minutes, and for each measure its mean over seeds and the half width of the 95 % interval."""
    seeds = sorted(results.metrics[name])
    row: dict[str, Any] = {"seeds": seeds}
    for metric in (*METRICS, "step_time"):
        try:
            curves = [SeedRuns(results, seed, window).curve(name, metric) for seed in seeds]
        except KeyError:
            continue
        if metric == "step_time":
            row["minutes"] = round(sum(sum(curve.values) / 60 for curve in curves) / len(curves), 2)
        else:
            row[metric] = {measure.__name__: _pair([*map(measure, curves)]) for measure in MEASURES}
    for benchmark, entries in results.scores.get(name, {}).items():
        tables = [entry["scores"] for entry in entries.values()]
        kinds = [kind for kind in tables[0] if kind.startswith(SCORES) and isinstance(tables[0][kind], dict)]
        row[benchmark] = {
            f"{kind}@{k}": _pair([table[kind][k] for table in tables]) for kind in kinds for k in tables[0][kind]
        }
    return row


def _pair(values: Sequence[float]) -> list[float | None]:
    """Mean and half width of the 95 % interval, None of too few seeds; to five significant digits."""
    return [*map(rounded, mean_of(values))]


def render(summary: dict[str, Any], template: str) -> str:
    """The page, from the Jinja template and the values of summary.json."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template).render(**summary)


# The README's tables


def readme_tables(matrix: Matrix, results: Results) -> dict[str, str]:
    """The README's tables in Markdown, by the comment that precedes each (:func:`fill`)."""
    return {"paper scale": _paper_table(matrix, results), "tiny scale": _tiny_table(matrix, results)}


def _paper_table(matrix: Matrix, results: Results) -> str:
    rows = [row for row in table1(matrix, "paper", results) if row["k"] == 64]
    columns = dict.fromkeys(f"{row['benchmark']}, {row['score']}@64" for row in rows)
    return method_table(["trained on", "method", *columns], rows, beside=True)


def _tiny_table(matrix: Matrix, results: Results) -> str:
    """Strict / lenient; a method is the mean over its variants, as in the claims."""
    columns = [("arithmetic", score) for score in ("pass@1", "pass@32", "maj@32")]
    columns += [("arithmetic_hard", score) for score in ("pass@1", "pass@64", "maj@64")]
    titles = {"arithmetic": "held out", "arithmetic_hard": "harder"}
    variants = {"SFT": (("sft",),)} | {
        f"{method}, {regime}": runs
        for regime in GRPO
        for method, runs in (("GRPO", GRPO[regime]), ("GTPO", tuple((run,) for run in GTPO[regime])))
    }
    head = " | ".join(f"{titles[benchmark]}, {score}" for benchmark, score in columns)
    lines = [f"| | {head} |", "|---" * (len(columns) + 1) + "|"]
    for title, runs in variants.items():
        pairs = [
            [_seed_mean(matrix, results, runs, benchmark, which) for which in (score, score.replace("@", "_lenient@"))]
            for benchmark, score in columns
        ]
        lines.append(f"| {title} | {' | '.join(map(' / '.join, pairs))} |")
    return "\n".join(lines)


def _seed_mean(matrix: Matrix, results: Results, variants: Sequence[Sequence[str]], benchmark: str, name: str) -> str:
    """A cell: the mean over variants of each seed that has them all, then over seeds, with the 95 % interval."""
    values = []
    for seed in seeds_of_all(matrix, "tiny"):
        seed_runs = SeedRuns(results, seed, matrix["tiny"]["window"])
        try:
            means = [score(benchmark, name, *runs).value(seed_runs) for runs in variants]
        except KeyError:
            continue
        values.append(sum(means) / len(means))
    return mean_cell(*_pair(values))


def fill(text: str, name: str, content: str) -> str:
    """The text with ``content`` between the comments ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: If the text lacks one of the comments.
    """
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"no `<!-- {name} -->` followed by `<!-- end -->`: add both comments")
    return f"{before}{mark}\n{content}\n\n{end}{after}"


def write_page(matrix: Matrix) -> list[Path]:
    """Condense the finished runs under outputs/reproduce/tiny/, if any, and write everything from the condensed runs.

    Returns:
        The files written.
    """
    experiments = experiments_of(matrix, figure_names(matrix), "tiny")
    finished = [(run.name, run.seed) for run in experiments if run.run.is_finished]
    if finished:
        found = read_results([RUNS / "tiny"])
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        condense(only(found, finished), DIRECTORY, [*METRICS, "step_time"])
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    results = read_results([DIRECTORY])
    written, _ = draw_all(matrix, figure_names(matrix), "tiny", results, DIRECTORY, ["png"])
    summary = summarize(matrix, results)
    draw_effects(summary["effects"], SIZES["points"]).savefig(DIRECTORY / "effects.png", dpi=100)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(summary, TEMPLATE.read_text()))
    for name, table in readme_tables(matrix, results).items():
        README.write_text(fill(README.read_text(), name, table))
    files = [DIRECTORY / name for name in (METRICS_FILE, SCORES_FILE, "effects.png", "summary.json")]
    return [path for path in (*files, *written, PAGE, README) if path.is_file()]


def only(results: Results, runs: Sequence[tuple[str, int]]) -> Results:
    """The metrics and scores of some runs, each a name and a seed."""
    kept = Results({}, {})
    for name, seed in runs:
        kept.metrics.setdefault(name, {})[seed] = results.metrics[name][seed]
        for benchmark, entries in results.scores.get(name, {}).items():
            if seed in entries:
                kept.scores.setdefault(name, {}).setdefault(benchmark, {})[seed] = entries[seed]
    return kept
