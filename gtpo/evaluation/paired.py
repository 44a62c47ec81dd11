"""Paired comparison of evaluations: difference per problem, its interval, wins and losses, mean and error over seeds.

A side is one model, or several runs that differ only in their seed (``gtpo-g8-s1``, ``gtpo-g8-s2``). Differences are
taken per problem. This removes the variance of problem difficulty, most of the interval of a single score.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from statistics import stdev

import numpy as np
from numpy.typing import NDArray

from gtpo.arguments import BENCHMARK_TITLES, GTPOArguments, PromptArguments, fields_of
from gtpo.errors import UsageError, printable
from gtpo.evaluation.metrics import bootstrap_interval, pass_at_k, sizes_up_to
from gtpo.evaluation.records import Entries, Entry, Groups, Sampling, Stored, by_benchmark, grouped, read_entries
from gtpo.evaluation.storage import weights_have_changed
from gtpo.evaluation.table import lay_out, trained_on_text
from gtpo.runs.directory import RunDirectory, label_of, run_label, trained_differently

logger = logging.getLogger(__name__)

_HOW = (*fields_of([Sampling, PromptArguments]), "backend", "grader")  # settings that may differ
_GRADED_BY = {"code": "files of --grader", "grading": "files of gtpo/grading", "math-verify": "math-verify"}
_OF_METHODS = {"method", "objective", "use_bias_correction_kl", *fields_of([GTPOArguments])}


Names = tuple[str, str]  # of two sides
Sides = Groups  # what is compared: name -> the entries of one model, or of the seeds of one


@dataclass(frozen=True)
class Comparison:
    """One score of two sides on one benchmark, in percent."""

    benchmark: str
    metric: str  # such as maj@64
    names: Names
    values: list[NDArray]  # 0 to 1, for each side. Shape (seeds, problems)
    single: Sequence[str] = ()  # sides that are one trained run

    @property
    def scores(self) -> list[NDArray]:
        """Of every seed, for each side, in percent."""
        return [100 * side.mean(1) for side in self.values]

    @property
    def differences(self) -> NDArray:
        """Second minus first, means over seeds, per problem; rounded, so that equal scores of other sums are ties."""
        first, second = (side.mean(0) for side in self.values)
        return np.round(second - first, 12)

    @property
    def difference(self) -> float:
        """The mean difference, in points."""
        return 100 * float(self.differences.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: bootstrap over problems, whose two scores stay together."""
        low, high = bootstrap_interval(self.differences.tolist(), bounds=(-1.0, 1.0))
        return 100 * low, 100 * high

    @property
    def counts(self) -> tuple[int, int, int]:
        """Problems on which the second side is better, worse, and equal."""
        signs = np.sign(self.differences).tolist()
        return signs.count(1), signs.count(-1), signs.count(0)

    @property
    def errors(self) -> tuple[float, float, float]:
        """Standard error over seeds of each side, and of their difference; NaN for one seed."""
        first, second = (stdev(side) / math.sqrt(len(side)) if len(side) > 1 else math.nan for side in self.scores)
        return first, second, math.hypot(first, second)


def find_sides(directories: Sequence[str], output_dir: str, benchmarks: Collection[str] = ()) -> Sides:
    """The sides in directories such as ``outputs/evaluation/RUN``, ``outputs/evaluation`` or ``outputs/RUN``.

    ``output_dir`` has the evaluations of a run directory. All ``benchmarks`` by default.
    """
    entries = []
    places: dict[str, str] = {}  # label -> its directory
    for name in directories:
        for entry in _read_entries(Path(name), Path(output_dir)):
            if weights_have_changed(entry):
                logger.warning("%s: the weights have changed since: evaluate it again", entry.label)
            if said := trained_on_text(entry):
                logger.warning("%s was %s of %s", entry.label, said, entry.benchmark)
            if places.setdefault(entry.label, name) != name:  # the same label, of another directory
                entry = replace(entry, label=f"{name}/{entry.label}")
            if not benchmarks or entry.benchmark in benchmarks:
                entries.append(entry)
    return group_seeds(entries)


def group_seeds(entries: Entries) -> Sides:
    """The sides of some entries, in their order: labels that differ in ``-sN`` are one, unless all of them are.

    Runs that differ in more than their seed, by their settings, stay apart, which is logged.
    """
    names = {entry.label: run_label(entry.label)[0] for entry in entries}
    if len(names) < 2:
        found = ", ".join(names) or "none"
        raise UsageError(f"a comparison needs the scores of two models, found {found}: name two.")
    if len({*names.values()}) < 2:
        names = {label: label for label in names}
    pooled = grouped(entries, lambda entry: names[entry.label])
    for name, seeds in pooled.items():
        differing = trained_differently(_runs_of(seeds))
        if differing and name != seeds[0].label:
            logger.warning("the runs of %s are not seeds of one, and stay apart: they differ in %s", name, differing)
            names.update({entry.label: entry.label for entry in seeds})
    return grouped(entries, lambda entry: names[entry.label])


def _read_entries(directory: Path, output_dir: Path) -> list[Entry]:
    """The scores in a directory, or those of the run in it."""
    results = directory / "results.json"
    if results.is_file():
        return read_entries(results)
    own = [path for path in sorted(directory.glob("*.json")) if path.with_suffix(".jsonl").is_file()]
    paths = own or sorted((output_dir / label_of(directory)).glob("*.json"))
    if not paths:
        raise UsageError(f"--compare {directory} has no scores: name outputs/evaluation/RUN, or an evaluated run.")
    return [entry for path in paths for entry in read_entries(path)]


