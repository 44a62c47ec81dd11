"""The mean of one value per seed with its 95 % interval."""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import NamedTuple

LEAST_SEEDS = 3  # with two the interval is nine times as wide as their difference
# 97.5 % quantiles of Student's t distribution with 2 to 30 degrees of freedom; with more, that of 30, which is wider
T = (
    *(4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Interval(NamedTuple):
    """A mean over seeds with its 95 % t-interval."""

    mean: float
    half_width: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval | None:
    """The mean and 95 % t-interval of one value per seed; None of fewer than ``LEAST_SEEDS``."""
    if len(values) < LEAST_SEEDS:
        return None
    freedom = len(values) - 1
    mean = fsum(values) / len(values)
    deviation = sqrt(fsum((value - mean) ** 2 for value in values) / freedom)
    half_width = T[min(freedom, 30) - 2] * deviation / sqrt(len(values))
    return Interval(mean, half_width, mean - half_width, mean + half_width)
