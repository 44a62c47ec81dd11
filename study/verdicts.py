"""The verdict on a claim: 95 % interval of its mean margin over the seeds, paired by seed."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from statistics import fmean

from gtpo.reports.curves import Interval, interval
from paper.results import Results
from study import Row, Seeds
from study.claims import Claim
from study.comparison import sign_flip_p
from study.measures import SeedRuns

SIZES = {"points": 5.0, "nats": 0.05, "tokens": 2.0, "steps": 20.0, "10⁻³": 1.0}  # what a small difference is below
FLOOR = 5.0  # percent; two accuracies below it are both of policies that answer nothing
SMALL, NOT_COUNTED = "no large difference", "not counted"


def verdict(margins: Sequence[float], size: float | None) -> str:
    """Whether a claim holds.

    Args:
        margins: One per seed; positive supports the claim.
        size: For a claim that compares runs, the size of a small difference; None for a claim about one method against
            a threshold.

    Returns:
        "not run" or "too few seeds"; "holds" if the interval is above 0; "does not hold" if it is below 0; "no large
        difference" if it has 0 in it and is within ± ``size``; "undecided" otherwise.
    """
    found = interval(margins)
    if found is None:
        return "too few seeds" if margins else "not run"
    if found.low > 0 or found.high < 0:
        return "holds" if found.low > 0 else "does not hold"
    is_small = size is not None and -size < found.low and found.high < size
    return SMALL if is_small else "undecided"


def check(claim: Claim, results: Results, seeds: Seeds, window: int) -> Row:
    """A claim with the margin of each seed that has its runs, their mean and interval, and the verdict.

    ``difference`` is the mean without what the claim allows; ``value`` and ``threshold`` are both sides of a claim
    about a threshold, None of others; ``is_small``: the interval is within the size of a small difference; ``why``: why
    a verdict is not counted.
    """
    margins = {}
    sides = []
    for seed in seeds:
        runs = SeedRuns(results, seed, window)
        with suppress(KeyError):
            margins[str(seed)] = round(claim.margin(runs), 4)
            sides.append(claim.sides(runs))
    values = list(margins.values())
    limit = SIZES[claim.unit]
    size = limit if claim.compares_runs else None
    found = interval(values)
    why = claim.not_counted
    is_small = False
    if found:
        why = why or _floor(claim, sides) or _inactive(claim, results, seeds, window)
    if found and size:
        is_small = -limit < found.low and found.high < limit
    row: Row = {
        "name": claim.name,
        "claim": claim.sentence,
        "runs": claim.runs,
        "unit": claim.unit,
        "size": size,
        "margins": margins,
        "exact_p": sign_flip_p(values),
        "is_small": is_small,
        "verdict": NOT_COUNTED if found and why else verdict(values, size),
        "why": why,
    }
    for name, number in _numbers(claim, sides, found).items():
        row[name] = None if number is None else round(number, 4)
    return row


def _numbers(claim: Claim, sides: Sequence[tuple[float, float]], found: Interval | None) -> Row:
    numbers: Row = dict.fromkeys(("mean", "difference", "half_width", "value", "threshold"))
    if found:
        numbers["mean"] = found.mean
        numbers["difference"] = found.mean - claim.allowed
        numbers["half_width"] = found.half_width
    side = claim.measured_side
    if side is not None and sides:
        measured = [each[side] for each in sides]
        numbers["value"] = fmean(measured)
        numbers["threshold"] = sides[0][1 - side]
    return numbers


def _floor(claim: Claim, sides: Sequence[tuple[float, float]]) -> str:
    """Whether both sides are accuracies at the floor."""
    others = [measure for measure in claim.measures if measure.name != "accuracy" and not measure.benchmark]
    if others or not claim.compares_runs:
        return ""
    means = map(fmean, zip(*sides, strict=True))
    return f"both below {FLOOR:g} %" if max(means) < FLOOR else ""


def _inactive(claim: Claim, results: Results, seeds: Seeds, window: int) -> str:
    """Whether most of the runs that are compared are equal step by step: what they differ in did not act."""
    if not claim.compares_runs or any(measure.benchmark for measure in claim.measures):
        return ""
    equal = []
    for seed, (more, less) in product(seeds, claim.pairs):
        for a, b in product(more.runs, less.runs):  # type: ignore[union-attr]
            if a == b:  # the start and the end of one run
                continue
            with suppress(KeyError):
                first = results.curve(a, seed, more.name)  # type: ignore[union-attr]
                second = results.curve(b, seed, less.name)  # type: ignore[union-attr]
                equal.append(first.tolist() == second.tolist())
    return "most of the runs are equal" if sum(equal) > len(equal) / 2 else ""
