"""When GRPO collapses: the rule that admits a learning rate for the comparison of the methods (docs/log.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.paper.matrix import Matrix
from gtpo.paper.results import Results
from study.measures import SeedRuns, quarters

DIRECTORY = Path("results") / "collapse"
STORED = (  # metrics of its runs beyond those of the figures
    *("completion_length", "empty_blocks", "frac_reward_zero_std"),
    *(f"tag_logps/{tag}" for tag in ("reasoning_start", "reasoning_end", "answer_start", "answer_end")),
)
BASE = 49.0  # percent: pass@1 of the base, base-16f86973, on 60 held-out problems (results/tiny/evaluation.json)
LEARNS = 5.0  # points above the base, in a trailing mean
ACCURACY, FORMATTING = 20.0, 10.0  # points from the highest trailing mean to the last quarter: lost
ENTROPY = 0.05  # nats that the last quarter of a lost run is above the first
LEARN_OF_4, LOSE_OF_4 = 3, 2


@dataclass(frozen=True)
class Seed:
    """What one run of GRPO did: points lost at the end, and nats that its entropy rose."""

    learns: bool
    accuracy: float
    formatting: float
    entropy: float

    @property
    def is_lost(self) -> bool:
        return (self.accuracy >= ACCURACY or self.formatting >= FORMATTING) and self.entropy >= ENTROPY


def seed_of(runs: SeedRuns, name: str) -> Seed:
    """The rule's numbers of one run.

    Raises:
        KeyError: If the run is missing.
    """
    accuracy, formatting, entropy = (runs.curve(name, metric) for metric in ("accuracy", "formatting", "entropy"))
    first, *_, last = quarters(entropy.values)
    return Seed(accuracy.highest() >= BASE + LEARNS, accuracy.fall(), formatting.fall(), last - first)


def admission(matrix: Matrix, results: Results) -> dict[str, dict[str, Any]]:
    """Run of GRPO -> seeds, how many learn and are lost, their last quarters, and whether the rule admits its rate."""
    spec, rows = matrix["collapse"], {}
    for name in spec["runs"]:
        runs = [SeedRuns(results, seed, spec["window"]) for seed in sorted(results.metrics.get(name, {}))]
        found = [seed_of(run, name) for run in runs]
        learns, lost = sum(seed.learns for seed in found), sum(seed.is_lost for seed in found)
        if found:
            rows[name] = {
                "seeds": [run.seed for run in runs],
                "learns": learns,
                "lost": lost,
                "entropy": [round(seed.entropy, 3) for seed in found],
                "accuracy": [round(run.curve(name, "accuracy").late(), 1) for run in runs],
                "formatting": [round(run.curve(name, "formatting").late(), 1) for run in runs],
                "admitted": learns >= LEARN_OF_4 and lost >= LOSE_OF_4,
            }
    return rows


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A line per rate, for the terminal."""
    return [
        f"{name}: {row['learns']} of {len(row['seeds'])} learn, {row['lost']} lose it; last quarter: accuracy "
        f"{row['accuracy']}, formatting {row['formatting']}, entropy rise {row['entropy']}"
        + (" ADMITTED" if row["admitted"] else "")
        for name, row in rows.items()
    ]
