"""Paired comparisons of two arms over seeds: interval of the mean difference, exact p, Holm's correction."""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from paper.figures import mean_of

ENUMERATED, SAMPLED = 20, 2**16  # most differences with all choices of signs; choices that are drawn for more


def compare(differences: Sequence[float]) -> dict[str, Any]:
    """Number, mean and half width of the 95 % interval of paired differences, and their p over signs."""
    mean, half_width = mean_of(differences)
    return {"seeds": len(differences), "mean": mean, "half_width": half_width, "p": sign_flip_p(differences)}


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """The share of choices of signs whose mean is at least as far from 0; None for fewer than two differences.

    Exact for up to ``ENUMERATED`` differences; of more, over ``SAMPLED`` choices that are always the same, and the
    observed one.
    """
    if len(differences) < 2:
        return None
    sums = np.zeros(1)
    if len(differences) <= ENUMERATED:
        for difference in differences:
            sums = np.concatenate([sums + difference, sums - difference])
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (SAMPLED, len(differences)))
        sums = np.append(signs @ np.asarray(differences), sum(differences))
    return float((np.abs(sums) >= abs(sum(differences)) - 1e-9).mean())


def mcnemar_p(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The exact p of McNemar's test: is one of two paired outcomes more frequent?"""
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    n = only_first + only_second
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """The p of each member of a family after Holm's correction."""
    adjusted, highest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        adjusted[name] = highest = max(highest, min(1.0, (len(ps) - rank) * p))
    return adjusted
