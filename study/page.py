"""results/, docs/reproduction.md and what the README says was found, from the stored runs.

    python -m study page

Every number comes from results/, the condensed runs; the templates have the text.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from gtpo.files import write_atomically
from gtpo.reports.curves import LEAST_SEEDS
from paper.figures import LABELS, SCORES, draw_all, mean_of
from paper.matrix import RUNS, Matrix, experiments_of, find_figure, runs_of, seeds_of_all, select_figures
from paper.results import METRICS_FILE, SCORES_FILE, Results, read_results
from study.bench import Comparison, known_comparison, known_comparisons, read_experiments
from study.claims import read_claims
from study.compare import draw_comparison, found_of
from study.compare import write_page as write_comparison_page
from study.families import families, family_values
from study.findings import findings
from study.measures import STATISTICS, largest_loss, rounded
from study.mechanism import effect_of, policy_title, store_mechanism
from study.rendering import render
from study.storage import read_origins, store
from study.verdicts import NOT_COUNTED, SIZES, SMALL, check

RESULTS = Path("results")
PLACES = {name: RESULTS / name for name in ("tiny", "smol_comparison", "collapse", "headroom")}  # of condensed runs
LOSES = 20.0  # points below an earlier value
FINDINGS = "found.template.md"  # for README.md
TEMPLATE, PAGE = "reproduction.template.md", Path("docs") / "reproduction.md"
DIRECTORY, README = PLACES["tiny"], Path("README.md")
METRICS = (
    *(name for name in LABELS if name not in SCORES),
    *("step_time", "grad_norm", "completion_length", "empty_blocks", "frac_reward_zero_std", "prefix_push"),
    "sampler_gap",  # of the sampler that was not the policy, in stored runs
    *(f"tag_logps/{tag}" for tag in ("reasoning_start", "reasoning_end", "answer_start", "answer_end")),
)
SMOL_PANELS = ("accuracy", "formatting", "entropy", "conflict_push")
VERDICTS = ("holds", "does not hold", SMALL, "undecided", NOT_COUNTED, "too few seeds", "not run")
DECIDED = VERDICTS[:3]


def summarize(
    matrix: Matrix,
    found: Mapping[str, Results],
    mechanism: Mapping[str, Any],
    origins: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, runs, and the comparisons of each family.

    ``found``: a key of ``PLACES`` -> its results; ``mechanism``: policy -> :func:`study.mechanism.summarize`;
    ``origins``: a key of ``PLACES`` -> run -> where it is from.
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
    of_families = {}
    for title, family in families().items():
        place = family["results"]
        of_families[title] = family_values(title, found[place], origins.get(place, {}))
    return {
        "settings": {"seeds": seeds} | {key: spec[key] for key in ("window", "base", "late", "evaluation")},
        "sizes": SIZES,
        "least_seeds": LEAST_SEEDS,
        "claims": claims,
        "mechanism": mechanism,
        "families": of_families,
        "smol": smol_values(found["smol_comparison"]),
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


def smol_values(results: Results) -> dict[str, Any]:
    """SmolLM2: claims, thirds of the training by run and metric, scores, the share that the filter drops."""
    comparison = known_comparison("smol")
    runs: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in results.runs):
        seeds = results.seeds(name)
        runs[name] = {"seeds": seeds}
        for metric in ("formatting", "accuracy", "entropy"):
            curves = [results.curve(name, seed, metric) for seed in seeds]
            thirds = (STATISTICS["first_third"], STATISTICS["last_third"])
            runs[name][metric] = [_pair([third(curve, 1) for curve in curves]) for third in thirds]
    claims = [check(claim, results, comparison.seeds, comparison.window) for claim in read_claims()["smol"]]
    filtered: list[float] = []
    for seed in results.seeds("gtpo"):
        filtered += results.curve("gtpo", seed, "filtered_fraction").tolist()
    share = rounded(100 * fmean(filtered)) if filtered else None
    return {"claims": claims, "runs": runs, "scores": scores_of(results), "filtered": share}


def scores_of(results: Results) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Run -> benchmark -> score (``pass@1``, ``format``) -> mean and half width, in percent."""
    rows: dict[str, Any] = {}
    table = results.scores.filter(regex="^(pass|maj)(_lenient)?@|^format$")
    for (name, benchmark), scored in table.groupby(["run", "benchmark"]):
        pairs = {score: _pair(values.dropna().tolist()) for score, values in scored.items()}
        rows.setdefault(name, {})[benchmark] = {score: pair for score, pair in pairs.items() if pair[0] is not None}
    return rows


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
    """Add the finished runs below outputs/ to the condensed ones, and write everything from these.

    Returns:
        The files written.
    """
    names = select_figures(matrix, ["all"], "tiny")
    finished = [run for run in experiments_of(matrix, names, "tiny") if run.is_finished]
    if finished:
        store(DIRECTORY, RUNS / "tiny", finished, METRICS)
    for name in known_comparisons():
        store_comparison(known_comparison(name))
    found = {place: read_results([directory]) for place, directory in PLACES.items()}
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    written = draw_all(matrix, names, "tiny", found["tiny"], DIRECTORY, ["png"])[0]
    if found["smol_comparison"].runs:
        comparison = known_comparison("smol")
        figure = draw_comparison(comparison, [found_of(comparison, comparison.bases[0])], SMOL_PANELS)
        written.append(comparison.results / "smol.png")
        write_atomically(written[-1], partial(figure.savefig, dpi=100, format="png"))
    origins = {place: read_origins(directory) for place, directory in PLACES.items()}
    summary = summarize(matrix, found, store_mechanism(), origins)
    write_atomically(DIRECTORY / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    write_atomically(PAGE, page_of(summary, TEMPLATE))
    for name in read_experiments()["comparisons"]:
        comparison = known_comparison(name)
        if any(comparison.results.glob(f"*/{METRICS_FILE}")):
            written += write_comparison_page(comparison, comparison.results, f"python -m study compare {name}")
    lines = page_of(summary, FINDINGS).strip()
    write_atomically(README, fill(README.read_text(encoding="utf-8"), "found", lines))
    files = [DIRECTORY / name for name in (METRICS_FILE, SCORES_FILE, "summary.json")]
    return [path for path in (*files, *written, PAGE, README) if path.is_file()]


def store_comparison(comparison: Comparison) -> None:
    """Add the finished runs of a comparison to its condensed ones."""
    seeds = sorted({*comparison.seeds, *comparison.rate_seeds})
    for base in comparison.bases:
        choices = product(comparison.arms, comparison.rates, seeds)
        runs = [comparison.run(base, arm, rate, seed) for arm, rate, seed in choices]
        finished = [run for run in runs if run.is_finished]
        if finished:
            place = comparison.place(base)
            store(comparison.stored(base), place, finished, METRICS, with_base=not comparison.is_shared)
