"""The paper's claims, rows of ``study/claims.yaml``: what they measure and their verdicts.

A verdict is by the 95 % interval of the mean margin over the seeds, paired by seed, and its exact p.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gtpo.files import read_yaml
from gtpo.reports.curves import Interval, interval
from paper.results import Results
from study import Numbers, Row, Seeds
from study.comparison import sign_flip_p
from study.measures import Measure, SeedRuns

SIZES = {"points": 5.0, "nats": 0.05, "tokens": 2.0, "steps": 20.0, "10⁻³": 1.0}  # what a small difference is below
LEVEL = 0.05  # of the exact p
FLOOR = 5.0  # percent; two accuracies below it are both of policies that answer nothing
NUMBERS = ("mean", "difference", "half_width", "value", "threshold")  # of a row, rounded
SMALL, NOT_COUNTED = "no large difference", "not counted"
Sides = tuple[float, float]


class Claim(NamedTuple):
    """``more`` is above ``less``; either can be a threshold.

    Attributes:
        name: Its figure and what it says.
        claim: What it says, for readers.
        unit: Of the margin, a key of :data:`SIZES`.
        pairs: Measures or thresholds, (more, less); the margin is the mean over them.
        allowed: How far ``more`` may be below ``less``, in points; this makes it a claim about a threshold.
        not_counted: Why a verdict would be meaningless; else empty.
    """

    name: str
    claim: str
    unit: str
    pairs: Sequence[tuple[Measure, Measure]]
    allowed: float = 0.0
    not_counted: str = ""

    @property
    def measures(self) -> list[Measure]:
        return [side for side in chain(*self.pairs) if side.runs]

    @property
    def runs(self) -> list[str]:
        """The names of the runs that it reads."""
        names = chain(*(measure.runs for measure in self.measures))
        return [*dict.fromkeys(name.removesuffix("@best") for name in names)]

    @property
    def compares_runs(self) -> bool:
        """Whether it is about a difference between runs; the other claims are about a threshold."""
        return not self.allowed and all(side.runs for side in chain(*self.pairs))

    def sides(self, runs: SeedRuns) -> Sides:
        """``more`` and ``less`` of one seed, in the unit of the margin; raises as :class:`SeedRuns`."""
        of_more = of_less = 0.0
        for more, less in self.pairs:
            of_more += more.value(runs)
            of_less += less.value(runs)
        unit = 1000 if self.unit == "10⁻³" else 1
        scale = unit / len(self.pairs)
        return scale * of_more, scale * of_less


@cache
def read_claims(file: str = "claims.yaml") -> dict[str, list[Claim]]:
    """Figure -> its claims, in the order of the page."""
    claims = {}
    for figure, rows in read_yaml(Path(__file__).with_name(file)).items():
        claims[figure] = [_claim(**row) for row in rows]
    return claims


def _claim(more: Any, less: Any, **options: Any) -> Claim:
    pairs = [(Measure(**above), Measure(**below)) for above, below in zip(more, less, strict=True)]
    return Claim(pairs=pairs, **options)


# Verdicts


def verdict(margins: Numbers, size: float | None) -> str:
    """Whether a claim holds.

    Args:
        margins: One per seed; positive supports the claim.
        size: For a claim that compares runs, the size of a small difference; None for a claim about one method against
            a threshold.

    Returns:
        "not run" or "too few seeds"; "holds" if the interval is above 0, "does not hold" if it is below 0, and p is
        below 0.05, which takes six seeds; of the others "no large difference" if the interval is within ± ``size``,
        else "undecided".
    """
    found = interval(margins)
    if found is None:
        return "too few seeds" if margins else "not run"
    p = sign_flip_p(margins)
    if p is not None and p < LEVEL and found.low * found.high > 0:
        return "holds" if found.low > 0 else "does not hold"
    return SMALL if is_small(found, size) else "undecided"


def is_small(found: Interval | None, size: float | None) -> bool:
    """Whether an interval is within the size of a small difference."""
    return bool(found and size and max(-found.low, found.high) < size)


def check(claim: Claim, results: Results, seeds: Seeds, window: int) -> Row:
    """A claim with the margin of each seed that has its runs, their mean and interval, and the verdict.

    ``difference`` is the mean without what the claim allows; ``value`` and ``threshold`` are both sides of a claim
    about a threshold, None of others; ``is_small``: the interval is within the size of a small difference; ``why``: why
    a verdict is not counted.
    """
    margins = {}
    sides = []
    for seed in seeds:
        with suppress(KeyError):
            both = claim.sides(SeedRuns(results, seed, window))
            margins[str(seed)] = round(both[0] - both[1] + claim.allowed, 4)
            sides.append(both)
    values = [*margins.values()]
    found = interval(values)
    size = SIZES[claim.unit] if claim.compares_runs else None
    why = claim.not_counted
    if found and claim.compares_runs:
        why = why or _floor(claim, sides) or _inactive(claim, results, seeds)
    row = {
        "name": claim.name,
        "claim": claim.claim,
        "runs": claim.runs,
        "unit": claim.unit,
        "size": size,
        "margins": margins,
        "exact_p": sign_flip_p(values),
        "is_small": is_small(found, size),
        "verdict": NOT_COUNTED if found and why else verdict(values, size),
        "why": why,
        **dict.fromkeys(NUMBERS),
    }
    for name, number in _numbers(claim, sides, found).items():
        row[name] = round(number, 4)
    return row


def _numbers(claim: Claim, sides: Sequence[Sides], found: Interval | None) -> Row:
    numbers = {}
    if found:
        numbers = {"mean": found.mean, "difference": found.mean - claim.allowed, "half_width": found.half_width}
    more, less = claim.pairs[0]
    if sides and not (more.runs and less.runs):
        names = ("value", "threshold") if more.runs else ("threshold", "value")
        numbers |= zip(names, map(fmean, zip(*sides, strict=True)), strict=True)
    return numbers


def _floor(claim: Claim, sides: Sequence[Sides]) -> str:
    """Whether both sides are accuracies at the floor."""
    are_accuracies = all(measure.name == "accuracy" or measure.benchmark for measure in claim.measures)
    if are_accuracies and max(map(fmean, zip(*sides, strict=True))) < FLOOR:
        return f"both below {FLOOR:g} %"
    return ""


def _inactive(claim: Claim, results: Results, seeds: Seeds) -> str:
    """Whether most of the runs that are compared are equal step by step: what they differ in did not act."""
    equal = []
    for seed, (more, less) in product(seeds, claim.pairs):
        for a, b in product(more.runs, less.runs):
            if a == b:  # the start and the end of one run
                continue
            with suppress(KeyError):
                first = results.curve(a, seed, more.name)
                second = results.curve(b, seed, less.name)
                equal.append(first.tolist() == second.tolist())
    if sum(equal) > len(equal) / 2:
        return "most of the runs are equal"
    return ""
