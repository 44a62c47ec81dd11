"""results/, docs/reproduction.md, docs/figures.md and what the README says was found, from the stored runs.

    python -m study page

Every number comes from results/, the condensed runs; reproduction.template.md and figures.template.md have the text.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo.paper.figures import (
    LABELS,
    SCORES,
    WIDTH,
    draw,
    draw_all,
    mean_of,
    method_table,
    table1,
    table_markdown,
)
from gtpo.paper.matrix import (
    RUNS,
    Experiment,
    Matrix,
    experiments_of,
    find_figure,
    runs_of,
    seeds_of_all,
    select_figures,
)
from gtpo.paper.results import METRICS_FILE, SCORES_FILE, Results, condense, read_results, rounded
from gtpo.reports.curves import LEAST_SEEDS, add_legend, grid
from study.claims import read_claims
from study.collapse import DIRECTORY as COLLAPSE
from study.collapse import STORED as COLLAPSE_METRICS
from study.collapse import admission
from study.measures import Curve, SeedRuns, quarters
from study.mechanism import effect_of, policy_title, write_mechanism
from study.rendering import render, wrapped
from study.verdicts import NOT_COUNTED, SIZES, SMALL, check, verdict

DIRECTORY = Path("results") / "tiny"
HEADROOM = Path("results") / "headroom"
RATE_SEEDS, COMPARED_SEEDS = range(331, 334), range(341, 361)  # of headroom
SMOL, SMOL_SEEDS = Path("results") / "smol_comparison", range(1, 9)
CLEARLY = 0.0001  # nats by an update of unit norm: what is less is not called higher
ADAM = "grpo-g8-beta1e-6-adam0.999999"
LOSES = 20.0  # points below an earlier value
NOTHING = Results({}, {})
PAGES = {  # template -> page
    "reproduction.template.md": Path("docs") / "reproduction.md",
    "figures.template.md": Path("docs") / "figures.md",
}
PAGE = PAGES["reproduction.template.md"]
README = Path("README.md")
METRICS = tuple(name for name in LABELS if name not in SCORES)
STORED = (*METRICS, "step_time", "grad_norm")
MAX_GRAD_NORM = 0.1  # of every preset [Listing 1]
MEASURES = (Curve.early, Curve.late, Curve.highest, Curve.mean)
VERDICTS = ("holds", "does not hold", SMALL, "undecided", NOT_COUNTED, "too few seeds", "not run")
EFFECTS = {  # the figure of the first page, GTPO or its correction minus GRPO: group -> label -> claim
    "GTPO, tiny": {
        "pass@1, held out": "fig2_stable_pass_1",
        "accuracy at the end": "fig2_stable_accuracy",
    },
    "GTPO, SmolLM2": {
        "pass@1, held out": "smol_gtpo_pass_1",
        "accuracy at the end": "smol_gtpo_accuracy_at_the_end",
        "formatting at the end": "smol_gtpo_formatting_at_the_end",
        "formatting, first third": "smol_gtpo_formatting_at_first",
    },
    "correction alone, SmolLM2": {"formatting, first third": "smol_correction_formatting_at_first"},
}


def summarize(
    matrix: Matrix,
    results: Results,
    smol: Results = NOTHING,
    mechanism: Mapping[str, Any] | None = None,
    collapse: Results = NOTHING,
    headroom: Results = NOTHING,
) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, the main differences, each run, Table 1.

    ``results`` are those of results/tiny/, ``smol`` of results/smol_comparison/, ``collapse`` and ``headroom`` of
    those directories.
    """
    spec, seeds = matrix["tiny"], seeds_of_all(matrix, "tiny")
    claims = [
        {"figure": figure} | check(claim, results, seeds, spec["window"])
        for figure, of_figure in read_claims().items()
        if figure != "smol"
        for claim in of_figure
    ]
    of_smol = [check(claim, smol, SMOL_SEEDS, matrix["smol"]["window"]) for claim in read_claims().get("smol", ())]
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {"seeds": seeds} | {key: spec[key] for key in ("window", "base", "late", "evaluation")},
        "sizes": SIZES,
        "least_seeds": LEAST_SEEDS,
        "claims": claims,
        "effects": effects_of([*claims, *of_smol]),
        "tags": tags_of(mechanism or {}),
        "collapse": admission(matrix, collapse),
        "headroom": _headroom(headroom, matrix["headroom"]["window"]),
        "adam_fall": _pair(
            [second - last for _, second, _, last in map(quarters, _curves(results, ADAM, "accuracy", spec["window"]))]
        ),
        "smol": {
            "claims": of_smol,
            "runs": {
                name: {"seeds": sorted(seeds)}
                | {
                    metric: [
                        _pair([statistic(SeedRuns(smol, seed, 1).curve(name, metric)) for seed in seeds])
                        for statistic in (Curve.first_third, Curve.last_third)
                    ]
                    for metric in ("formatting", "accuracy", "entropy")
                }
                for name, seeds in smol.metrics.items()
            },
            "scores": {name: _scores_of(smol, name) for name in smol.scores},
            "clipped": _clipped(smol),
            "filtered": _summary_of(smol, "gtpo", 1).get("filtered_fraction", {}).get("mean"),
        },
        "verdicts": {name: sum(claim["verdict"] == name for claim in claims) for name in VERDICTS},
        "with_margin": sum(claim["verdict"] == "holds" and claim["mean"] - claim["difference"] > 1 for claim in claims),
        "filtered_4c": _filtered(results, "gtpo-onlyneg"),
        "by_chance": round(0.025 * sum(claim["size"] is not None and not claim["why"] for claim in claims), 1),
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "drawn": [name for name in names if {*runs_of(matrix, [name], "tiny")} & {*results.metrics, *results.scores}],
        "runs": {
            name: _summary_of(results, name, spec["window"]) for name in sorted({*results.metrics, *results.scores})
        },
        "table1": table_markdown(table1(matrix, "tiny", results)),
        "stable": _formatting_lost(results, spec["window"]),
        "paper_table": paper_table(matrix, results),
        "has_paper_scale": any(row["ours"] is not None for row in table1(matrix, "paper", results)),
    }


