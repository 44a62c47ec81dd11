"""results/, docs/reproduction.md, docs/figures.md and what the README says was found, from the stored runs.

    python reproduce.py --page

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
    draw,
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
    Experiment,
    Matrix,
    experiments_of,
    find_figure,
    runs_of,
    seeds_of_all,
    select_figures,
)
from gtpo.paper.results import METRICS_FILE, SCORES_FILE, Results, condense, read_results, rounded
from gtpo.reports.intervals import LEAST_SEEDS
from study.claims import read_claims
from study.measures import Curve, Measure, SeedRuns
from study.mechanism import effect_of, policy_title, write_mechanism
from study.one_claim import find_claims, work_of
from study.rendering import render, wrapped
from study.verdicts import NOT_COUNTED, SIZES, SMALL, check, verdict

DIRECTORY, TESTED = Path("results") / "tiny", Path("results") / "high_rate"
OWN_SEEDS = ("post_hoc", "same_rule")  # claims of ours, which the runs of TESTED decide
SMOL, SMOL_SEEDS = Path("results") / "smol_comparison", range(1, 9)
GENTLE = Path("results") / "gentle"
SHIPPED, SHIPPED_RUNS, SHIPPED_SEEDS = Path("results") / "shipped_base", range(21, 41), range(24, 41)  # 21 to 23: seen
SHIPPED_CLAIMS = ("fig2_stable_accuracy", "fig2_stable_formatting")
CLEARLY = 0.0001  # nats by an update of unit norm: what is less is not called higher
LEARNS, LOSES = 10.0, 20.0  # points above the base, points below an earlier value
LONG_WINDOW = 25  # steps of the trailing mean of ``smol_long``
TESTED_SEEDS = range(41, 81)
NOTHING = Results({}, {})
GTPO = {"stable": ("gtpo-g8", "gtpo-g12"), "late": ("gtpo-late-g8", "gtpo-late-g12")}  # G = 8, 12
GRPO = {  # β = 0 and 10⁻⁶
    "stable": (("grpo-g8-beta0", "grpo-g8-beta1e-6"), ("grpo-g12-beta0", "grpo-g12-beta1e-6")),
    "late": (("grpo-late-g8-beta0", "grpo-late-g8-beta1e-6"), ("grpo-late-g12-beta0",)),
}
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
    "GTPO, tiny, shipped base": {"accuracy at the end": "shipped_fig2_stable_accuracy"},
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
    tested: Results = NOTHING,
    smol: Results = NOTHING,
    gentle: Results = NOTHING,
    mechanism: Mapping[str, Any] | None = None,
    shipped: Results = NOTHING,
) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, the main differences, each run, Table 1.

    ``results`` are those of results/tiny/, ``tested`` of results/high_rate/, ``smol`` of
    results/smol_comparison/, ``gentle`` of results/gentle/, ``shipped`` of results/shipped_base/.
    """
    spec, seeds = matrix["tiny"], seeds_of_all(matrix, "tiny")
    claims = [
        {"figure": figure} | check(claim, results, seeds, spec["window"])
        for figure, of_figure in read_claims().items()
        if figure not in ("same_rule", "smol")
        for claim in of_figure
    ]
    of_paper = [claim for claim in claims if claim["figure"] not in OWN_SEEDS]
    of_tested = [
        {"figure": figure} | check(claim, tested, TESTED_SEEDS, spec["window"])
        for figure in OWN_SEEDS
        for claim in read_claims().get(figure, ())
    ]
    of_smol = [check(claim, smol, SMOL_SEEDS, matrix["smol"]["window"]) for claim in read_claims().get("smol", ())]
    of_shipped = []
    for claim in find_claims(SHIPPED_CLAIMS):
        found = check(claim, shipped, SHIPPED_SEEDS, spec["window"])
        margins = {seed: round(margin - claim.allowed, 4) for seed, margin in found["margins"].items()}
        of_shipped.append(found | {"name": f"shipped_{claim.name}", "margins": margins})
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {"seeds": seeds} | {key: spec[key] for key in ("window", "base", "late", "evaluation")},
        "sizes": SIZES,
        "least_seeds": LEAST_SEEDS,
        "claims": claims,
        "effects": effects_of([*claims, *of_smol, *of_shipped]),
        "shipped": of_shipped,
        "tested": of_tested,
        "tags": tags_of(mechanism or {}),
        "smol": {
            "rates": {"works": matrix["smol"]["base"]["grpo"]["learning_rate"]}
            | {"stress": matrix["smol"]["stress"]["learning_rate"]},
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
            "scored": {name: len(of_run["test"]) for name, of_run in smol.scores.items()},
            "clipped": _clipped(smol),
            "idle": {name: _without_gradient(seeds) for name, seeds in smol.metrics.items()},
            "filtered": _summary_of(smol, "gtpo", 1).get("filtered_fraction", {}).get("mean"),
        },
        "gentle": admission(matrix, gentle, results),
        "long": long_runs(matrix, smol),
        "verdicts": {name: sum(claim["verdict"] == name for claim in of_paper) for name in VERDICTS},
        "with_margin": sum(
            claim["verdict"] == "holds" and claim["mean"] - claim["difference"] > 1 for claim in of_paper
        ),
        "filtered_4c": _filtered(results, "gtpo-onlyneg"),
        "by_chance": round(0.025 * sum(claim["size"] is not None and not claim["why"] for claim in of_paper), 1),
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "drawn": [name for name in names if {*runs_of(matrix, [name], "tiny")} & {*results.metrics, *results.scores}],
        "runs": {
            name: _summary_of(results, name, spec["window"]) for name in sorted({*results.metrics, *results.scores})
        },
        "table1": table_markdown(table1(matrix, "tiny", results)),
        "all_scores": tiny_table(matrix, results),
        "all_scores_lenient": tiny_table(matrix, results, "_lenient"),
        "highest_end_late": _highest_end(results, "late"),
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


