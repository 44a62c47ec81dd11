"""results/, docs/reproduction.md and what the README says was found, from the stored runs.

    python -m study page

Every number comes from results/: from the condensed runs, or from results/found.json, which names the revision that
made it. The templates have the text.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pandas import concat

from gtpo.files import write_atomically
from paper.figures import draw_all
from paper.matrix import RUNS, Matrix, experiments_of, find_figure, runs_of, seeds_of_all, select_figures
from paper.results import METRICS_FILE, Results, read_results
from study import Row, Seeds, Values
from study.bench import Comparison, known_comparison, known_comparisons, read_experiments, stored_comparison
from study.claims import NOT_COUNTED, SIZES, SMALL, check, read_claims
from study.compare import every_found, pooled_row, write_figure
from study.compare import write_page as write_comparison_page
from study.comparison import rounded_mean
from study.measures import Curve, rounded
from study.objectives import write_objectives
from study.rendering import render
from study.storage import store

PLACES = {name: Path("results") / path for name, path in read_experiments()["places"].items()}  # of condensed runs
FINDINGS = "found.template.md"  # for README.md
DIRECTORY, README = PLACES["tiny"], Path("README.md")
FOUND = Path("results/found.json")  # families, findings, single updates: of experiments that are over
PAGES = {  # template -> page
    "reproduction.template.md": Path("docs/reproduction.md"),
    "figures.template.md": DIRECTORY / "claims.md",
    "details.template.md": Path("results/details.md"),
}
METRICS = read_experiments()["stored_metrics"]
VERDICTS = ("holds", "does not hold", SMALL, "undecided", NOT_COUNTED, "too few seeds", "not run")
DECIDED = VERDICTS[:3]


def summarize(matrix: Matrix, found: Mapping[str, Results]) -> Row:
    """The content of summary.json: settings, claims with verdicts, runs and scores.

    ``found``: a key of ``PLACES`` -> its results.
    """
    spec = matrix["tiny"]
    seeds = seeds_of_all(matrix, "tiny")
    results = found["tiny"]
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {"seeds": seeds, "base": spec["base"], "late": spec["late"]},
        "sizes": SIZES,
        **claim_values(results, seeds, spec["window"]),
        "smol": smol_values(found["smol_comparison"]),
        "on_tags": means_over_bases("tag_correction"),
        "after_20_steps": means_over_bases("early"),
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "drawn": [name for name in names if results.names & {*runs_of(matrix, [name], "tiny")}],
        "scores": scores_of(results),
        "greedy": scores_of(found["collapse"]),
        "untrained": {place: scores_of(results).get("base", {}) for place, results in found.items()},
    }


def claim_values(results: Results, seeds: Seeds, window: int) -> Row:
    """The claims of the paper at tiny scale with their verdicts, and how many there are of each verdict."""
    claims = []
    for figure, of_figure in read_claims().items():
        claims += [{"figure": figure, **check(claim, results, seeds, window)} for claim in of_figure]
    by_verdict = Counter(claim["verdict"] for claim in claims)
    compared = [claim for claim in claims if claim["size"] and not claim["why"]]
    return {
        "claims": claims,
        "verdicts": {name: by_verdict[name] for name in VERDICTS},
        "with_margin": sum(claim["verdict"] == "holds" and claim["mean"] - claim["difference"] > 1 for claim in claims),
        "by_chance": round(0.025 * len(compared), 1),
    }


def smol_values(results: Results) -> Row:
    """SmolLM2: claims, thirds of the training by run and metric, scores, the share that the filter drops."""
    comparison = stored_comparison("smol")
    runs: Row = {}
    for name in dict.fromkeys(name for name, _ in results.runs):
        seeds = results.seeds(name)
        runs[name] = {"seeds": seeds}
        for metric in ("formatting", "accuracy"):
            curves = [Curve(results.curve(name, seed, metric)) for seed in seeds]
            thirds = ([curve.of(third) for curve in curves] for third in ("first_third", "last_third"))
            runs[name][metric] = [*map(rounded_mean, thirds)]
    of_smol = read_claims("smol_claims.yaml")["smol"]
    claims = [check(claim, results, comparison.seeds, comparison.window) for claim in of_smol]
    filtered = [results.curve("gtpo", seed, "filtered_fraction") for seed in results.seeds("gtpo")]
    share = 100 * float(concat(filtered).mean()) if filtered else None
    return {"claims": claims, "runs": runs, "scores": scores_of(results), "filtered": rounded(share)}


def means_over_bases(name: str) -> Row:
    """Arm of a stored comparison -> measure -> its mean difference from the first arm, over the bases.

    The p of a primary measure is that of its distance from the planned bound.
    """
    comparison = stored_comparison(name)
    bounds = {primary["measure"]: primary.get("above", 0.0) for primary in comparison.primary}
    every = every_found(comparison)
    rows = {}
    for arm in comparison.arms[1:]:
        pairs = [found.pair(comparison, arm) for found in every]
        rows[arm.name] = {
            measure: pooled_row(pairs, measure, bounds.get(measure, 0.0)) for measure in comparison.measures
        }
    return rows


def scores_of(results: Results) -> Row:
    """Run -> benchmark -> score (``pass@1``, ``format``) -> mean and half width, in percent."""
    rows: Row = {}
    table = results.scores.filter(regex="^(pass|maj)(_lenient)?@|^format$")
    for (name, benchmark), scored in table.groupby(["run", "benchmark"]):
        columns = scored.dropna(axis=1, how="all").items()
        pairs = {score: rounded_mean(values.dropna().tolist()) for score, values in columns}
        rows.setdefault(name, {})[benchmark] = pairs
    return rows


def page_of(summary: Values, template: str) -> str:
    """One of ``PAGES``, or the README's findings, from the values of summary.json and ``FOUND``."""
    by_name = {claim["name"]: claim for claim in (*summary["claims"], *summary["smol"]["claims"])}
    stored = json.loads(FOUND.read_text(encoding="utf-8"))
    return render(template, {**stored, **summary, "by_name": by_name, "decided": DECIDED})


