"""The paper's claims beside the runs of the tiny scale: results/tiny/, docs/reproduction.md and the README's tables.

    python reproduce.py --page

Every number of the page comes from results/tiny/, the condensed runs. One rule decides each claim of
configs/claims.yaml; docs/reproduction.template.md holds the text around the numbers.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.curves import smooth
from gtpo.files import CONFIGS, read_yaml
from gtpo.paper.figures import LABELS, METHODS, SCORES, best_variant, draw_all, table1, table_markdown
from gtpo.paper.matrix import RUNS, Matrix, experiments_of, figure_names, find_figure, groups_of, select_figures
from gtpo.paper.results import METRICS_FILE, SCORES_FILE, Results, condense, read_results

DIRECTORY = Path("results") / "tiny"
TEMPLATE, PAGE = Path("docs") / "reproduction.template.md", Path("docs") / "reproduction.md"
README = Path("README.md")
METRICS = tuple(name for name in LABELS if name not in SCORES)
MEASURE = re.compile(r"(?P<kind>[\w ]+|(?:pass|maj)@\d+) of (?P<what>\S+) in (?P<runs>\S+(?:, \S+)*)")


@dataclass(frozen=True)
class Curve:
    """A metric of one run: logged values, and their trailing mean over ``window`` steps."""

    steps: list[int]
    raw: list[float]
    smoothed: list[float]
    window: int

    def part(self, start: float, end: float) -> float:
        """Mean of the logged values from one fraction of the training to another, 0 to 1."""
        values = self.raw[round(start * len(self.raw)) : round(end * len(self.raw))]
        return sum(values) / len(values)

    @property
    def full(self) -> int:
        """Index of the first full window; of the last value if the run is shorter."""
        return min(self.window, len(self.raw)) - 1

    @property
    def peak(self) -> int:
        """Index of the highest smoothed value, from the first full window on."""
        return max(range(self.full, len(self.smoothed)), key=self.smoothed.__getitem__)

    def measure(self, kind: str) -> float:
        """A kind of configs/claims.yaml.

        Raises:
            ValueError: If the kind is unknown.
        """
        highest, lowest = self.smoothed[self.peak], min(self.smoothed[self.peak :])
        match kind:
            case "start":
                return self.smoothed[self.full]
            case "end":
                return self.smoothed[-1]
            case "highest":
                return highest
            case "early":
                return self.part(0, 1 / 3)
            case "late":
                return self.part(2 / 3, 1)
            case "mean":
                return self.part(0, 1)
            case "fall":
                return highest - lowest
            case "fall step":
                values = zip(self.steps[self.peak :], self.smoothed[self.peak :], strict=True)
                return next(step for step, value in values if value <= (highest + lowest) / 2)
            case "half step":
                values = zip(self.steps, self.smoothed, strict=True)
                return next(step for step, value in values if value >= max(self.smoothed) / 2)
        raise ValueError(f"kind {kind!r} is unknown: configs/claims.yaml lists the kinds")


def curve(results: Results, run: str, seed: int, metric: str, window: int) -> Curve:
    """A metric of one run.

    Raises:
        KeyError: If the run or its metric does not exist.
    """
    rows = [row for row in results.metrics[run][seed] if row.get(metric) is not None]
    if not rows:
        raise KeyError(metric)
    raw = [row[metric] for row in rows]
    return Curve([row["step"] for row in rows], raw, smooth(raw, window), window)


def measure(results: Results, expression: str | float, seed: int, window: int) -> float:
    """The value of ``more`` or ``less`` of a claim for one seed; of several runs the highest value.

    Raises:
        KeyError: If a run or its metric does not exist.
        ValueError: If the expression is malformed.
    """
    if not isinstance(expression, str):
        return float(expression)
    match = MEASURE.fullmatch(expression)
    if not match:
        raise ValueError(f"{expression!r} is not a measure: expected `KIND of METRIC in RUN, RUN`")
    kind, what, runs = match["kind"], match["what"], match["runs"].split(", ")
    if "@" in kind:
        score, k = kind.split("@")
        return max(results.scores[run][what][seed]["scores"][score][k] for run in runs)
    return max(curve(results, run, seed, what, window).measure(kind) for run in runs)


def unit_of(expression: str) -> str:
    """The unit of a measure: percentage points, nats, tokens or steps."""
    kind, what = expression.partition(" in ")[0].split(" of ")
    if kind.endswith("step"):
        return "steps"
    return {"entropy": "nats", "kl": "nats", "conflict_tokens": "tokens"}.get(what, "points")


def verdict(margins: Sequence[float], least: float, met: bool = True) -> str:
    """Whether a claim holds, from the margins of the seeds.

    Args:
        margins: One per seed; positive supports the claim.
        least: A mean margin below this is no difference.
        met: Whether the condition of the claim (``needs``) occurred.

    Returns:
        "holds" if the mean is at least ``least`` and no margin is below 0; "does not hold" if the mean is at most
        -``least`` and no margin is above 0; "not run" without margins; "cannot be seen at this scale" otherwise: the
        seeds disagree, the difference is too small, or the condition did not occur.
    """
    if not margins:
        return "not run"
    mean = sum(margins) / len(margins)
    if met and mean >= least and min(margins) >= 0:
        return "holds"
    if met and mean <= -least and max(margins) <= 0:
        return "does not hold"
    return "cannot be seen at this scale"


def check_claim(
    claim: dict[str, Any], results: Results, seeds: Sequence[int], window: int, least: dict[str, float]
) -> dict[str, Any]:
    """A claim with the margin of each seed and its verdict; seeds without the runs are omitted."""
    margins: dict[str, float] = {}
    met = "needs" not in claim
    for seed in seeds:
        try:
            more, less = (measure(results, claim[side], seed, window) for side in ("more", "less"))
            margins[str(seed)] = round(more - less, 4)
            if "needs" in claim:
                condition, _, bound = claim["needs"].rpartition(" > ")
                met = met or measure(results, condition, seed, window) > float(bound)
        except KeyError:
            continue
    unit = unit_of(claim["more"])
    return claim | {
        "needs": claim.get("needs"),
        "unit": unit,
        "margins": margins,
        "mean": _mean(margins.values()),
        "met": met,
        "verdict": verdict(list(margins.values()), least[unit], met),
    }


def _mean(values: Any) -> float | None:
    values = list(values)
    return round(sum(values) / len(values), 4) if values else None


def summarize(matrix: Matrix, results: Results) -> dict[str, Any]:
    """The content of summary.json: settings, claims with verdicts, the runs of each figure, Table 1."""
    spec, rules = matrix["tiny"], read_yaml(CONFIGS / "claims.yaml")
    runs = {}
    for name, seeds in sorted(results.metrics.items()):
        row: dict[str, Any] = {"seeds": sorted(seeds)}
        for metric in (*METRICS, "step_time"):
            try:
                curves = [curve(results, name, seed, metric, spec["window"]) for seed in sorted(seeds)]
            except KeyError:
                continue
            if metric == "step_time":
                row["minutes"] = _mean(sum(one.raw) / 60 for one in curves)
                continue
            row[metric] = {
                kind: _mean(one.measure(kind) for one in curves)
                for kind in ("start", "end", "highest", "fall", "early", "late", "mean")
            }
        for benchmark, entries in results.scores.get(name, {}).items():
            tables = [entry["scores"] for entry in entries.values()]
            row[benchmark] = {
                f"{score}@{k}": _mean(table[score][k] for table in tables) for score in SCORES for k in tables[0][score]
            }
        runs[name] = row
    claims = [check_claim(claim, results, spec["seeds"], spec["window"], rules["least"]) for claim in rules["claims"]]
    names = select_figures(matrix, ["all"], "tiny")
    return {
        "settings": {key: spec[key] for key in ("seeds", "window", "base", "evaluation")},
        "least": rules["least"],
        "claims": claims,
        "titles": {name: find_figure(matrix, name)["title"] for name in names},
        "curves": {name: groups_of(matrix, name, "tiny") for name in names},
        "runs": runs,
        "table1": table_markdown(table1(matrix, "tiny", results)),
    }


def render(summary: dict[str, Any], template: str) -> str:
    """The page, from the Jinja template and the values of summary.json."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template).render(**summary)