def admission(matrix: Matrix, gentle: Results, tiny: Results) -> dict[str, Any]:
    """Run -> how many seeds learn and what they lose, by the rule of docs/log.md; ``above``: accuracy that counts."""
    base = tiny.scores.get("base", {}).get("arithmetic")
    if not gentle.metrics or not base:
        return {}
    above = base[0]["scores"]["pass"]["1"] + LEARNS
    rows = {}
    for name, seeds in sorted(gentle.metrics.items()):
        accuracy, formatting = _curves(gentle, name, matrix["gentle"]["window"])
        rows[name] = {
            "seeds": sorted(seeds),
            "learns": sum(curve.highest() >= above for curve in accuracy),
            "loses_accuracy": sum(curve.largest_loss() >= LOSES for curve in accuracy),
            "loses_formatting": sum(curve.largest_loss() >= LOSES for curve in formatting),
            "accuracy": [rounded(curve.late()) for curve in accuracy],
            "formatting": [rounded(curve.late()) for curve in formatting],
        }
    return {"above": above, "seeds": len(matrix["gentle"]["seeds"]), "runs": rows}


def long_runs(matrix: Matrix, smol: Results) -> dict[str, Any]:
    """Run of ``smol_long`` -> how many seeds lose what at the end, or fall and recover, by the rule of docs/log.md."""
    rows = {}
    for name in runs_of(matrix, ["smol_long"], "smol"):
        if name not in smol.metrics:
            continue
        row: dict[str, Any] = {"seeds": sorted(smol.metrics[name])}
        for metric, curves in zip(("accuracy", "formatting"), _curves(smol, name, LONG_WINDOW), strict=True):
            row |= {
                metric: [rounded(curve.smoothed[-1]) for curve in curves],
                f"loses_{metric}": sum(curve.final_loss() >= LOSES for curve in curves),
                f"{metric}_falls": sum(curve.largest_loss() >= LOSES for curve in curves),
            }
        rows[name] = row
    return rows


def _curves(results: Results, name: str, window: int) -> list[list[Curve]]:
    """Accuracy and formatting of each seed of a run, in the order of the seeds."""
    runs = [SeedRuns(results, seed, window) for seed in sorted(results.metrics[name])]
    return [[run.curve(name, metric) for run in runs] for metric in ("accuracy", "formatting")]


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