def tags_of(mechanism: Mapping[str, Any]) -> dict[str, Any]:
    """The policies at which an update of GRPO decidedly lowers the tags, and at which GTPO keeps them higher or lower.

    ``own_``: the tags in the policy's own completions. ``gtpo_too``, ``positive_too``: where GRPO lowers the tags of
    reference solutions, so do GTPO and the completions with A > 0 alone.
    """

    def lowered(objective: str, target: str) -> list[str]:
        rows = {name: effect_of(summary, objective, target) for name, summary in mechanism.items()}
        return [
            name for name, row in rows.items() if row["half_width"] is not None and row["mean"] < -row["half_width"]
        ]

    def kept(target: str, sign: int = 1) -> list[str]:
        rows = {name: effect_of(summary, "GTPO", target)["minus_grpo"] for name, summary in mechanism.items()}
        return [name for name, row in rows.items() if row and sign * row[0] - row[1] > CLEARLY]

    names = {
        "lowered": lowered("GRPO", "tags"),
        "kept": kept("tags"),
        "lowered_and_kept": [name for name in lowered("GRPO", "tags") if name in kept("tags")],
        "kept_lower": kept("tags", -1),
        "own_lowered": lowered("GRPO", "own tags"),
        "own_kept": kept("own tags"),
    }
    too = {
        key: {*names["lowered"]} <= {*lowered(objective, "tags")}
        for key, objective in (("gtpo_too", "GTPO"), ("positive_too", "GRPO, A > 0"))
    }
    titles = {key: [*map(policy_title, found)] for key, found in names.items()}
    return {"policies": len(mechanism), **too, **titles}


