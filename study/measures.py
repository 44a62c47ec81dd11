"""What a comparison measures: means over parts of the training, scores of the evaluation, of the runs of one seed."""

from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import NamedTuple

from pandas import Series

from paper.results import GREEDY, Results

LOST = {"accuracy": 20.0, "formatting": 10.0}  # points from the highest trailing mean to the last quarter


class Curve(NamedTuple):
    """A metric of a run by step, with its statistics; ``window``: steps of the trailing mean."""

    values: Series
    window: int = 1

    def of(self, statistic: str) -> float:
        """The statistic of this name, or the mean over some steps: ``6-100``."""
        first, _, last = statistic.partition("-")
        if last:
            part = self.values.loc[int(first) : int(last)]
            return float(part.mean())
        return float(getattr(self, statistic)())

    def late(self) -> float:
        """Mean over the last quarter; of fewer than four values the last one."""
        quarter = max(1, round(len(self.values) / 4))
        return float(self.values.iloc[-quarter:].mean())

    def last_third(self) -> float:
        third = len(self.values) // 3
        return self.values.iloc[-third:].mean()

    def mean(self) -> float:
        return self.values.mean()

    def highest(self) -> float:
        """Of the trailing mean."""
        return float(self.trailing().max())

    def fall(self) -> float:
        """The highest value of the trailing mean minus the mean over the last quarter."""
        return self.highest() - self.late()

    def trailing(self) -> Series:
        """The trailing mean from the first full window on; of a shorter run its last one."""
        full = min(self.window, len(self.values)) - 1
        return self.values.rolling(self.window, min_periods=1).mean().iloc[full:]


def rounded(value: float | None) -> float | None:
    """To five significant digits; None for NaN and infinity."""
    if value is None or not isfinite(value):
        return None
    return float(f"{value:.5g}")


class SeedRuns(NamedTuple):
    """The runs of one seed; ``window``: steps of the trailing mean. A missing run, metric or score is a KeyError."""

    results: Results
    seed: int
    window: int

    def curve(self, name: str, metric: str) -> Curve:
        """A metric of a run."""
        return Curve(self.results.curve(name, self.seed, metric), self.window)

    def score(self, name: str, benchmark: str, score: str) -> float:
        """A score of the evaluation in percent, ``pass@32``."""
        scores = self.results.scores.loc[(name, benchmark, self.seed)]
        return float(scores.dropna()[score])


def has_fallen(runs: SeedRuns, name: str, limits: Mapping[str, float] = LOST) -> bool:
    """Whether a run ends so far below the highest trailing mean of a metric."""
    over = False
    for metric, points in limits.items():
        with suppress(KeyError):  # with rewards of your own
            over |= runs.curve(name, metric).fall() >= points
    return over


class Measure(NamedTuple):
    """A number of each seed of a run.

    Attributes:
        name: A metric of the training, or a score of the evaluation (``pass@32``, ``pass_lenient@1``).
        of: The statistic of the metric, as for :meth:`Curve.of`; the benchmark of a score.
        run: Its name.
    """

    name: str
    of: str
    run: str

    def value(self, runs: SeedRuns) -> float:
        """The number of one seed; raises as :class:`SeedRuns`."""
        if "@" in self.name:
            return runs.score(self.run, self.of, self.name)
        return runs.curve(self.run, self.name).of(self.of)


def measure_of(text: str, run: str, benchmark: str = "arithmetic", prompts: int = 1) -> Measure:
    """``accuracy late``, ``formatting 1-100``: of the training; ``pass@1 greedy``, ``pass@1 sampled``: a score.

    ``accuracy prompts 101-200``: over the steps that see these prompts, where a step has ``prompts`` of them.
    """
    name, _, of = text.rpartition(" ")
    if name.endswith(" prompts"):
        name = name.removesuffix(" prompts")
        first, _, last = of.partition("-")
        of = f"{(int(first) - 1) // prompts + 1}-{int(last) // prompts}"
    if "@" in name:
        of = benchmark + GREEDY if of == "greedy" else benchmark
    return Measure(name, of, run)