# Files


def fill(text: str, name: str, content: str) -> str:
    """The text with ``content`` between the comments ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: If the text lacks one of the comments.
    """
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)"
    filled, count = re.subn(pattern, lambda _: f"{content}\n", text, flags=re.DOTALL)
    if not count:
        raise ValueError(f"no `<!-- {name} -->` followed by `<!-- end -->`: add both comments")
    return filled


def write_page(matrix: Matrix) -> list[Path]:
    """Add the finished runs below outputs/ to the condensed ones, and write everything from these.

    Returns:
        The files written.
    """
    names = select_figures(matrix, ["all"], "tiny")
    store(DIRECTORY, RUNS / "tiny", experiments_of(matrix, names, "tiny"), METRICS)
    for name in known_comparisons():
        store_comparison(known_comparison(name))
    found = {place: read_results([directory]) for place, directory in PLACES.items()}
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    written = draw_all(matrix, names, "tiny", found["tiny"], DIRECTORY, ["png"])[0]
    if found["smol_comparison"].runs:
        comparison = stored_comparison("smol")
        written.append(comparison.results / "smol.png")
        write_figure(comparison, every_found(comparison), written[-1])
    summary = summarize(matrix, found)
    write_atomically(DIRECTORY / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    for template, page in PAGES.items():
        write_atomically(page, page_of(summary, template))
    for name in read_experiments()["comparisons"]:
        comparison = stored_comparison(name)
        if any(comparison.results.glob(f"*/{METRICS_FILE}")):
            written += write_comparison_page(comparison, comparison.results, f"python -m study compare {name}")
    written += write_objectives()
    lines = page_of(summary, FINDINGS).strip()
    write_atomically(README, fill(README.read_text(encoding="utf-8"), "found", lines))
    return [DIRECTORY / "summary.json", *written, *PAGES.values(), README]


def store_comparison(comparison: Comparison) -> None:
    """Add the finished runs of a comparison to its condensed ones."""
    seeds = sorted({*comparison.seeds, *comparison.rate_seeds})
    for base in comparison.bases:
        runs = comparison.runs(base, comparison.arms, comparison.rates, seeds)
        store(comparison.stored(base), comparison.place(base), runs, METRICS, with_base=not comparison.is_shared)
