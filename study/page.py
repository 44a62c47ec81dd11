"""results/, docs/reproduction.md and what the README says was found, from the stored runs.

    python -m study page

Every number comes from results/, the condensed runs; the templates have the text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gtpo.files import write_atomically
from gtpo.reports.curves import LEAST_SEEDS
from paper.figures import LABELS, SCORES, draw, draw_all, mean_of
from paper.matrix import (
    RUNS,
    Experiment,
    Matrix,
    experiments_of,
    find_figure,
    runs_of,
    seeds_of_all,
    select_figures,
)
from paper.results import METRICS_FILE, SCORES_FILE, Results, read_results
from study.bench import Comparison, read_experiments
from study.claims import read_claims
from study.collapse import ADMISSION, admission, comparison, families
from study.compare import works_of
from study.compare import write_page as write_comparison_page
from study.findings import findings
from study.measures import STATISTICS, largest_loss, rounded
from study.mechanism import effect_of, policy_title, store_mechanism
from study.rendering import render
from study.storage import ORIGINS, store
from study.verdicts import NOT_COUNTED, SIZES, SMALL, check

PLACES = {  # scale -> condensed runs
    "tiny": Path("results") / "tiny",
    "smol": Path("results") / "smol_comparison",
    "collapse": Path("results") / "collapse",
    "headroom": Path("results") / "headroom",
}
COMPARED = ("collapse", "headroom")  # scales of the families
SMOL_SEEDS = range(1, 9)
LOSES = 20.0  # points below an earlier value
FINDINGS = "found.template.md"  # for README.md
TEMPLATE, PAGE = "reproduction.template.md", Path("docs") / "reproduction.md"
DIRECTORY, README = PLACES["tiny"], Path("README.md")
METRICS = tuple(name for name in LABELS if name not in SCORES)
STORED = (*METRICS, "step_time", "grad_norm")
COLLAPSE_METRICS = (  # beyond those of the figures
    *("completion_length", "empty_blocks", "frac_reward_zero_std", "prefix_push", "sampler_gap"),
    *(f"tag_logps/{tag}" for tag in ("reasoning_start", "reasoning_end", "answer_start", "answer_end")),
)
VERDICTS = ("holds", "does not hold", SMALL, "undecided", NOT_COUNTED, "too few seeds", "not run")
DECIDED = VERDICTS[:3]


def summarize(
    matrix: Matrix,
    found: Mapping[str, Results],
    mechanism: Mapping[str, Any],
    origins: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, runs, and the comparisons of each family.

    ``found``: scale -> its results; ``mechanism``: policy -> :func:`study.mechanism.summarize`; ``origins``: scale ->
    run -> where it is from.
    """
    spec = matrix["tiny"]
    seeds = seeds_of_all(matrix, "tiny")
    results = found["tiny"]
    claims = []
    for figure, of_figure in read_claims().items():
        if figure != "smol":
            claims += [{"figure": figure} | check(claim, results, seeds, spec["window"]) for claim in of_figure]
    held = [claim for claim in claims if claim["verdict"] == "holds"]
    compared = [claim for claim in claims if claim["size"] is not None and not claim["why"]]
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {"seeds": seeds} | {key: spec[key] for key in ("window", "base", "late", "evaluation")},
        "sizes": SIZES,
        "least_seeds": LEAST_SEEDS,
        "claims": claims,
        "mechanism": mechanism,
        "families": {title: _family(matrix, found, title, origins) for title in families()},
        "smol": _smol(found["smol"], matrix["smol"]["window"]),
        "findings": findings(found),
        "verdicts": {name: sum(claim["verdict"] == name for claim in claims) for name in VERDICTS},
        "with_margin": sum(claim["mean"] - claim["difference"] > 1 for claim in held),
        "by_chance": round(0.025 * len(compared), 1),
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "drawn": [name for name in names if results.names & {*runs_of(matrix, [name], "tiny")}],
        "scores": scores_of(results),
        "greedy": scores_of(found["collapse"]),
        "stable": _formatting_lost(results, spec["window"]),
    }