def compare_sides(sides: Sides) -> list[Comparison]:
    """The first side with each of the others, on all benchmarks that both have: pass@1, lenient and not, pass@k, maj@k.

    Settings that differ are logged.
    """
    first, *others = sides
    of_first = by_benchmark(sides[first])
    comparisons: list[Comparison] = []
    for other in others:
        if differing := trained_differently(_runs_of(sides[first] + sides[other]), _OF_METHODS):
            logger.warning("%s and %s were also trained with different %s", first, other, differing)
        of_other = by_benchmark(sides[other])
        common = [benchmark for benchmark in of_first if benchmark in of_other]
        if not common:
            raise UsageError(f"{first} and {other} have no benchmark in common: evaluate both on one.")
        for benchmark in common:
            comparisons += _compare(benchmark, (first, other), [of_first[benchmark], of_other[benchmark]])
    return comparisons


def _runs_of(entries: Entries) -> list[RunDirectory]:
    """The runs of some entries, once each; of a model the directory around it."""
    runs = [entry.origin.run for entry in entries]
    return [*{run.path: run for run in runs}.values()]


def _compare(benchmark: str, names: Names, pair: list[list[Entry]]) -> Iterator[Comparison]:
    everything = pair[0] + pair[1]
    _check_comparable(benchmark, names, everything)
    k = min(entry.k for entry in everything)
    of_sides = [[_per_problem(entry, k) for entry in side] for side in pair]
    single = [name for name, side in zip(names, pair, strict=True) if len(side) == 1 and _is_trained(side[0])]
    for metric in of_sides[0][0]:
        if all(metric in scores for scores in chain(*of_sides)):
            values = [np.array([scores[metric] for scores in side]) for side in of_sides]
            yield Comparison(benchmark, metric, names, values, single)


def _is_trained(entry: Entry) -> bool:
    """Whether the weights are those of a run, or an adapter, and not a base."""
    return bool(entry.origin.adapter) or entry.origin.run.is_ours


def _per_problem(entry: Entry, k: int) -> dict[str, list[float]]:
    """Name -> the score of each problem; pass@k and maj@k at this k."""
    problems = entry.per_problem
    scores = {"pass@1": [problem.c / problem.n for problem in problems]}
    if problems[0].correct_lenient is not None:
        scores["pass@1, lenient"] = [str(problem.correct_lenient).count("1") / problem.n for problem in problems]
    if k == 1:
        return scores
    scores[f"pass@{k}"] = [pass_at_k(problem.n, problem.c, k) for problem in problems]
    sizes = sizes_up_to(entry.k)
    if k in sizes:
        place = sizes.index(k)
        scores[f"maj@{k}"] = [float(problem.majority[place]) for problem in problems]
    return scores


def _check_comparable(benchmark: str, names: Names, entries: Entries) -> None:
    """Refuse different problems; log other settings that differ."""
    problems = set()
    for entry in entries:
        golds = tuple((problem.id, problem.gold) for problem in entry.per_problem)
        problems.add((entry.settings.problems_hash, golds))
    if len(problems) > 1:
        both = " and ".join(names)
        raise UsageError(f"{both} have different problems of {benchmark}: evaluate the same data and --limit.")
    if differing := _differing(_HOW, [entry.settings.write() | entry.graded_by for entry in entries]):
        logger.warning("%s and %s were evaluated with different --%s", *names, ", --".join(differing))
    graders = [{"grading": entry.graded_by.get("git_revision")} | entry.graded_by for entry in entries]
    if "grader" not in differing and (differing := _differing(_GRADED_BY, graders)):
        changed = ", ".join(_GRADED_BY[name] for name in differing)
        logger.warning("%s and %s were graded with different %s: evaluate.py --regrade", *names, changed)


def _differing(names: Iterable[str], settings: Sequence[Stored]) -> list[str]:
    """The names of the settings that are not the same everywhere."""
    first, *others = settings
    return [name for name in names if any(other.get(name) != first.get(name) for other in others)]


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as text, one block per pair of sides."""
    pairs = groupby(comparisons, key=lambda comparison: comparison.names)
    return "\n\n".join(_block([*of_pair]) for _, of_pair in pairs)


def _block(comparisons: Sequence[Comparison]) -> str:
    """The table of one pair of sides."""
    names = comparisons[0].names
    first, second = map(printable, names)
    about = f"Interval over {len(comparisons[0].differences)} problems, paired"
    one, other = map(len, comparisons[0].values)
    if one > 1 or other > 1:
        about += f"; ± standard error over {one} and {other} seeds"
    header = ["Score", *names, "Difference", "95 % interval", "Win / loss / tie"]
    table = lay_out([header, *map(_cells, comparisons)], headers=1)
    lines = [f"{second} minus {first}, in points", about]
    if single := comparisons[0].single:
        runs = " and of ".join(map(printable, single))
        lines.append(f"One run of {runs}: another seed may differ by more; python -m study compare pairs seeds")
    return "\n".join([*lines, *table])


def _cells(comparison: Comparison) -> list[str]:
    """A row of the table: score, both sides and their difference, interval, counts."""
    benchmark = BENCHMARK_TITLES.get(comparison.benchmark, comparison.benchmark)
    title = f"{benchmark}, {comparison.metric}"
    values = [f"{seeds.mean():.1f}" for seeds in comparison.scores]
    values.append(f"{comparison.difference:+.1f}")
    for column, error in enumerate(comparison.errors):
        if not math.isnan(error):
            values[column] += f" ± {error:.1f}"
    interval = "{:+.1f} to {:+.1f}".format(*comparison.interval)
    return [title, *values, interval, " / ".join(map(str, comparison.counts))]
