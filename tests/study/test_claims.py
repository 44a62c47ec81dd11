"""The claims: what they read, in which unit, and the verdict on their margins."""

import pytest
from helpers.files import tables_of
from helpers.results import results_of

from study.claims import verdict
from study.measures import Measure, SeedRuns, has_fallen


@pytest.mark.parametrize(("margins", "size", "expected"), tables_of(__file__)["verdict"])
def test_verdict(margins: list[float], size: float | None, expected: str) -> None:
    assert verdict(margins, size) == expected


def measured(values: list[float], *names: str) -> list[float]:
    """Statistics of a metric at steps 10, 20, ..., with trailing means of two."""
    rows = [{"step": 10 * i, "kl": value} for i, value in enumerate(values, start=1)]
    runs = SeedRuns(results_of({"a": {1: rows}}), 1, window=2)
    return [Measure("kl", name, ("a",)).value(runs) for name in names]


def test_measures_by_hand() -> None:
    values = [0.0, 4.0, 8.0, 6.0, 2.0, 4.0, 0.0, 2.0]  # quarters: 2, 7, 3, 1; trailing means: 0, 2, 6, 7, 4, 3, 2, 1
    assert measured(values, "early", "late", "mean", "highest", "fall") == [2.0, 1.0, 3.25, 7.0, 6.0]
    assert measured(values, "first_third", "last_third") == [2.0, 1.0]
    # half of 7 is reached at the third, (7 + 1) / 2 at the fifth
    assert measured(values, "rise_step", "fall_step") == [30, 50]
    assert measured([0.0, 4.0, 0.0, 8.0, 0.0, 0.0], "rise_step") == [20]  # trailing means: 0, 2, 2, 4, 4, 0


@pytest.mark.parametrize(("metric", "last"), [("accuracy", 40.0), ("formatting", 50.0)])
def test_a_run_that_ends_lower_is_lost(metric: str, last: float) -> None:
    """20 points of accuracy or 10 of formatting."""
    for end in (last, last + 0.1):
        rows = [{"step": step, metric: 60.0 if step < 4 else end} for step in (1, 2, 3, 4)]
        runs = SeedRuns(results_of({"a": {1: rows}}), 1, window=1)
        assert has_fallen(runs, "a") == (end == last)
