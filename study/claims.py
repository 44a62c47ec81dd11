"""The paper's claims, rows of ``study/claims.yaml``: the margin of one seed, positive if the paper is right."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gtpo.files import read_yaml
from study.measures import Measure, SeedRuns

Side = Measure | float
SCALES = {"conflict_push": 1000}  # units per unit of the metric


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
        sides = [side for pair in self.pairs for side in pair]
        return [side for side in sides if isinstance(side, Measure)]

    @property
    def runs(self) -> list[str]:
        """The names of the runs that it reads."""
        names: dict[str, None] = {}
        for measure in self.measures:
            names |= dict.fromkeys(name.removesuffix("@best") for name in measure.runs)
        return [*names]

    @property
    def compares_runs(self) -> bool:
        """Whether it is about a difference between runs; the other claims are about a threshold."""
        return not self.allowed and len(self.measures) == 2 * len(self.pairs)

    @property
    def measured_side(self) -> int | None:
        """Which of (more, less) is measured if the other one is a number: 0 or 1; None if both are measured."""
        [more, less], *_ = self.pairs
        if isinstance(more, float):
            return 1
        return 0 if isinstance(less, float) else None

    def sides(self, runs: SeedRuns) -> tuple[float, float]:
        """``more`` and ``less`` of one seed, in the unit of the margin; raises as :class:`SeedRuns`."""
        more = less = 0.0
        for pair in self.pairs:
            of_more, of_less = (_value(side, runs) for side in pair)
            more += of_more
            less += of_less
        unit = SCALES.get(self.measures[0].name, 1)
        scale = unit / len(self.pairs)
        return scale * more, scale * less

    def margin(self, runs: SeedRuns) -> float:
        """The margin of one seed; positive supports the claim."""
        more, less = self.sides(runs)
        return more - less + self.allowed


def _value(side: Side, runs: SeedRuns) -> float:
    return side.value(runs) if isinstance(side, Measure) else side


@cache
def read_claims() -> dict[str, tuple[Claim, ...]]:
    """Figure -> its claims, in the order of the page."""
    claims = {}
    by_figure = read_yaml(Path(__file__).with_name("claims.yaml"))
    for figure, rows in by_figure.items():
        claims[figure] = tuple(_claim(**row) for row in rows)
    return claims


def _claim(name: str, claim: str, unit: str, more: Any, less: Any, **options: Any) -> Claim:
    pairs = tuple(zip(_sides(more), _sides(less), strict=True))
    return Claim(name, claim, unit, pairs, **options)


def _sides(value: Any) -> list[Side]:
    """Thresholds and measures, one or a list, such as ``{late: accuracy, of: [gtpo]}``."""
    found: list[Side] = []
    for side in value if isinstance(value, list) else [value]:
        if not isinstance(side, dict):
            found.append(float(side))
            continue
        runs = tuple(side["of"])
        [kind] = side.keys() - {"of"}
        words = (kind, side[kind]) if "@" in kind else (side[kind], kind)
        found.append(Measure(*words, runs))
    return found
