"""Paired comparison of evaluations: difference per problem, its interval, wins and losses, mean and error over seeds.

A side is one model, or several runs that differ only in their seed (``gtpo-g8-s1``, ``gtpo-g8-s2``). Differences are
taken per problem. This removes the variance of problem difficulty, most of the interval of a single score.
"""

import json
import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.errors import UsageError, printable
from gtpo.evaluation.metrics import bootstrap_interval, pass_at_k, sizes_up_to
from gtpo.evaluation.records import Entry, ProblemScores, by_benchmark, read_entries
from gtpo.evaluation.storage import weights_have_changed
from gtpo.evaluation.table import lay_out
from gtpo.runs.directory import label_of, run_label

logger = logging.getLogger(__name__)

SAMPLING = ("problems", "k", "temperature", "problems_hash", "top_p", "max_new_tokens")  # alike in a figure
_HOW = (  # settings that may differ
    *("temperature", "top_p", "max_new_tokens", "load_in_4bit"),
    *("system_prompt", "tags", "chat_template", "chat_template_kwargs"),
)
Names = tuple[str, str]  # of two sides
Scores = tuple[list[float], list[float]]
_Metric = Callable[[Entry, ProblemScores], float]  # the score of a problem of an entry
Sides = dict[str, list[Entry]]  # what is compared: name -> the entries of one model, or of the seeds of one


