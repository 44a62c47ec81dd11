"""Rates that one half of the seeds chooses for the other, and metrics by generation instead of by step."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from pandas import DataFrame, concat

from paper.results import METRICS_INDEX, SCORES_INDEX, Results, Run
from study import Seeds, Words
from study.comparison import Arm, Base, Choice, Comparison
from study.measures import SeedRuns, measure_of


def by_generation(results: Results, arms: Sequence[Arm], rates: Words) -> Results:
    """The metrics of arms with several updates a generation as means over the updates of each; step is generation."""
    tables = dict(results.runs)
    for arm in arms:
        for name, seed in [*tables]:
            if arm.updates > 1 and name in {arm.run_name(rate) for rate in rates}:
                table = tables[name, seed]
                generation = (table.index - 1) // arm.updates + 1
                tables[name, seed] = table.groupby(generation.rename("step")).mean(numeric_only=True)
    parts = [table.reset_index().assign(run=name, seed=seed) for (name, seed), table in tables.items()]
    metrics = concat(parts) if parts else DataFrame(columns=METRICS_INDEX)
    return Results(metrics.set_index(METRICS_INDEX).sort_index(), results.scores)


def chosen_by_halves(comparison: Comparison, choice: Choice, results: Results, base: Base, arm: Arm) -> dict[int, str]:
    """Seed -> the rate of an arm that the other half of the seeds chooses, once that half has all of its runs."""
    chooser = next(each for each in comparison.arms if each.name == comparison.rates_as.get(arm.name, arm.name))
    rates = comparison.rates_for(chooser)
    middle = len(comparison.seeds) // 2
    halves = comparison.seeds[:middle], comparison.seeds[middle:]
    found: dict[int, str] = {}
    for seeds, others in (halves, halves[::-1]):
        means = {}
        for rate in rates:
            mean = means_of(choice, results, chooser.run_name(rate), others, base, comparison.window)
            if mean is not None:
                means[rate] = mean
        if len(means) == len(rates):
            allowed = [rate for rate, (may_be_chosen, _) in means.items() if may_be_chosen] or rates
            best = max(allowed, key=lambda rate: means[rate][1])
            found |= dict.fromkeys(seeds, best)
    return found


def means_of(
    choice: Choice, results: Results, name: str, seeds: Seeds, base: Base, window: int
) -> tuple[bool, float] | None:
    """Whether a rate may be chosen, and the mean that chooses; None if a run or its score is missing."""
    with suppress(KeyError):
        runs = [SeedRuns(results, seed, window) for seed in seeds]

        def mean(measure: str) -> float:
            return fmean(measure_of(measure, name, base.benchmark_name).value(each) for each in runs)

        return all(mean(measure) >= least for measure, least in choice.least.items()), mean(choice.by)
    return None


def with_copies(results: Results, copies: Mapping[Run, str]) -> Results:
    """With runs under a second name: name and seed -> the name of the run."""
    frames = []
    for frame, index in ((results.metrics, METRICS_INDEX), (results.scores, SCORES_INDEX)):
        rows = frame.reset_index()
        parts = [rows]
        for (name, seed), run in copies.items():
            parts.append(rows[(rows["run"] == run) & (rows["seed"] == seed)].assign(run=name))
        frames.append(concat(parts).set_index(index).sort_index())
    return Results(*frames)
