"""The runs of a comparison that are missing: which they are, and that nothing else was made in their place."""

import json
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.runs.provenance import git_revision, hashes_of, provenance, why_unlike
from paper.matrix import Evaluation, Experiment
from paper.results import read_results
from paper.runner import run_all
from study import Seeds, Values, Words
from study.comparison import Base, Comparison, Runs
from study.found import Found, found_of
from study.storage import origin_of, read_json

COMMANDS = "commands.json"


class Works(NamedTuple):
    """The runs and evaluations of a comparison.

    Attributes:
        stored: How many runs are taken from results/.
        again: Why stored runs make no pairs with those of here, and are made again.
    """

    runs: Runs
    evaluations: list[Evaluation]
    stored: int
    again: Words


def run_comparison(comparison: Comparison, seeds: Seeds, slots: Sequence[Values]) -> Words:
    """Choose the rates if there are several, then train and score what is missing; a message for each failure."""
    failures = []
    for _ in comparison.rates[:2]:  # the first round chooses of several rates
        works = works_of(comparison, seeds)
        check_commands(comparison, works.runs)
        failures += run_all(works.runs, works.evaluations, slots)
    return failures


def works_of(comparison: Comparison, seeds: Seeds) -> Works:
    """All arms of a seed before the next seed; of an arm without a rate the runs that choose it.

    A run that is stored in results/ is left out, unless ``--output_dir`` names a place to repeat it, or it makes no
    pair with one of its seed that is missing: it is of another machine or trainer, and made again. An arm without a
    rate misses every seed.
    """
    runs: list[Experiment] = []
    evaluations = []
    again: list[str] = []
    stored = 0
    for base in comparison.bases:
        found = found_of(comparison, base)
        base = base.timed(found.results)
        every = planned_runs(comparison, found, base, seeds)
        condensed = read_results([] if comparison.repeats else [comparison.stored(base)]).runs
        missing = {run for run in every if (run.name, run.seed) not in condensed or run.directory.exists()}
        has_all_rates = all(arm.name in found.rates for arm in comparison.arms)
        incomplete = {run.seed for run in missing}.intersection(seeds) if has_all_rates else set(seeds)
        unlike = unlike_here(found, [run for run in every if run not in missing and run.seed in incomplete])
        again += sorted({f"{base.name}, {run.name} is run again: stored runs are {why}" for run, why in unlike.items()})
        left = [run for run in every if run in missing or run in unlike]
        runs += left
        stored += len(every) - len(left)
        if compared := [run for run in left if run.seed in seeds]:
            evaluations += comparison.evaluations(base, compared)
    runs.sort(key=attrgetter("seed"))
    return Works(runs, evaluations, stored, again)


def planned_runs(comparison: Comparison, found: Found, base: Base, seeds: Seeds) -> list[Experiment]:
    """The runs of all arms from a base, made or not; of an arm without a rate those that choose it."""
    every: list[Experiment] = []
    for arm in comparison.arms:
        if arm.name in comparison.rates_as:
            for seed in seeds:
                rates = {of[arm.name][seed] for of in found.chosen.values() if seed in of[arm.name]}
                every += comparison.runs(base, [arm], sorted(rates), [seed])
        elif comparison.choices:
            every += comparison.runs(base, [arm], comparison.rates_for(arm), seeds)
        elif arm.name in found.rates:
            every += comparison.runs(base, [arm], [found.rates[arm.name]], seeds)
        elif comparison.chooser(found.base) is found.base:
            every += comparison.runs(base, [arm], comparison.rates, comparison.rate_seeds)
    return every


def unlike_here(found: Found, runs: Runs) -> dict[Experiment, str]:
    """Those of some stored runs that make no pair with a run of here -> why."""
    here = origin_of(provenance())
    whys = {run: why_unlike(found.origins.get(run.label), here) for run in runs}
    return {run: why for run, why in whys.items() if why}


def check_commands(comparison: Comparison, runs: Runs) -> None:
    """UsageError if a run in the directory was made by another command: it would be taken for this one.

    commands.json has the command of each run, then a hash of each file and model of the user's that it names.
    """
    path = comparison.directory / COMMANDS
    stored = read_json(path)
    for run in runs:
        argv = [*run.argv]
        words = argv + [f"{name}#{digest}" for name, digest in hashes_of(argv[argv.index("--model") :]).items()]
        place = run.run.path
        before: Words = stored.get(place.as_posix(), words)
        gone = [word for word in (Counter(before) - Counter(words)).elements() if len(word) != 64]  # a hash of before
        if place.exists() and (gone or before[: len(argv)] != argv):
            changed = [word.partition("#")[0] for word in gone if "#" in word]
            why = f"was made with other settings ({' '.join(gone)})"
            if changed:
                why = f"was made with another {changed[0]}, which has changed since"
            raise UsageError(f"{place} {why}: name another --output_dir.")
        stored[place.as_posix()] = words
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(stored, indent=1))


def refuse_dirty(allowed: bool) -> None:
    """UsageError if files of this checkout differ from its commit: the runs could not be made again."""
    if str(git_revision()).endswith("-dirty") and not allowed:
        raise UsageError("files differ from the last commit: commit them, or add --dirty, which the page then says.")