def _family(matrix: Matrix, found: Mapping[str, Results], title: str, origins: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of a family, and which rates its rule admits."""
    family = families()[title]
    results, window = found[family.scale], matrix[family.scale]["window"]
    compared = comparison(results, window, family, origins.get(family.scale, {}))
    return compared | {"admission": admission(results, window, family), "planned": len(family.seeds)}


def _smol(results: Results, window: int) -> dict[str, Any]:
    """SmolLM2: claims, thirds of the training by run and metric, scores, the share that the filter drops."""
    runs: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in results.runs):
        seeds = results.seeds(name)
        runs[name] = {"seeds": seeds}
        for metric in ("formatting", "accuracy", "entropy"):
            curves = [results.curve(name, seed, metric) for seed in seeds]
            thirds = [[STATISTICS[third](curve, 1) for curve in curves] for third in ("first_third", "last_third")]
            runs[name][metric] = [_pair(values) for values in thirds]
    claims = [check(claim, results, SMOL_SEEDS, window) for claim in read_claims()["smol"]]
    return {"claims": claims, "runs": runs, "scores": scores_of(results), "filtered": _filtered(results, "gtpo")}


def scores_of(results: Results) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Run -> benchmark -> score (``pass@1``, ``format``) -> mean and half width, in percent."""
    rows: dict[str, Any] = {}
    for (name, benchmark), scored in results.scores.drop(columns="entry", errors="ignore").groupby(
        ["run", "benchmark"]
    ):
        kept = [score for score in scored if re.match("(pass|maj)(_lenient)?@|format$", score)]
        pairs = {score: _pair(scored[score].dropna().tolist()) for score in kept}
        rows.setdefault(name, {})[benchmark] = {score: pair for score, pair in pairs.items() if pair[0] is not None}
    return rows


def _filtered(results: Results, pattern: str) -> float | None:
    """The share of completions that the filter drops in the runs whose names match, in percent."""
    found = [rows for (name, _), rows in results.runs.items() if re.fullmatch(pattern, name)]
    shares = [rows["filtered_fraction"].dropna() for rows in found if "filtered_fraction" in rows]
    return rounded(100 * sum(map(sum, shares)) / sum(map(len, shares))) if any(map(len, shares)) else None


def _formatting_lost(results: Results, window: int) -> dict[str, Any]:
    """How many runs of reinforcement learning at the stable rate there are, and which lose ``LOSES`` of formatting."""
    falls = {
        (name, seed): largest_loss(results.curve(name, seed, "formatting"), window)
        for name, seed in results.runs
        if "-late-" not in name and name != "sft"
    }
    lost = [(name, seed) for (name, seed), fall in falls.items() if fall >= LOSES]
    return {
        "runs": len(falls),
        "of_grpo": sum(name.startswith("grpo") for name, _ in lost),
        "lost": [f"{name}, seed {seed}" for name, seed in lost],
    }


def _pair(values: Sequence[float]) -> list[float | None]:
    """Mean and half width of the 95 % interval, None of too few seeds; to five significant digits."""
    return [*map(rounded, mean_of(values))]


def page_of(summary: Mapping[str, Any], template: str) -> str:
    """docs/reproduction.md or the README's findings, from the values of summary.json."""
    by_name = {claim["name"]: claim for claim in (*summary["claims"], *summary["smol"]["claims"])}
    functions = {"effect_of": effect_of, "title": policy_title}
    return render(template, {**summary, **functions, "by_name": by_name, "decided": DECIDED})


# Files


def fill(text: str, name: str, content: str) -> str:
    """The text with ``content`` between the comments ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: If the text lacks one of the comments.
    """
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"no `<!-- {name} -->` followed by `<!-- end -->`: add both comments")
    return f"{before}{mark}{content}\n{end}{after}"


def write_page(matrix: Matrix) -> list[Path]:
    """Add the finished runs under outputs/reproduce/ to the condensed ones, and write everything from these.

    Returns:
        The files written.
    """
    found, written = {}, []
    for scale, directory in PLACES.items():
        finished = [run for run in stored_runs(matrix, scale) if run.run.is_finished]
        if finished:
            metrics = (*STORED, *COLLAPSE_METRICS) if scale in COMPARED else STORED
            store(directory, RUNS / scale, finished, metrics, origins=scale in COMPARED)
        directory.mkdir(parents=True, exist_ok=True)
        found[scale] = read_results([directory])
        if scale == "tiny":
            names = select_figures(matrix, ["all"], scale)
            written += draw_all(matrix, names, scale, found[scale], directory, ["png"])[0]
        elif scale == "smol" and found[scale].runs:
            figure = draw(matrix, scale, scale, found[scale])
            written.append(directory / f"{scale}.png")
            write_atomically(written[-1], partial(figure.savefig, dpi=100, format="png"))
    summary = summarize(matrix, found, store_mechanism(), read_origins())
    write_atomically(DIRECTORY / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    write_atomically(PAGE, page_of(summary, TEMPLATE))
    written += [path for name in read_experiments()["comparisons"] for path in write_comparison(name)]
    lines = page_of(summary, FINDINGS).strip()
    write_atomically(README, fill(README.read_text(encoding="utf-8"), "found", lines))
    files = [DIRECTORY / name for name in (METRICS_FILE, SCORES_FILE, "summary.json")]
    return [path for path in (*files, *written, PAGE, README) if path.is_file()]


def write_comparison(name: str) -> list[Path]:
    """Add the finished runs of a planned comparison to its condensed ones, and write its page; the files."""
    comparison = Comparison(name, read_experiments()["comparisons"][name])
    finished = [run for run in works_of(comparison, comparison.seeds)[0] if run.is_finished]
    for base in comparison.bases:
        of_base = [run for run in finished if run.run.path.parent == comparison.place(base)]
        if of_base:
            metrics = (*STORED, *COLLAPSE_METRICS)
            store(comparison.results / base.name, comparison.place(base), of_base, metrics, origins=True)
    if not any(comparison.results.glob(f"*/{METRICS_FILE}")):
        return []
    return write_comparison_page(comparison, comparison.results, f"python -m study compare {name}")


def stored_runs(matrix: Matrix, scale: str) -> list[Experiment]:
    """The runs whose results are stored; of SmolLM2 without the warm start, from which the others start."""
    figures = select_figures(matrix, ["all"], scale) if scale == "tiny" else [scale]
    planned = {
        seed for family in families().values() if family.scale == scale for seed in (*family.rate_seeds, *family.seeds)
    }
    seeds = SMOL_SEEDS if scale == "smol" else sorted({*ADMISSION, *planned}) if planned else None
    return [run for run in experiments_of(matrix, figures, scale, seeds) if scale != "smol" or run.experiments]


def read_origins(root: Path = Path()) -> dict[str, dict[str, Any]]:
    """Scale -> label of a run -> its revision and machine, of the compared runs whose origin is stored."""
    paths = {scale: root / PLACES[scale] / ORIGINS for scale in COMPARED}
    return {scale: json.loads(path.read_text(encoding="utf-8")) for scale, path in paths.items() if path.is_file()}