def readme_tables(matrix: Matrix, results: Results) -> dict[str, str]:
    """The README's tables in Markdown, by the comment that precedes each (:func:`fill`)."""
    rows = [row for row in table1(matrix, "paper", results) if row["k"] == 64]
    columns = list(dict.fromkeys((row["benchmark"], row["score"]) for row in rows))
    lines = [f"| trained on | method | {' | '.join(f'{name}, {score}@64' for name, score in columns)} |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for group, method in dict.fromkeys((row["group"], row["method"]) for row in rows):
        cells = [row for row in rows if (row["group"], row["method"]) == (group, method)]
        numbers = [
            " / ".join("-" if row[of] is None else f"{row[of]:.1f}" for of in ("ours", "paper")) for row in cells
        ]
        lines.append(f"| {group} | {method} | {' | '.join(numbers)} |")
    tables = {"paper scale": "\n".join(lines)}

    shown = [("arithmetic", score) for score in ("pass@1", "pass@32", "maj@32")]
    shown += [("arithmetic_hard", score) for score in ("pass@1", "pass@64", "maj@64")]
    titles = {"arithmetic": "held out", "arithmetic_hard": "harder"}
    lines = [
        f"| | {' | '.join(f'{titles[name]}, {score}' for name, score in shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    variants = [run for group in groups_of(matrix, "table1", "tiny").values() for run in group.values()]
    for method, title in METHODS.items():
        run = best_variant(results, [run for run in variants if run.startswith(method)], "arithmetic")
        numbers = []
        for name, score in shown:
            kind, _, k = score.partition("@")
            entries = results.scores.get(run or "", {}).get(name, {}).values()
            values = [entry["scores"][kind][k] for entry in entries]
            numbers.append(
                f"{sum(values) / len(values):.1f} ({min(values):.1f} - {max(values):.1f})" if values else "-"
            )
        lines.append(f"| {title} ({run or 'not run'}) | {' | '.join(numbers)} |")
    return tables | {"tiny scale": "\n".join(lines)}


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
    finished = [experiment for experiment in experiments if experiment.run.is_finished]
    if finished:
        found = read_results([RUNS / "tiny"])
        metrics: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for experiment in finished:
            name, seed = experiment.name, experiment.seed
            metrics.setdefault(name, {})[seed] = found.metrics[name][seed]
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        condense(Results(metrics, found.scores), DIRECTORY, [*METRICS, "step_time"])
    results = read_results([DIRECTORY])
    written, _ = draw_all(matrix, figure_names(matrix), "tiny", results, DIRECTORY)
    summary = summarize(matrix, results)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(summary, TEMPLATE.read_text()))
    for name, table in readme_tables(matrix, results).items():
        README.write_text(fill(README.read_text(), name, table))
    return [DIRECTORY / METRICS_FILE, DIRECTORY / SCORES_FILE, *written, DIRECTORY / "summary.json", PAGE, README]
