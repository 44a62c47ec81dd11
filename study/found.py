"""The results of a comparison from one base: those at the rates of its arms, their pairs and problems."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gtpo.runs.directory import RunDirectory
from gtpo.runs.provenance import code_of, why_unlike
from paper.results import Results, read_results
from study import Row, Values, Words
from study.choices import by_generation, chosen_by_halves, with_copies
from study.comparison import Arm, Base, Comparison
from study.pairs import Pair, made_differently
from study.storage import origins_in, read_origins

OF_PROBLEMS = ["completions/clipped_ratio", "frac_reward_zero_std", "reward", "reward_std"]  # metrics that show them


class Found(NamedTuple):
    """The results from one base, condensed or of this machine, in ``place``; ``origins`` by run, ``rates`` by arm.

    ``chosen``: name of a choice -> arm -> seed -> rate; the runs at these are also there under the choice's name.
    """

    base: Base
    results: Results
    origins: Values
    rates: Values
    place: Path = Path()
    chosen: Mapping[str, Row] = MappingProxyType({})

    def at(self, view: str) -> "Found":
        """With every arm at a rate, or as a choice gives it."""
        return self._replace(rates=dict.fromkeys(self.rates, view))

    def name(self, arm: Arm) -> str:
        """The name of an arm's runs."""
        return arm.run_name(self.rates.get(arm.name))

    def pair(self, comparison: Comparison, arm: Arm, minus: Arm | None = None) -> Pair:
        """An arm and the one that is subtracted, the first, at seeds that both have from one revision and machine."""
        first = minus or comparison.arms[0]
        names = [self.name(first), self.name(arm)]
        own: list[str] = []
        for each in (first, arm) if self.place.is_dir() else ():
            own += code_of(each.settings.get("objective", ""))
        same: list[int] = []
        mixed: list[int] = []
        unlike: dict[int, Words] = {}
        for seed in comparison.seeds:
            if all((name, seed) in self.results.runs for name in names):
                labels = [f"{name}-s{seed}" for name in names]
                one, other = map(self.made_from, labels)
                if changed := made_differently(one, other, own):
                    unlike[seed] = changed
                else:
                    (mixed if why_unlike(*map(self.origins.get, labels)) else same).append(seed)
        window, base = comparison.window, self.base
        made_from = sorted({name for changed in unlike.values() for name in changed})
        where = (base.benchmark_name, base.name)
        prompts = {self.name(each): each.prompts for each in comparison.arms}
        return Pair(self.results, names, same, window, *where, len(mixed), prompts, len(unlike), made_from)

    def made_from(self, label: str) -> Row:
        """Hashes of the rows and files that a run of this machine was made from."""
        return dict(self.run(label).read_environment().get("made_from", {}))

    def run(self, label: str) -> RunDirectory:
        """A run of this machine."""
        return RunDirectory(self.place / label)

    def problems(self, comparison: Comparison, arm: Arm) -> dict[int, dict[str, str]]:
        """Seed -> what makes a run of an arm useless, as its own last lines say; empty for a run without problems."""
        from gtpo.reports.summary import find_problems  # it imports Transformers

        found = {}
        for seed in comparison.seeds:
            run = (self.name(arm), seed)
            if run in self.results.runs:
                rows = self.results.runs[run].filter(OF_PROBLEMS).reset_index().to_dict("records")
                stored = self.run("{}-s{}".format(*run)).read_config()
                found[seed] = find_problems(rows, stored.get("max_completion_length"))
        return found

    def are_useless(self, arms: Sequence[Arm], comparison: Comparison) -> bool:
        """Whether every run of two arms has a problem: their difference says nothing."""
        every = (self.problems(comparison, each) for each in arms)
        return all(of_arm and all(of_arm.values()) for of_arm in every)


def found_of(comparison: Comparison, base: Base) -> Found:
    """Everything that is there from a base."""
    stored = comparison.stored(base)
    place = comparison.place(base)
    results = read_results([stored, place])
    origins = {}
    for label, origin in (read_origins(stored) | origins_in(place)).items():
        name, _, _ = label.rpartition("-s")
        if name in comparison.run_names:
            origins[label] = origin
    if comparison.choices:
        return with_choices(comparison, Found(base, results, origins, comparison.chosen_rates(results), place))
    chooser = comparison.chooser(base)
    rated = results if chooser is base else read_results([comparison.stored(chooser), comparison.place(chooser)])
    return Found(base, results, origins, comparison.chosen_rates(rated), place)


def with_choices(comparison: Comparison, found: Found) -> Found:
    """With metrics by generation, and the runs at the rates of each choice."""
    results = by_generation(found.results, comparison.arms, comparison.every_rate)
    chosen: dict[str, Row] = {}
    copies = {}
    origins = dict(found.origins)
    for name, choice in comparison.choices.items():
        chosen[name] = {
            arm.name: chosen_by_halves(comparison, choice, results, found.base, arm) for arm in comparison.arms
        }
        for arm in comparison.arms:
            for seed, rate in chosen[name][arm.name].items():
                copies[arm.run_name(name), seed] = arm.run_name(rate)
                if origin := found.origins.get(f"{arm.run_name(rate)}-s{seed}"):  # none yet of a run that is missing
                    origins[f"{arm.run_name(name)}-s{seed}"] = origin
    return found._replace(results=with_copies(results, copies), origins=origins, chosen=chosen)


def every_found(comparison: Comparison) -> list[Found]:
    return [found_of(comparison, base) for base in comparison.bases]


def every_view(comparison: Comparison, every: Sequence[Found]) -> list[Found]:
    """From each base, at each of the comparison's views if it has some."""
    if not comparison.views:
        return [*every]
    return [found.at(view) for found, view in product(every, comparison.views)]
