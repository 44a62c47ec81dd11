"""Intervals over seeds: the quantiles, and two intervals by hand."""

from mpmath import betainc
from pytest import approx

from gtpo.reports.curves import interval


def test_quantiles_are_those_of_student() -> None:
    """mpmath's incomplete beta function gives the distribution function."""
    for freedom in (*range(2, 61), 400):
        found = interval([1.0, *[0.0] * freedom])  # standard deviation 1 / sqrt(n)
        assert found
        t = found.half_width * (freedom + 1)
        above = betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2
        assert float(above) == approx(0.025, abs=3e-5), freedom


def test_interval_by_hand() -> None:
    """Ten seeds: mean 5.5, variance 82.5 / 9, t = 2.262 with nine degrees of freedom."""
    found = interval([float(i) for i in range(1, 11)])
    assert found and found.mean == 5.5
    assert (found.low, found.high) == approx((3.3343, 7.6657), abs=1e-4)
    assert interval([1.0, 2.0]) is None
