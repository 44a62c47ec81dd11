"""Intervals over seeds: the quantiles, and two intervals by hand."""

import math

from mpmath import betainc
from pytest import approx

from gtpo.reports.curves import T, interval


def test_quantiles_are_those_of_student() -> None:
    """mpmath's incomplete beta function gives the distribution function."""
    for freedom, t in enumerate(T, start=2):
        above = betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2
        assert float(above) == approx(0.025, abs=3e-5), freedom
    assert len(T) == 29


def test_interval_by_hand() -> None:
    """Ten seeds: mean 5.5, variance 82.5 / 9, t = 2.262 with nine degrees of freedom."""
    found = interval([float(i) for i in range(1, 11)])
    assert found and found.mean == 5.5 and found.half_width == approx(2.262 * math.sqrt(82.5 / 9 / 10))
    assert (found.low, found.high) == approx((3.3343, 7.6657), abs=1e-4)
    assert interval([1.0, 2.0]) is None
    wide = interval([0.0, 1.0] * 50)  # more seeds than the table has
    assert wide and wide.half_width == approx(2.042 * math.sqrt(25 / 99) / 10)
