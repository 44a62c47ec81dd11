"""The verdict on a claim: 95 % interval of its mean margin over the seeds, paired by seed."""

from collections.abc import Sequence
from typing import Any

from gtpo.paper.claims import Claim
from gtpo.paper.measures import SeedRuns
from gtpo.paper.results import Results
from gtpo.reports.intervals import interval

SIZES = {"points": 5.0, "nats": 0.05, "tokens": 2.0, "steps": 20.0, "10⁻³": 1.0}  # a smaller difference is none


def verdict(margins: Sequence[float], size: float | None) -> str:
    """Whether a claim holds.

    Args:
        margins: One per seed; positive supports the claim.
        size: For a claim that compares runs, the size below which a difference is none; None for a claim about one
            method against a threshold.

    Returns:
        "not run" or "too few seeds"; "no difference" if the interval is within ± ``size``; "holds" if it is above 0;
        "does not hold" if it is below 0; "undecided" otherwise.
    """
    found = interval(margins)
    if found is None:
        return "too few seeds" if margins else "not run"
    if size is not None and -size < found.low and found.high < size:
        return "no difference"
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "undecided"


def digits_of(unit: str) -> int:
    """Decimal places to print a margin with."""
    return {"nats": 3, "steps": 0, "10⁻³": 2}.get(unit, 1)


def check(claim: Claim, results: Results, seeds: Sequence[int], window: int) -> dict[str, Any]:
    """A claim with the margin of each seed that has its runs, their mean and interval, and the verdict."""
    margins = {}
    for seed in seeds:
        try:
            margins[str(seed)] = round(claim.margin(SeedRuns(results, seed, window)), 4)
        except KeyError:
            continue
    size = SIZES[claim.unit] if claim.compares_runs else None
    found = interval(list(margins.values()))
    return {
        "name": claim.name,
        "claim": claim.sentence,
        "runs": claim.runs,
        "unit": claim.unit,
        "size": size,
        "margins": margins,
        "mean": round(found.mean, 4) if found else None,
        "half_width": round(found.half_width, 4) if found else None,
        "verdict": verdict(list(margins.values()), size),
    }