def _without_gradient(seeds: Mapping[int, Sequence[dict[str, Any]]]) -> float | None:
    """The share of steps without a gradient in the last third of some runs, in percent."""
    norms = [row["grad_norm"] for rows in seeds.values() for row in rows[-(len(rows) // 3) :] if "grad_norm" in row]
    return rounded(100 * sum(norm == 0 for norm in norms) / len(norms)) if norms else None


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


def _highest_end(results: Results, regime: str) -> float | None:
    """The highest accuracy over the last quarter of the training, of all runs of a regime, in percent."""
    names = [name for name in results.metrics if f"-{regime}-" in name]
    ends = [
        SeedRuns(results, seed, 1).curve(name, "accuracy").late() for name in names for seed in results.metrics[name]
    ]
    return rounded(max(ends)) if ends else None


def _pair(values: Sequence[float]) -> list[float | None]:
    """Mean and half width of the 95 % interval, None of too few seeds; to five significant digits."""
    return [*map(rounded, mean_of(values))]


def page_of(summary: Mapping[str, Any], template: str) -> str:
    """One of ``PAGES``, from the values of summary.json."""
    by_name = {claim["name"]: claim for claim in (*summary["claims"], *summary["smol"]["claims"])}
    new_seeds = {claim["name"]: claim for claim in summary["tested"]}
    effect = {row["claim"]: row for row in summary["effects"]}
    values = {"by_name": by_name, "new_seeds": new_seeds, "effect": effect, "new_base": summary["shipped"][0]}
    return render(template, {**summary, **values})


# The README


def what_was_found(page: str) -> str:
    """What was found: list and figure of the first section of docs/reproduction.md, with the links of the README."""
    text = page.partition("## In short\n")[2].partition("\nA claim *")[0].strip()
    text = text.replace("](#", "](docs/reproduction.md#").replace("](../", "](")
    return wrapped(re.sub(r"\]\((\w+)\.md", r"](docs/\1.md", text))


# Tables


def paper_table(matrix: Matrix, results: Results) -> str:
    """pass@64 and maj@64 at paper scale: the paper's, next to ours if there are any."""
    rows = [row for row in table1(matrix, "paper", results) if row["k"] == 64]
    columns = dict.fromkeys(f"{row['benchmark']}, {row['score']}@64" for row in rows)
    measured = any(row["ours"] is not None for row in rows)
    shown = rows if measured else [row | {"ours": row["paper"]} for row in rows]
    return method_table(["trained on", "method", *columns], shown, beside=measured)


def tiny_table(matrix: Matrix, results: Results, suffix: str = "") -> str:
    """Strict scores, or those of the suffix ``_lenient``; a method is the mean over its variants, as in the claims."""
    columns = [("arithmetic", score) for score in ("pass@1", "pass@32", "maj@32")]
    columns += [("arithmetic_hard", score) for score in ("pass@1", "pass@64", "maj@64")]
    titles = {"arithmetic": "held out", "arithmetic_hard": "harder"}
    variants = {
        "untrained base": (("base",),),
        "SFT": (("sft",),),
        "GRPO, stable": GRPO["stable"],
        "GTPO, stable": tuple((run,) for run in GTPO["stable"]),
        "GRPO, high rate, at its best": tuple(tuple(f"{run}@best" for run in runs) for runs in GRPO["late"]),
        "GTPO, high rate, at its end": tuple((run,) for run in GTPO["late"]),
    }
    head = " | ".join(f"{titles[benchmark]}, {score}" for benchmark, score in columns)
    lines = [f"| | {head} |", "|---" * (len(columns) + 1) + "|"]
    for title, runs in variants.items():
        cells = [
            _seed_mean(matrix, results, runs, benchmark, score.replace("@", f"{suffix}@"))
            for benchmark, score in columns
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seed_mean(matrix: Matrix, results: Results, variants: Sequence[Sequence[str]], benchmark: str, name: str) -> str:
    """A cell: the mean over variants of each seed that has them all, then over seeds, with the 95 % interval."""
    values = []
    for seed in [0] if variants == (("base",),) else seeds_of_all(matrix, "tiny"):
        seed_runs = SeedRuns(results, seed, matrix["tiny"]["window"])
        try:
            means = [Measure.score(benchmark, name, tuple(runs)).value(seed_runs) for runs in variants]
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
    experiments = experiments_of(matrix, select_figures(matrix, ["all"], "tiny"), "tiny")
    of_claims = [claim for figure in OWN_SEEDS for claim in read_claims().get(figure, ())]
    of_tested = work_of(matrix, of_claims, TESTED_SEEDS)[0]
    of_gentle = experiments_of(matrix, ["gentle"], "gentle")
    sources = (
        (GENTLE, "gentle", of_gentle),
        (DIRECTORY, "tiny", experiments),
        (TESTED, "tiny", of_tested),
        (SMOL, "smol", arms_of_smol(matrix)),
        (SHIPPED, "tiny", work_of(matrix, find_claims(SHIPPED_CLAIMS), SHIPPED_RUNS)[0]),
    )
    for directory, scale, runs in sources:
        if finished := [(run.name, run.seed) for run in runs if run.run.is_finished]:
            found = read_results([RUNS / scale])
            shutil.rmtree(directory, ignore_errors=True)
            condense(only(found, finished), directory, STORED)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    results, tested, smol, gentle, shipped = (
        read_results([path]) for path in (DIRECTORY, TESTED, SMOL, GENTLE, SHIPPED)
    )
    written, _ = draw_all(matrix, select_figures(matrix, ["all"], "tiny"), "tiny", results, DIRECTORY, ["png"])
    for name, scale, directory, found in (
        ("smol", "smol", SMOL, smol),
        ("smol_long", "smol", SMOL, smol),
        ("gentle", "gentle", GENTLE, gentle),
    ):
        if {*runs_of(matrix, [name], scale)} & {*found.metrics}:
            draw(matrix, name, scale, found).savefig(directory / f"{name}.png", dpi=100)
            written.append(directory / f"{name}.png")
    summary = summarize(matrix, results, tested, smol, gentle, write_mechanism(), shipped)
    draw_effects(summary["effects"], SIZES["points"]).savefig(DIRECTORY / "effects.png", dpi=100)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    for template, page in PAGES.items():
        page.write_text(page_of(summary, template))
    README.write_text(fill(README.read_text(), "found", what_was_found(PAGE.read_text())))
    files = [DIRECTORY / name for name in (METRICS_FILE, SCORES_FILE, "effects.png", "summary.json")]
    return [path for path in (*files, *written, *PAGES.values(), README) if path.is_file()]


def arms_of_smol(matrix: Matrix) -> list[Experiment]:
    """The runs of SmolLM2, short and long, without the warm start, from which they start."""
    runs = experiments_of(matrix, ["smol"], "smol", SMOL_SEEDS) + experiments_of(matrix, ["smol_long"], "smol")
    return [run for run in runs if run.experiments]


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
