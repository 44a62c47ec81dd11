"""Reads the metrics of runs: training steps and evaluations, reward names, finite values, smoothed curves."""

import math
import re
from collections.abc import Sequence

from gtpo.arguments import Values
from gtpo.runs.directory import is_held_out

Rows = list[Values]  # as RunDirectory.read_metrics returns them
Numbers = list[float]


def of_training(rows: Rows) -> Rows:
    """The lines of training steps."""
    return [row for row in rows if not is_held_out(row)]


def reward_names(rows: Rows) -> list[str]:
    """The reward functions of a run, from its metrics."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            if match := re.fullmatch("rewards/(.+)/mean", key):
                names[match[1]] = None
    return list(names)


def finite_values(rows: Rows, metric: str) -> Numbers:
    """The values of a metric that are finite numbers."""
    values = (row.get(metric) for row in rows)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def smooth(values: Sequence[float], window: int) -> Numbers:
    """Trailing mean over the last ``window`` values; over fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        means.append(sum(last) / len(last))  # NaN and infinity stay: a curve has a gap there
    return means


def curve_of(rows: Rows, metric: str, window: int) -> tuple[list[int], Numbers]:
    """The steps that logged a metric, and its smoothed values there."""
    logged = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
    return list(logged), smooth(list(logged.values()), window)
