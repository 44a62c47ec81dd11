"""The verdict on a claim: 95 % interval of its mean margin over the seeds, paired by seed."""

from collections.abc import Sequence
from itertools import product
from operator import mul
from statistics import fmean
from typing import Any

from gtpo.paper.results import Results
from gtpo.reports.curves import interval
from study.claims import Claim
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
    return SMALL if size is not None and -size < found.low and found.high < size else "undecided"


def exact_p(margins: Sequence[float]) -> float | None:
    """The share of the 2^n choices of signs whose mean is at least as far from 0; None for one seed or more than 12."""
    if not 2 <= len(margins) <= 12:
        return None
    signs = product((1, -1), repeat=len(margins))
    sums = [abs(sum(map(mul, each, margins))) for each in signs]
    return sum(found >= abs(sum(margins)) - 1e-9 for found in sums) / len(sums)


def digits_of(unit: str) -> int:
    """Decimal places to print a margin with."""
    return {"nats": 3, "steps": 0, "10⁻³": 2}.get(unit, 1)


def check(claim: Claim, results: Results, seeds: Sequence[int], window: int) -> dict[str, Any]:
    """A claim with the margin of each seed that has its runs, their mean and interval, and the verdict.

    ``difference`` is the mean without what the claim allows; ``value`` and ``threshold`` are both sides of a claim
    about a threshold, None of others; ``is_small``: the interval is within the size of a small difference; ``why``: why
    a verdict is not counted.
    """
    margins, sides = {}, []
    for seed in seeds:
        runs = SeedRuns(results, seed, window)
        try:
            margins[str(seed)] = round(claim.margin(runs), 4)
            sides.append(claim.sides(runs))
        except KeyError:
            continue
    size = SIZES[claim.unit] if claim.compares_runs else None
    found = interval(list(margins.values()))
    why = claim.not_counted or (_floor(claim, sides) or _inactive(claim, results, seeds, window) if found else "")
    limit = SIZES[claim.unit]
    side = claim.measured_side
    value, threshold = (
        (None, None) if side is None or not sides else (fmean(s[side] for s in sides), sides[0][1 - side])
    )
    return {
        "name": claim.name,
        "claim": claim.sentence,
        "runs": claim.runs,
        "unit": claim.unit,
        "size": size,
        "margins": margins,
        "mean": round(found.mean, 4) if found else None,
        "difference": round(found.mean - claim.allowed, 4) if found else None,
        "value": None if value is None else round(value, 4),
        "threshold": None if threshold is None else round(threshold, 4),
        "half_width": round(found.half_width, 4) if found else None,
        "exact_p": exact_p(list(margins.values())),
        "is_small": bool(found and size is not None and -limit < found.low and found.high < limit),
        "verdict": NOT_COUNTED if found and why else verdict(list(margins.values()), size),
        "why": why,
    }


def _floor(claim: Claim, sides: Sequence[tuple[float, float]]) -> str:
    """Whether both sides are accuracies at the floor."""
    if not claim.compares_runs or not all(
        name == "accuracy" or "@" in name for name in (m.name for m in claim.measures)
    ):
        return ""
    means = [sum(side) / len(sides) for side in zip(*sides, strict=True)]
    return f"both below {FLOOR:g} %" if max(means) < FLOOR else ""


def _inactive(claim: Claim, results: Results, seeds: Sequence[int], window: int) -> str:
    """Whether most of the runs that are compared are equal step by step: what they differ in did not act."""
    if not claim.compares_runs or any(measure.benchmark for measure in claim.measures):
        return ""
    equal = []
    for seed in seeds:
        runs = SeedRuns(results, seed, window)
        for more, less in claim.pairs:
            for a, b in product(more.runs, less.runs):  # type: ignore[union-attr]
                if a == b:  # the start and the end of one run
                    continue
                try:
                    equal.append(runs.curve(a, more.name).values == runs.curve(b, less.name).values)  # type: ignore[union-attr]
                except KeyError:
                    continue
    return "most of the runs are equal" if sum(equal) > len(equal) / 2 else ""
