"""What a claim reads of the runs of one seed: means over parts of the training, steps, scores of the evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gtpo.paper.results import Results
from gtpo.run_metrics import smooth


class Runs:
    """The runs of one seed: ``runs("gtpo-g8")``; ``runs("grpo-g8-beta0", "grpo-g8-beta1e-6")`` is their mean."""

    def __init__(self, results: Results, seed: int, window: int) -> None:
        self.results, self.seed, self.window = results, seed, window

    def __call__(self, *names: str) -> "Measures":
        return Measures(self, names)

    def curve(self, name: str, metric: str) -> tuple[list[int], list[float]]:
        """The steps at which a run logged a metric, and the values.

        Raises:
            KeyError: If there is no such run or metric.
        """
        rows = [row for row in self.results.metrics[name][self.seed] if row.get(metric) is not None]
        if not rows:
            raise KeyError(metric)
        return [row["step"] for row in rows], [row[metric] for row in rows]

    def score(self, name: str, benchmark: str, score: str, k: str) -> float:
        """A score of the evaluation in percent.

        Raises:
            KeyError: If the run is not evaluated on the benchmark.
        """
        return float(self.results.scores[name][benchmark][self.seed]["scores"][score][k])


@dataclass(frozen=True)
class Measures:
    """Measures of some runs; each is the mean over the runs."""

    runs: Runs
    names: tuple[str, ...]

    def early(self, metric: str) -> float:
        """Mean over the first quarter of the training."""
        return self._mean(metric, lambda _, values: quarters(values)[0])

    def late(self, metric: str) -> float:
        """Mean over the last quarter."""
        return self._mean(metric, lambda _, values: quarters(values)[-1])

    def mean(self, metric: str) -> float:
        """Mean over the training."""
        return self._mean(metric, lambda _, values: sum(values) / len(values))

    def highest(self, metric: str) -> float:
        """The highest value of the trailing mean, from the first full window on."""
        return self._mean(metric, lambda _, values: max(self._smooth(values)[self._first_full(values) :]))

    def fall(self, metric: str) -> float:
        """The highest value minus the mean over the last quarter."""
        return self.highest(metric) - self.late(metric)

    def rise_step(self, metric: str) -> float:
        """The step at which the trailing mean first reaches half of its highest value."""
        return self._mean(metric, self._rise_step)

    def fall_step(self, metric: str) -> float:
        """The step at which the trailing mean, after its highest value, has lost half of what it loses."""
        return self._mean(metric, self._fall_step)

    def held_out(self, score: str) -> float:
        """``pass@32``, ``maj@32``, or in any format ``pass_lenient@32``, on held-out problems."""
        return self.score("arithmetic", score)

    def harder(self, score: str) -> float:
        """The same on problems with more steps than those of the training."""
        return self.score("arithmetic_hard", score)

    def score(self, benchmark: str, score: str) -> float:
        """A score of the evaluation, its name and k joined by @."""
        return sum(self.runs.score(name, benchmark, *score.split("@")) for name in self.names) / len(self.names)

    def _mean(self, metric: str, measure: Callable[[list[int], list[float]], float]) -> float:
        return sum(measure(*self.runs.curve(name, metric)) for name in self.names) / len(self.names)

    def _smooth(self, values: list[float]) -> list[float]:
        return smooth(values, self.runs.window)

    def _first_full(self, values: list[float]) -> int:
        """Index of the first value of the trailing mean over a full window; of the last one in a shorter run."""
        return min(self.runs.window, len(values)) - 1

    def _rise_step(self, steps: list[int], values: list[float]) -> float:
        smoothed = self._smooth(values)
        return next(step for step, value in zip(steps, smoothed, strict=True) if value >= max(smoothed) / 2)

    def _fall_step(self, steps: list[int], values: list[float]) -> float:
        smoothed = self._smooth(values)
        peak = max(range(self._first_full(values), len(values)), key=smoothed.__getitem__)
        middle = (smoothed[peak] + min(smoothed[peak:])) / 2
        return next(step for step, value in zip(steps[peak:], smoothed[peak:], strict=True) if value <= middle)


def quarters(values: Sequence[float]) -> list[float]:
    """The means over the four quarters of at least four values; of fewer, the values."""
    parts = min(4, len(values))
    bounds = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]


@dataclass
class Recorder(Runs):
    """Runs that are all alike, with flat curves and equal scores; it records what a claim reads.

    Attributes:
        metrics: The names of the runs whose curves are read, each with the metrics.
        benchmarks: The names of the runs whose scores are read, each with the benchmarks.
    """

    window: int = 1
    metrics: dict[str, set[str]] = field(default_factory=dict)
    benchmarks: dict[str, set[str]] = field(default_factory=dict)

    def curve(self, name: str, metric: str) -> tuple[list[int], list[float]]:
        self.metrics.setdefault(name, set()).add(metric)
        return [1, 2, 3, 4], [1.0] * 4

    def score(self, name: str, benchmark: str, score: str, k: str) -> float:
        self.benchmarks.setdefault(name, set()).add(benchmark)
        return 1.0
