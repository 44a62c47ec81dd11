"""Reads the metrics of runs: training steps and evaluations, reward names, finite values, smoothed curves."""

import math
import re
from collections.abc import Sequence
from typing import Any

from gtpo.runs.directory import is_held_out

Rows = list[dict[str, Any]]  # as RunDirectory.read_metrics returns them


def of_training(rows: Rows) -> Rows:
    """The lines of training steps."""
    return [row for row in rows if not is_held_out(row)]


def reward_names(rows: Rows) -> list[str]:
    """The reward functions of a run, from its metrics."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            match = re.fullmatch("rewards/(.+)/mean", key)
            if match:
                names[match[1]] = None
    return list(names)


def finite_values(rows: Rows, metric: str) -> list[float]:
    """The values of a metric that are finite numbers."""
    values = []
    for row in rows:
        value = row.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            values.append(value)
    return values


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over the last ``window`` values; over fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        last = values[start:end]
        means.append(sum(last) / len(last))  # NaN and infinity stay: a curve has a gap there
    return means


def curve_of(rows: Rows, metric: str, window: int) -> tuple[list[int], list[float]]:
    """The steps that logged a metric, and its smoothed values there."""
    logged = {}
    for row in rows:
        value = row.get(metric)
        if value is not None:
            logged[row["step"]] = value
    values = list(logged.values())
    return list(logged), smooth(values, window)
