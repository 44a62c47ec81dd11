"""What a claim measures: means over parts of the training, steps, scores of the evaluation, of the runs of one seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, isnan
from statistics import fmean

from pandas import Series

from paper.results import GREEDY, Results

LOST = {"accuracy": 20.0, "formatting": 10.0}  # points from the highest trailing mean to the last quarter


def trailing(values: Series, window: int) -> Series:
    """The trailing mean over ``window`` steps, from the first full window on; of a shorter run its last one."""
    return values.rolling(window, min_periods=1).mean().iloc[min(window, len(values)) - 1 :]


def quarters(values: Series) -> list[float]:
    """The means over the four quarters of at least four values; of fewer, the values."""
    parts = min(4, len(values))
    bounds = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [float(values.iloc[start:end].mean()) for start, end in pairwise(bounds)]


def late(values: Series, window: int = 1) -> float:
    """Mean over the last quarter of the training."""
    return quarters(values)[-1]


def highest(values: Series, window: int) -> float:
    return float(trailing(values, window).max())


def fall(values: Series, window: int) -> float:
    """The highest value of the trailing mean minus the mean over the last quarter."""
    return highest(values, window) - late(values)


def largest_loss(values: Series, window: int) -> float:
    """The largest fall of the trailing mean below an earlier value."""
    means = trailing(values, window)
    return float((means.cummax() - means).max())


def rise_step(values: Series, window: int) -> float:
    """The step at which the trailing mean, also of the first steps, reaches half of its highest value."""
    means = values.rolling(window, min_periods=1).mean()
    return float((means >= means.max() / 2).idxmax())


def fall_step(values: Series, window: int) -> float:
    """The step at which the trailing mean, after its highest value, has lost half of what it loses."""
    means = trailing(values, window)
    after = means.loc[means.idxmax() :]
    return float((after <= (after.iloc[0] + after.min()) / 2).idxmax())


def rounded(value: float | None) -> float | None:
    """To five significant digits; None for NaN and infinity."""
    return float(f"{value:.5g}") if value is not None and isfinite(value) else None


def statistic(of: str) -> Callable[[Series, int], float]:
    """A key of ``STATISTICS``, or the mean over some steps: ``6-100``."""
    first, dash, last = of.partition("-")
    if not dash:
        return STATISTICS[of]
    return lambda values, window: float(values.loc[int(first) : int(last)].mean())


STATISTICS: dict[str, Callable[[Series, int], float]] = {
    "early": lambda values, window: quarters(values)[0],
    "first_third": lambda values, window: float(values.iloc[: len(values) // 3].mean()),
    "last_third": lambda values, window: float(values.iloc[-(len(values) // 3) :].mean()),
    "mean": lambda values, window: float(values.mean()),
    **{function.__name__: function for function in (late, highest, fall, largest_loss, rise_step, fall_step)},
}


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one seed; ``window``: steps of the trailing mean. A missing run, metric or score is a KeyError."""

    results: Results
    seed: int
    window: int

    def curve(self, name: str, metric: str) -> Series:
        """A metric of a run by step."""
        return self.results.curve(name, self.seed, metric)

    def score(self, name: str, benchmark: str, score: str) -> float:
        """A score of the evaluation in percent, ``pass@32``."""
        value = float(self.results.scores.at[(name, benchmark, self.seed), score])
        if isnan(value):
            raise KeyError(score)
        return value


def has_fallen(runs: SeedRuns, name: str, limits: Mapping[str, float] = LOST) -> bool:
    """Whether a run ends so far below the highest trailing mean of a metric."""
    return any(fall(runs.curve(name, metric), runs.window) >= points for metric, points in limits.items())


@dataclass(frozen=True)
class Measure:
    """A number per seed, the mean over some runs.

    Attributes:
        name: A metric of the training, or a score of the evaluation (``pass@32``, ``pass_lenient@1``).
        of: The statistic of the metric, as for :func:`statistic`; the benchmark of a score.
        runs: Their names.
    """

    name: str
    of: str
    runs: tuple[str, ...]

    @property
    def benchmark(self) -> str | None:
        """Of a score; None for a metric."""
        return self.of if "@" in self.name else None

    def value(self, runs: SeedRuns) -> float:
        """The number of one seed; raises as :class:`SeedRuns`."""
        if self.benchmark:
            return fmean(runs.score(name, self.of, self.name) for name in self.runs)
        measure = statistic(self.of)
        return fmean(measure(runs.curve(name, self.name), runs.window) for name in self.runs)


def measure_of(text: str, run: str, benchmark: str = "arithmetic") -> Measure:
    """``accuracy late``, ``formatting 1-100``: of the training; ``pass@1 greedy``, ``pass@1 sampled``: a score."""
    name, _, of = text.rpartition(" ")
    of_score = {"greedy": benchmark + GREEDY, "sampled": benchmark}
    return Measure(name, of_score[of] if "@" in name else of, (run,))
