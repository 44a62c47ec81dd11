"""The paper's claims, rows of ``study/claims.yaml``: the margin of one seed, positive if the paper is right."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gtpo.files import read_yaml
from study.measures import Measure, SeedRuns

Side = Measure | float
SCALES = {"conflict_push": 1000, "rewards/word_reward/mean": 10}  # units per unit of the metric


@dataclass(frozen=True)
class Claim:
    """``more`` is above ``less``; either can be a threshold.

    Attributes:
        name: Its figure and what it says.
        sentence: The claim for readers.
        unit: Of the margin, a key of :data:`study.verdicts.SIZES`.
        pairs: Measures or thresholds, (more, less); the margin is the mean over them.
        allowed: How far ``more`` may be below ``less``, in points; this makes it a claim about a threshold.
        not_counted: Why a verdict would be meaningless; else empty.
    """

    name: str
    sentence: str
    unit: str
    pairs: tuple[tuple[Side, Side], ...]
    allowed: float = 0.0
    not_counted: str = ""

    @property
    def measures(self) -> list[Measure]:
        return [side for pair in self.pairs for side in pair if isinstance(side, Measure)]

    @property
    def runs(self) -> list[str]:
        """The names of the runs that it reads."""
        return list(dict.fromkeys(run_of(name) for measure in self.measures for name in measure.runs))

    @property
    def compares_runs(self) -> bool:
        """Whether it is about a difference between runs; the other claims are about a threshold."""
        return not self.allowed and len(self.measures) == 2 * len(self.pairs)

    @property
    def measured_side(self) -> int | None:
        """Which of (more, less) is measured if the other one is a number: 0 or 1; None if both are measured."""
        kinds = {(isinstance(more, Measure), isinstance(less, Measure)) for more, less in self.pairs}
        return {(True, False): 0, (False, True): 1}.get(kinds.pop()) if len(kinds) == 1 else None

    def sides(self, runs: SeedRuns) -> tuple[float, float]:
        """``more`` and ``less`` of one seed, in the unit of the margin.

        Raises:
            KeyError: If a run, metric or score is missing.
        """
        values = [[side.value(runs) if isinstance(side, Measure) else side for side in pair] for pair in self.pairs]
        scale = SCALES.get(self.measures[0].name, 1) / len(values)
        return scale * sum(more for more, _ in values), scale * sum(less for _, less in values)

    def margin(self, runs: SeedRuns) -> float:
        """The margin of one seed; positive supports the claim.

        Raises:
            KeyError: As :meth:`sides`.
        """
        more, less = self.sides(runs)
        return more - less + self.allowed


def run_of(name: str) -> str:
    """The run whose scores have a name, at its end or ``@best``."""
    return name.removesuffix("@best")


@cache
def read_claims(path: Path = Path(__file__).parent / "claims.yaml") -> dict[str, tuple[Claim, ...]]:
    """Figure -> its claims, in the order of the page; none outside a clone of the repository."""
    figures = read_yaml(path) if path.is_file() else {}
    return {figure: tuple(_claim(row) for row in rows) for figure, rows in figures.items()}


def _claim(row: dict[str, Any]) -> Claim:
    more, less = ([_side(side) for side in _listed(row[name])] for name in ("more", "less"))
    pairs = tuple(zip(more, less, strict=True))
    options = {name: row[name] for name in ("allowed", "not_counted") if name in row}
    return Claim(row["name"], row["claim"], row["unit"], pairs, **options)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _side(value: float | dict[str, Any]) -> Side:
    if not isinstance(value, dict):
        return float(value)
    of = tuple(value["of"])
    [(kind, name)] = [(key, item) for key, item in value.items() if key != "of"]
    return Measure.score(name, kind, of) if "@" in kind else Measure.statistic(kind, name, of)