@dataclass(frozen=True)
class Comparison:
    """One score of two sides on one benchmark, in percent."""

    benchmark: str
    metric: str  # such as maj@64
    names: Names
    scores: Scores  # of every seed, for each side
    per_problem: Scores  # the mean over seeds, 0 to 1, for each side

    @property
    def differences(self) -> list[float]:
        """Second minus first, per problem; rounded, so that equal scores of different sums are ties."""
        return [round(b - a, 12) for a, b in zip(*self.per_problem, strict=True)]

    @property
    def difference(self) -> float:
        """The mean difference, in points."""
        return 100 * statistics.fmean(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: bootstrap over problems, whose two scores stay together."""
        low, high = bootstrap_interval(self.differences, bounds=(-1.0, 1.0))
        return 100 * low, 100 * high

    @property
    def counts(self) -> tuple[int, int, int]:
        """Problems on which the second side is better, worse, and equal."""
        differences = self.differences
        wins = sum(value > 0 for value in differences)
        losses = sum(value < 0 for value in differences)
        return wins, losses, differences.count(0)

    @property
    def errors(self) -> tuple[float | None, float | None, float | None]:
        """Standard error over seeds of each side, and of their difference; None for one seed."""
        first, second = map(_standard_error, self.scores)
        if first is None or second is None:
            return first, second, None
        return first, second, math.hypot(first, second)


def _standard_error(values: Sequence[float]) -> float | None:
    """Of a mean; None of one value."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def find_sides(directories: Sequence[str], output_dir: str, benchmarks: Collection[str] = ()) -> Sides:
    """The sides in directories such as ``outputs/evaluation/RUN``, ``outputs/evaluation`` or ``outputs/RUN``.

    ``output_dir`` has the evaluations of a run directory. All ``benchmarks`` by default.
    """
    found = []
    for name in directories:
        for entry in _read_entries(Path(name), Path(output_dir)):
            record = vars(entry.origin) | {"settings": entry.settings}
            if weights_have_changed(record):
                stale = "%s on %s: the weights have changed since: evaluate it again"
                logger.warning(stale, entry.label, entry.benchmark)
            found.append((name, entry))
    places = {(name, entry.label) for name, entry in found}
    labels = {label for _, label in places}
    chosen = []
    for name, entry in found:
        if len(places) > len(labels):  # a label in two directories
            entry = replace(entry, label=f"{name}/{entry.label}")
        if not benchmarks or entry.benchmark in benchmarks:
            chosen.append(entry)
    return group_seeds(chosen)


def group_seeds(entries: Sequence[Entry]) -> Sides:
    """The sides of some entries, in their order: labels that differ in ``-sN`` are one, unless all of them are."""
    names = {entry.label: run_label(entry.label)[0] for entry in entries}
    if len(names) < 2:
        found = ", ".join(names) or "none"
        raise UsageError(f"a comparison needs the scores of two models, found {found}: name two.")
    if len({*names.values()}) < 2:
        names = {label: label for label in names}
    sides: Sides = {}
    for entry in entries:
        name = names[entry.label]
        sides.setdefault(name, []).append(entry)
    return sides


def _read_entries(directory: Path, output_dir: Path) -> list[Entry]:
    """The scores in a directory, or those of the run in it."""
    results = directory / "results.json"
    if results.is_file():
        return read_entries(results)
    paths = []
    for path in sorted(directory.glob("*.json")):
        if path.with_suffix(".jsonl").is_file():
            paths.append(path)
    if not paths:
        paths = sorted((output_dir / label_of(directory)).glob("*.json"))
    if not paths:
        below = sorted(str(path.parent) for path in directory.rglob("results.json"))
        others = " or ".join(below) or "outputs/evaluation/RUN, or an evaluated run"
        raise UsageError(f"--compare {directory} has no scores: name {others}.")
    entries = []
    for path in paths:
        entries += read_entries(path)
    return entries


def compare_sides(sides: Sides) -> list[Comparison]:
    """The first side with each of the others, on all benchmarks that both have: pass@1, lenient and not, pass@k, maj@k.

    Settings that differ are logged.
    """
    first, *others = sides
    of_first = by_benchmark(sides[first])
    comparisons: list[Comparison] = []
    for other in others:
        of_other = by_benchmark(sides[other])
        common = [benchmark for benchmark in of_first if benchmark in of_other]
        if not common:
            raise UsageError(f"{first} and {other} have no benchmark in common: evaluate both on one.")
        for benchmark in common:
            pair = [of_first[benchmark], of_other[benchmark]]
            comparisons += _compare(benchmark, (first, other), pair)
    return comparisons


def _compare(benchmark: str, names: Names, pair: list[list[Entry]]) -> Iterator[Comparison]:
    everything = pair[0] + pair[1]
    _check_comparable(benchmark, names, everything)
    for metric, read in _metrics(everything).items():
        first, first_problems = _over_seeds(pair[0], read)
        second, second_problems = _over_seeds(pair[1], read)
        scores = first, second
        per_problem = first_problems, second_problems
        yield Comparison(benchmark, metric, names, scores, per_problem)


def _check_comparable(benchmark: str, names: Names, entries: Sequence[Entry]) -> None:
    """Refuse different problems; log other settings that differ."""
    problems = set()
    asked = set()
    for entry in entries:
        problems.add(tuple((problem.id, problem.gold) for problem in entry.per_problem))
        asked.add(entry.settings.get("problems_hash"))
    if len(problems) > 1 or len(asked) > 1:
        both = " and ".join(names)
        raise UsageError(f"{both} have different problems of {benchmark}: evaluate the same data and --limit.")
    for name in _HOW:
        used = {json.dumps(entry.settings.get(name)) for entry in entries}
        if len(used) > 1:
            logger.warning("%s and %s were evaluated with different --%s", *names, name)
    graders = {entry.graded_by.get("grader") or "ours" for entry in entries}
    if len(graders) > 1:
        logger.warning("%s and %s were graded by different graders: %s", *names, ", ".join(sorted(graders)))


def _over_seeds(side: Sequence[Entry], read: _Metric) -> Scores:
    """A score of one side: of every seed in percent, and of every problem as its mean over the seeds."""
    by_seed = []
    of_seeds = []
    for entry in side:
        values = [read(entry, problem) for problem in entry.per_problem]
        by_seed.append(values)
        of_seeds.append(100 * statistics.fmean(values))
    of_problems = [statistics.fmean(values) for values in zip(*by_seed, strict=True)]
    return of_seeds, of_problems


def _metrics(entries: Sequence[Entry]) -> dict[str, _Metric]:
    """Name -> metric, for the scores that all entries have."""
    k = min(entry.k for entry in entries)
    metrics: dict[str, _Metric] = {"pass@1": lambda entry, problem: problem.c / problem.n}
    if all(entry.per_problem[0].correct_lenient is not None for entry in entries):
        metrics["pass@1, lenient"] = lambda entry, problem: (problem.correct_lenient or "").count("1") / problem.n
    if k == 1:
        return metrics
    metrics[f"pass@{k}"] = lambda entry, problem: pass_at_k(problem.n, problem.c, k)
    if all(k in sizes_up_to(entry.k) for entry in entries):
        metrics[f"maj@{k}"] = lambda entry, problem: float(problem.majority[sizes_up_to(entry.k).index(k)])
    return metrics


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as text, one block per pair of sides."""
    pairs: dict[Names, list[Comparison]] = {}
    for comparison in comparisons:
        pairs.setdefault(comparison.names, []).append(comparison)
    return "\n\n".join(map(_block, pairs.values()))


def _block(comparisons: Sequence[Comparison]) -> str:
    """The table of one pair of sides."""
    names = comparisons[0].names
    first, second = map(printable, names)
    about = f"Interval over {len(comparisons[0].differences)} problems, paired"
    seeds = [len(scores) for scores in comparisons[0].scores]
    if max(seeds) > 1:
        about += f"; ± standard error over {seeds[0]} and {seeds[1]} seeds"
    cells = [["Score", *names, "Difference", "95 % interval", "Win / loss / tie"]]
    cells += map(_cells, comparisons)
    title = f"{second} minus {first}, in points"
    return "\n".join([title, about, *lay_out(cells, headers=1)])


def _cells(comparison: Comparison) -> list[str]:
    """A row of the table: score, both sides and their difference, interval, counts."""
    benchmark = BENCHMARK_TITLES.get(comparison.benchmark, comparison.benchmark)
    title = f"{benchmark}, {comparison.metric}"
    values = [f"{statistics.fmean(seeds):.1f}" for seeds in comparison.scores]
    values.append(f"{comparison.difference:+.1f}")
    for column, error in enumerate(comparison.errors):
        if error is not None:
            values[column] += f" ± {error:.1f}"
    interval = "{:+.1f} to {:+.1f}".format(*comparison.interval)
    counts = " / ".join(map(str, comparison.counts))
    return [title, *values, interval, counts]


def comparable(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that have the same problems and sampling as the others of a benchmark; what is left out is logged.

    The others are of runs in the same directory, of a base model all. Most evaluations decide, then the larger number
    of problems, of samples, the higher temperature, and the newer one.
    """
    votes: dict[Any, dict[Any, None]] = {}  # (benchmark, directory of the run) -> (sampling, adapter)
    for entry in entries:
        vote = _sampling(entry), entry["adapter"]
        for place in (_place(entry), Path()):
            votes.setdefault((entry["benchmark"], place), {})[vote] = None
    kept = []
    for entry in entries:
        benchmark = entry["benchmark"]
        newest_first = reversed(votes[benchmark, _place(entry)])
        others = [sampling for sampling, _ in newest_first]
        chosen = max(others, key=lambda sampling: (others.count(sampling), *sampling[:3]))
        if _sampling(entry) == chosen:
            kept.append(entry)
        else:
            what = "scores of %s on %s are left out: problems or sampling are not as in the others"
            logger.warning(what, entry["label"], benchmark)
    return kept


def _place(entry: Mapping[str, Any]) -> Path:
    """The directory of the run of an adapter and of the runs that it is compared with."""
    return Path(entry["adapter"] or "").parent.parent


def _sampling(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    stored = entry.get("settings", {}) | {"problems": entry.get("problems")}
    return tuple(stored.get(name) or 0 for name in SAMPLING)