def effects_of(claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The differences of ``EFFECTS``, in points, also of a claim that allows some."""
    by_name = {claim["name"]: claim for claim in claims}
    allowed = {claim.name: claim.allowed for of_figure in read_claims().values() for claim in of_figure}
    effects = []
    for group, names in EFFECTS.items():
        for label, name in names.items():
            margins = [margin - allowed.get(name, 0.0) for margin in by_name[name]["margins"].values()]
            mean, half_width = _pair(margins) if len(margins) >= LEAST_SEEDS else (None, None)
            effect = {"group": group, "label": label, "claim": name, "mean": mean, "half_width": half_width}
            effects.append(effect | {"verdict": verdict(margins, SIZES["points"])})
    return effects


VERDICT_COLORS = {
    "holds": "#009E73",
    "does not hold": "#D55E00",
    "no large difference": "#0072B2",
    "undecided": "#999999",
}


def draw_effects(effects: Sequence[dict[str, Any]], size: float) -> Any:
    """Differences with their 95 % intervals, one a line, in groups; within ± ``size`` points, shaded, it is none.

    ``effects``: group, label, mean, half_width, verdict; those without a mean are omitted.
    """
    shown = [effect for effect in effects if effect["mean"] is not None]
    figure, axes = grid(1, 1, width=WIDTH, height=0.26 * max(4, len(shown)))
    axis = axes[0][0]
    axis.axvspan(-size, size, color="black", alpha=0.07, linewidth=0)
    axis.axvline(0, color="black", linewidth=1)
    for place, effect in enumerate(shown):
        look = {"fmt": "o", "color": VERDICT_COLORS[effect["verdict"]], "label": effect["verdict"]}
        axis.errorbar(effect["mean"], place, xerr=effect["half_width"], **look)
        if place and effect["group"] != shown[place - 1]["group"]:
            axis.axhline(place - 0.5, color="black", alpha=0.3, linewidth=0.8)
    axis.set_yticks(range(len(shown)), [f"{effect['group']}: {effect['label']}" for effect in shown])
    axis.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axis.set_xlabel("← worse than GRPO      percentage points      better than GRPO →")
    add_legend(figure)
    return figure


def _headroom(results: Results, window: int) -> dict[str, Any]:
    """``rates``: each run with the seeds of the choice of a rate; ``compared``: GTPO minus GRPO at the end, paired."""
    rates = {
        name: _summary_of(Results({name: {s: rows for s, rows in seeds.items() if s in RATE_SEEDS}}, {}), name, window)
        for name, seeds in sorted(results.metrics.items())
    }
    pairs: dict[str, list[float]] = {"accuracy": [], "formatting": [], "entropy": []}
    for seed in COMPARED_SEEDS:
        runs = SeedRuns(results, seed, window)
        for metric, margins in pairs.items():
            try:
                margins.append(runs.curve("gtpo-0.3e-3", metric).late() - runs.curve("grpo-0.3e-3", metric).late())
            except KeyError:
                continue
    seeds = len(pairs["accuracy"])
    return {"rates": rates, "seeds": seeds, "compared": {metric: _pair(found) for metric, found in pairs.items()}}


def _curves(results: Results, name: str, metric: str, window: int) -> list[list[float]]:
    """The values of a metric, one list per seed."""
    return [SeedRuns(results, seed, window).curve(name, metric).values for seed in results.metrics.get(name, {})]


def _summary_of(results: Results, name: str, window: int) -> dict[str, Any]:
    """Seeds, minutes, and for each measure its mean over seeds and the half width of the 95 % interval."""
    seeds = sorted(results.metrics.get(name, {}))
    row: dict[str, Any] = {"seeds": seeds}
    for metric in (*METRICS, "step_time"):
        try:
            curves = [SeedRuns(results, seed, window).curve(name, metric) for seed in seeds]
        except KeyError:
            continue
        if metric == "step_time" and curves:
            row["minutes"] = round(sum(sum(curve.values) / 60 for curve in curves) / len(curves), 2)
        elif curves:
            row[metric] = {measure.__name__: _pair([*map(measure, curves)]) for measure in MEASURES}
    return row | _scores_of(results, name)


def _scores_of(results: Results, name: str) -> dict[str, dict[str, list[float | None]]]:
    """Benchmark -> score (``pass@1``, ``format``) -> mean and half width, in percent."""
    rows = {}
    for benchmark, entries in results.scores.get(name, {}).items():
        tables = [entry["scores"] for entry in entries.values()]
        kinds = [kind for kind in tables[0] if kind.startswith(SCORES) and isinstance(tables[0][kind], dict)]
        rows[benchmark] = {
            f"{kind}@{k}": _pair([table[kind][k] for table in tables]) for kind in kinds for k in tables[0][kind]
        } | {"format": _pair([table["format"] for table in tables])}
    return rows


def _clipped(results: Results) -> float | None:
    """The share of steps, of those with a gradient, in which its norm is above ``MAX_GRAD_NORM``, in percent."""
    rows = [row for seeds in results.metrics.values() for rows in seeds.values() for row in rows]
    norms = [row["grad_norm"] for row in rows if row.get("grad_norm")]
    return 100 * sum(norm > MAX_GRAD_NORM for norm in norms) / len(norms) if norms else None


def _filtered(results: Results, prefix: str) -> float | None:
    """The share of completions that the filter drops in the runs of a name, in percent."""
    found = [
        row["filtered_fraction"]
        for name, seeds in results.metrics.items()
        if name.startswith(prefix)
        for rows in seeds.values()
        for row in rows
        if row.get("filtered_fraction") is not None
    ]
    return rounded(100 * sum(found) / len(found)) if found else None


def _formatting_lost(results: Results, window: int) -> dict[str, Any]:
    """How many runs of reinforcement learning at the stable rate there are, and which lose ``LOSES`` of formatting."""
    runs = [
        (name, seed)
        for name, seeds in results.metrics.items()
        if "-late-" not in name and name != "sft"
        for seed in seeds
    ]
    falls = {run: SeedRuns(results, run[1], window).curve(run[0], "formatting").largest_loss() for run in runs}
    return {
        "runs": len(runs),
        "of_grpo": sum(name.startswith("grpo") for (name, _), fall in falls.items() if fall >= LOSES),
        "lost": [f"{name}, seed {seed}" for (name, seed), fall in falls.items() if fall >= LOSES],
    }


def _pair(values: Sequence[float]) -> list[float | None]:
    """Mean and half width of the 95 % interval, None of too few seeds; to five significant digits."""
    return [*map(rounded, mean_of(values))]


def page_of(summary: Mapping[str, Any], template: str) -> str:
    """One of ``PAGES``, from the values of summary.json."""
    by_name = {claim["name"]: claim for claim in (*summary["claims"], *summary["smol"]["claims"])}
    return render(
        template, {**summary, "by_name": by_name, "effect": {row["claim"]: row for row in summary["effects"]}}
    )


# Files


def what_was_found(page: str) -> str:
    """What was found: list and figure of the first section of docs/reproduction.md, with the links of the README."""
    text = page.partition("## In short\n")[2].partition("\nA claim *")[0].strip()
    text = text.replace("](#", "](docs/reproduction.md#").replace("](../", "](")
    return wrapped(re.sub(r"\]\((\w+)\.md", r"](docs/\1.md", text))


def paper_table(matrix: Matrix, results: Results) -> str:
    """pass@64 and maj@64 at paper scale: the paper's, next to ours if there are any."""
    rows = [row for row in table1(matrix, "paper", results) if row["k"] == 64]
    columns = dict.fromkeys(f"{row['benchmark']}, {row['score']}@64" for row in rows)
    measured = any(row["ours"] is not None for row in rows)
    shown = rows if measured else [row | {"ours": row["paper"]} for row in rows]
    return method_table(["trained on", "method", *columns], shown, beside=measured)


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
    tiny = experiments_of(matrix, select_figures(matrix, ["all"], "tiny"), "tiny")
    of_collapse = experiments_of(matrix, ["collapse"], "collapse")
    of_headroom = experiments_of(matrix, ["headroom"], "headroom", [*RATE_SEEDS, *COMPARED_SEEDS])
    sources = (
        (DIRECTORY, "tiny", tiny, STORED),
        (SMOL, "smol", arms_of_smol(matrix), STORED),
        (COLLAPSE, "collapse", of_collapse, (*STORED, *COLLAPSE_METRICS)),
        (HEADROOM, "headroom", of_headroom, (*STORED, *COLLAPSE_METRICS)),
    )
    for directory, scale, runs, metrics in sources:
        if finished := [(run.name, run.seed) for run in runs if run.run.is_finished]:
            found = read_results([RUNS / scale])
            shutil.rmtree(directory, ignore_errors=True)
            condense(only(found, finished), directory, metrics)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    results, smol, collapse, headroom = (read_results([path]) for path in (DIRECTORY, SMOL, COLLAPSE, HEADROOM))
    written, _ = draw_all(matrix, select_figures(matrix, ["all"], "tiny"), "tiny", results, DIRECTORY, ["png"])
    drawn = (("smol", SMOL, smol), ("collapse", COLLAPSE, collapse), ("headroom", HEADROOM, headroom))
    for name, directory, found in drawn:
        if found.metrics:
            draw(matrix, name, name, found).savefig(directory / f"{name}.png", dpi=100)
            written.append(directory / f"{name}.png")
    summary = summarize(matrix, results, smol, write_mechanism(), collapse, headroom)
    draw_effects(summary["effects"], SIZES["points"]).savefig(DIRECTORY / "effects.png", dpi=100)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for template, page in PAGES.items():
        page.write_text(page_of(summary, template), encoding="utf-8")
    README.write_text(
        fill(README.read_text(encoding="utf-8"), "found", what_was_found(PAGE.read_text(encoding="utf-8"))),
        encoding="utf-8",
    )
    files = [DIRECTORY / name for name in (METRICS_FILE, SCORES_FILE, "effects.png", "summary.json")]
    return [path for path in (*files, *written, *PAGES.values(), README) if path.is_file()]


def arms_of_smol(matrix: Matrix) -> list[Experiment]:
    """The runs of SmolLM2 without the warm start, from which they start."""
    return [run for run in experiments_of(matrix, ["smol"], "smol", SMOL_SEEDS) if run.experiments]


def only(results: Results, runs: Sequence[tuple[str, int]]) -> Results:
    """The metrics and scores of some runs, each a name and a seed, and the scores of the base."""
    kept = Results({}, {"base": results.scores["base"]} if "base" in results.scores else {})
    for name, seed in runs:
        kept.metrics.setdefault(name, {})[seed] = results.metrics[name][seed]
        for scored in (name, f"{name}@best"):
            for benchmark, entries in results.scores.get(scored, {}).items():
                if seed in entries:
                    kept.scores.setdefault(scored, {}).setdefault(benchmark, {})[seed] = entries[seed]
    return kept
