"""What a comparison measures of a run, by hand, and when the run is lost."""

import pytest
from helpers.results import results_of

from study.measures import Measure, SeedRuns, has_fallen


def measured(values: list[float], *names: str) -> list[float]:
    """Statistics of a metric at steps 10, 20, ..., with trailing means of two."""
    rows = [{"step": 10 * i, "kl": value} for i, value in enumerate(values, start=1)]
    runs = SeedRuns(results_of({"a": {1: rows}}), 1, window=2)
    return [Measure("kl", name, "a").value(runs) for name in names]


def test_measures_by_hand() -> None:
    values = [0.0, 4.0, 8.0, 6.0, 2.0, 4.0, 0.0, 2.0]  # quarters: 2, 7, 3, 1; trailing means: 0, 2, 6, 7, 4, 3, 2, 1
    assert measured(values, "late", "mean", "highest", "fall") == [1.0, 3.25, 7.0, 6.0]
    assert measured(values, "last_third", "20-40") == [1.0, 6.0]


@pytest.mark.parametrize(("metric", "last"), [("accuracy", 40.0), ("formatting", 50.0)])
def test_a_run_that_ends_lower_is_lost(metric: str, last: float) -> None:
    """20 points of accuracy or 10 of formatting."""
    for end in (last, last + 0.1):
        rows = [{"step": step, metric: 60.0 if step < 4 else end} for step in (1, 2, 3, 4)]
        runs = SeedRuns(results_of({"a": {1: rows}}), 1, window=1)
        assert has_fallen(runs, "a") == (end == last)
