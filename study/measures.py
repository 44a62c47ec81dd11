"""What a claim measures: means over parts of the training, steps, scores of the evaluation, of the runs of one seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gtpo.paper.results import Results
from gtpo.reports.metrics import smooth


@dataclass(frozen=True)
class Curve:
    """A metric of a run, at the steps at which it was logged; the trailing mean is over ``window`` steps."""

    steps: list[int]
    values: list[float]
    window: int

    @cached_property
    def smoothed(self) -> list[float]:
        """The trailing mean."""
        return smooth(self.values, self.window)

    @property
    def peak(self) -> int:
        """Index of the highest value of the trailing mean, from the first full window on."""
        return max(range(min(self.window, len(self.values)) - 1, len(self.values)), key=self.smoothed.__getitem__)

    def early(self) -> float:
        """Mean over the first quarter of the training."""
        return quarters(self.values)[0]

    def first_third(self) -> float:
        """Mean over the first third of the training."""
        return sum(self.values[: len(self.values) // 3]) / (len(self.values) // 3)

    def last_third(self) -> float:
        """Mean over the last third of the training."""
        return sum(self.values[-(len(self.values) // 3) :]) / (len(self.values) // 3)

    def late(self) -> float:
        """Mean over the last quarter of the training."""
        return quarters(self.values)[-1]

    def mean(self) -> float:
        """Mean over the training."""
        return sum(self.values) / len(self.values)

    def highest(self) -> float:
        """The highest value of the trailing mean, from the first full window on."""
        return self.smoothed[self.peak]

    def fall(self) -> float:
        """The highest value of the trailing mean minus the mean over the last quarter."""
        return self.highest() - self.late()

    def largest_loss(self) -> float:
        """The largest fall of the trailing mean below an earlier value, from the first full window on."""
        full = self.smoothed[min(self.window, len(self.values)) - 1 :]
        return max(high - value for high, value in zip(accumulate(full, max), full, strict=True))

    def rise_step(self) -> float:
        """The step at which the trailing mean first reaches half of its highest value."""
        half = max(self.smoothed) / 2
        return next(step for step, value in zip(self.steps, self.smoothed, strict=True) if value >= half)

    def fall_step(self) -> float:
        """The step at which the trailing mean, after its highest value, has lost half of what it loses."""
        steps, values = self.steps[self.peak :], self.smoothed[self.peak :]
        middle = (values[0] + min(values)) / 2
        return next(step for step, value in zip(steps, values, strict=True) if value <= middle)


def quarters(values: Sequence[float]) -> list[float]:
    """The means over the four quarters of at least four values; of fewer, the values."""
    parts = min(4, len(values))
    bounds = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one seed; ``window``: steps of the trailing mean."""

    results: Results
    seed: int
    window: int

    def curve(self, name: str, metric: str) -> Curve:
        """A metric of a run.

        Raises:
            KeyError: If there is no such run or metric.
        """
        rows = [row for row in self.results.metrics[name][self.seed] if row.get(metric) is not None]
        if not rows:
            raise KeyError(metric)
        return Curve([row["step"] for row in rows], [row[metric] for row in rows], self.window)

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

    @classmethod
    def statistic(cls, name: str, metric: str, runs: tuple[str, ...]) -> "Measure":
        """A statistic of a metric, a method of :class:`Curve` such as ``late``."""
        of_curve = getattr(Curve, name)
        return cls(metric, None, runs, lambda seed, run: float(of_curve(seed.curve(run, metric))))

    @classmethod
    def score(cls, benchmark: str, name: str, runs: tuple[str, ...]) -> "Measure":
        """``pass@32``, ``maj@32``, or in any format ``pass_lenient@32``, in percent."""
        return cls(name, benchmark, runs, lambda seed, run: seed.score(run, benchmark, name))
