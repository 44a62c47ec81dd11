"""What a claim measures: means over parts of the training, steps, scores of the evaluation, of the runs of one seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gtpo.paper.results import Results
from gtpo.reports.metrics import smooth

Statistic = Callable[[list[int], list[float], int], float]  # of steps, values and the window of the trailing mean


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one seed.

    Attributes:
        window: Steps of the trailing mean.
    """

    results: Results
    seed: int
    window: int

    def curve(self, name: str, metric: str) -> tuple[list[int], list[float]]:
        """The steps at which a run logged a metric, and the values.

        Raises:
            KeyError: If there is no such run or metric.
        """
        rows = [row for row in self.results.metrics[name][self.seed] if row.get(metric) is not None]
        if not rows:
            raise KeyError(metric)
        return [row["step"] for row in rows], [row[metric] for row in rows]

    def score(self, name: str, benchmark: str, score: str) -> float:
        """A score of the evaluation in percent, ``pass@32``.

        Raises:
            KeyError: If the run is not evaluated on the benchmark.
        """
        kind, k = score.split("@")
        return float(self.results.scores[name][benchmark][self.seed]["scores"][kind][k])


@dataclass(frozen=True)
class Measure:
    """A number per seed, the mean over some runs.

    Attributes:
        name: A metric of the training, or a score of the evaluation.
        benchmark: Of a score; None for a metric.
        runs: Their names.
        of_run: The number of one run.
    """

    name: str
    benchmark: str | None
    runs: tuple[str, ...]
    of_run: Callable[[SeedRuns, str], float]

    def value(self, runs: SeedRuns) -> float:
        """The number of one seed.

        Raises:
            KeyError: If a run, metric or score is missing.
        """
        return sum(self.of_run(runs, name) for name in self.runs) / len(self.runs)


def early(metric: str, *runs: str) -> Measure:
    """Mean over the first quarter of the training."""
    return _of_curve(metric, runs, lambda steps, values, window: quarters(values)[0])


def late(metric: str, *runs: str) -> Measure:
    """Mean over the last quarter of the training."""
    return _of_curve(metric, runs, lambda steps, values, window: quarters(values)[-1])


def mean(metric: str, *runs: str) -> Measure:
    """Mean over the training."""
    return _of_curve(metric, runs, lambda steps, values, window: sum(values) / len(values))


def highest(metric: str, *runs: str) -> Measure:
    """The highest value of the trailing mean, from the first full window on."""
    return _of_curve(metric, runs, _highest)


def fall(metric: str, *runs: str) -> Measure:
    """The highest value of the trailing mean minus the mean over the last quarter."""
    return _of_curve(metric, runs, lambda *curve: _highest(*curve) - quarters(curve[1])[-1])


def rise_step(metric: str, *runs: str) -> Measure:
    """The step at which the trailing mean first reaches half of its highest value."""
    return _of_curve(metric, runs, _rise_step)


def fall_step(metric: str, *runs: str) -> Measure:
    """The step at which the trailing mean, after its highest value, has lost half of what it loses."""
    return _of_curve(metric, runs, _fall_step)


def score(benchmark: str, name: str, *runs: str) -> Measure:
    """``pass@32``, ``maj@32``, or in any format ``pass_lenient@32``, in percent."""
    return Measure(name, benchmark, runs, lambda seed, run: seed.score(run, benchmark, name))


def _of_curve(metric: str, runs: tuple[str, ...], statistic: Statistic) -> Measure:
    return Measure(metric, None, runs, lambda seed, run: statistic(*seed.curve(run, metric), seed.window))


def quarters(values: Sequence[float]) -> list[float]:
    """The means over the four quarters of at least four values; of fewer, the values."""
    parts = min(4, len(values))
    bounds = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]


def _first_full(values: list[float], window: int) -> int:
    """Index of the first value of the trailing mean over a full window; of the last one in a shorter run."""
    return min(window, len(values)) - 1


def _highest(steps: list[int], values: list[float], window: int) -> float:
    return max(smooth(values, window)[_first_full(values, window) :])


def _rise_step(steps: list[int], values: list[float], window: int) -> float:
    smoothed = smooth(values, window)
    return next(step for step, value in zip(steps, smoothed, strict=True) if value >= max(smoothed) / 2)


def _fall_step(steps: list[int], values: list[float], window: int) -> float:
    smoothed = smooth(values, window)
    peak = max(range(_first_full(values, window), len(values)), key=smoothed.__getitem__)
    middle = (smoothed[peak] + min(smoothed[peak:])) / 2
    return next(step for step, value in zip(steps[peak:], smoothed[peak:], strict=True) if value <= middle)
