"""Two arms paired by seed: interval of the mean difference, exact p, Holm's correction, the best rate of each."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from paper.figures import mean_of
from paper.results import Results
from study import Numbers, Row, Seeds, Values, Words
from study.measures import Curve, SeedRuns, measure_of

ENUMERATED, SAMPLED = 20, 2**16  # most differences with all choices of signs; choices that are drawn for more
MEANS = ("accuracy", "formatting", "entropy")
SETS_OF_ROWS = {"rows": "set of training rows", "held_out": "set of held-out rows"}  # in ``made_from``


class Pair(NamedTuple):
    """The runs of two arms at the same seeds. Differences are the second one minus the first."""

    results: Results
    names: Words
    seeds: Seeds
    window: int  # steps of the trailing mean
    benchmark: str = "arithmetic"  # of the scores
    base: str = ""  # its name
    mixed: int = 0  # seeds that are left out, because their runs are of two origins
    prompts: Mapping[str, int] = MappingProxyType({})  # name -> prompts a generation
    unlike: int = 0  # seeds that are left out, because their runs were made from other rows or rewards
    made_from: Words = ()  # what differs between those

    def runs(self) -> list[SeedRuns]:
        return [SeedRuns(self.results, seed, self.window) for seed in self.seeds]

    def values(self, measure: str) -> dict[int, list[float]]:
        """Seed -> a measure (:func:`study.measures.measure_of`) of both arms, where both have it."""
        found = {}
        measures = [measure_of(measure, name, self.benchmark, self.prompts.get(name, 1)) for name in self.names]
        for runs in self.runs():
            with suppress(KeyError):
                found[runs.seed] = [each.value(runs) for each in measures]
        return found

    def differences(self, measure: str) -> dict[int, float]:
        """Seed -> the difference in a measure."""
        return {seed: second - first for seed, (first, second) in self.values(measure).items()}

    def row(self, measure: str) -> Row:
        """What :func:`difference_row` says of a measure, and the means of both arms."""
        pairs = [*self.values(measure).values()]
        columns = zip(*pairs, strict=True)
        return difference_row([second - first for first, second in pairs]) | {"means": [*map(fmean, columns)]}

    def lost(self, is_lost: Callable[..., bool]) -> Row:
        """How many runs of each arm are lost, and McNemar's p."""
        first, second = [[is_lost(runs, name) for runs in self.runs()] for name in self.names]
        return {"grpo": sum(first), "gtpo": sum(second), "p": mcnemar_p(first, second)}  # the arms of most pages


def made_differently(first: Values, second: Values, own: Collection[str] = ()) -> list[str]:
    """What two runs were made from another one of: rows, and files of rewards; ``own``: files of one's objective.

    ``first`` and ``second``: hashes by name, as in environment.json; of condensed runs there are none.
    """
    if not (first and second):
        return []
    compared = (first.keys() & second.keys()) | ((first.keys() ^ second.keys()) - {*own})
    changed = sorted(name for name in compared if first.get(name) != second.get(name))
    return [SETS_OF_ROWS.get(name, name) for name in changed]


def rate_rows(results: Results, names: Iterable[str], seeds: Seeds) -> Row:
    """Run -> means of the last quarter over the seeds that choose a rate, with intervals, and how many there are."""
    rows = {}
    for name in names:
        found = [seed for seed in results.seeds(name) if seed in seeds]
        if not found:
            continue
        row = {}
        for key in MEANS:
            ends = [Curve(results.curve(name, seed, key)).late() for seed in found]
            row[key] = mean_of(ends)
        rows[name] = row | {"seeds": len(found)}
    return rows


def difference_row(differences: Numbers) -> Row:
    """Of paired differences: number, mean, half width of the 95 % interval, p over signs, and how many are above 0."""
    mean, half_width = mean_of(differences)
    return {
        "seeds": len(differences),
        "mean": mean,
        "half_width": half_width,
        "p": sign_flip_p(differences),
        "above": sum(difference > 0 for difference in differences),
    }


def sign_flip_p(differences: Numbers) -> float | None:
    """The share of choices of signs whose mean is at least as far from 0; None for fewer than two differences.

    Exact for up to ``ENUMERATED`` differences; of more, over ``SAMPLED`` choices that are always the same, and the
    observed one.
    """
    if len(differences) < 2:
        return None
    if len(differences) <= ENUMERATED:
        sums = np.zeros(1)
        for difference in differences:
            sums = np.concatenate([sums + difference, sums - difference])
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (SAMPLED, len(differences)))
        sums = np.append(signs @ np.asarray(differences), sum(differences))
    observed = abs(sum(differences))
    return float((np.abs(sums) >= observed - 1e-9).mean())


def mcnemar_p(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The p of McNemar's test, over the signs of the unlike pairs: is one of two paired outcomes more frequent?"""
    differences = np.subtract(first, second, dtype=float)
    unlike = differences[differences != 0]
    return sign_flip_p(unlike.tolist()) or 1.0


def add_holm(rows: Sequence[Row]) -> None:
    """Give each row of a family its ``holm``, the p after Holm's correction, once every row has a p."""
    if any(row["p"] is None for row in rows):
        return
    highest = 0.0
    by_p = sorted(rows, key=lambda row: row["p"])
    left = len(rows)
    for row in by_p:
        row["holm"] = highest = min(1.0, max(highest, left * row["p"]))
        left -= 1
