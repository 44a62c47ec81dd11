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
    means = values.rolling(window, min_periods=1).mean()
    full = min(window, len(values)) - 1
    return means.iloc[full:]


def quarters(values: Series) -> list[float]:
    """The means over the four quarters of at least four values; of fewer, the values."""
    parts = min(4, len(values))
    size = len(values) / parts
    bounds = [round(i * size) for i in range(parts + 1)]
    means = []
    for start, end in pairwise(bounds):
        means.append(float(values.iloc[start:end].mean()))
    return means


def late(values: Series, window: int = 1) -> float:
    """Mean over the last quarter of the training."""
    return quarters(values)[-1]


def highest(values: Series, window: int) -> float:
    return float(trailing(values, window).max())


def lowest(values: Series, window: int) -> float:
    return float(trailing(values, window).min())


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
    middle = (after.iloc[0] + after.min()) / 2
    return float((after <= middle).idxmax())


def rounded(value: float | None) -> float | None:
    """To five significant digits; None for NaN and infinity."""
    if value is None or not isfinite(value):
        return None
    return float(f"{value:.5g}")


def statistic(of: str) -> Callable[[Series, int], float]:
    """A key of ``STATISTICS``, or the mean over some steps: ``6-100``."""
    if of in STATISTICS:
        return STATISTICS[of]
    first, last = map(int, of.split("-"))
    return lambda values, window: float(values.loc[first:last].mean())


def early(values: Series, window: int) -> float:
    """Mean over the first quarter."""
    return quarters(values)[0]


def first_third(values: Series, window: int) -> float:
    part = values.iloc[: len(values) // 3]
    return float(part.mean())


def last_third(values: Series, window: int) -> float:
    part = values.iloc[-(len(values) // 3) :]
    return float(part.mean())


def mean(values: Series, window: int) -> float:
    return float(values.mean())


OF_QUARTERS = (early, late, fall)
OF_OTHERS = (first_third, last_third, mean, highest, lowest, largest_loss, rise_step, fall_step)
STATISTICS = {function.__name__: function for function in (*OF_QUARTERS, *OF_OTHERS)}


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
        scores = self.results.scores.loc[(name, benchmark, self.seed)]
        value = float(scores[score])
        if isnan(value):
            raise KeyError(score)
        return value


def has_fallen(runs: SeedRuns, name: str, limits: Mapping[str, float] = LOST) -> bool:
    """Whether a run ends so far below the highest trailing mean of a metric."""
    falls = []
    for metric, points in limits.items():
        curve = runs.curve(name, metric)
        falls.append(fall(curve, runs.window) >= points)
    return any(falls)


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
        return fmean(self._of_run(runs, name) for name in self.runs)

    def _of_run(self, runs: SeedRuns, name: str) -> float:
        if self.benchmark:
            return runs.score(name, self.of, self.name)
        curve = runs.curve(name, self.name)
        return statistic(self.of)(curve, runs.window)


def measure_of(text: str, run: str, benchmark: str = "arithmetic") -> Measure:
    """``accuracy late``, ``formatting 1-100``: of the training; ``pass@1 greedy``, ``pass@1 sampled``: a score."""
    name, _, of = text.rpartition(" ")
    if "@" in name:
        of = benchmark + GREEDY if of == "greedy" else benchmark
    return Measure(name, of, (run,))
