"""Runs in which every claim of the paper holds."""

from typing import Any

from helpers.files import tables_of
from helpers.results import results_of

from paper.results import Results
from study.claims import read_claims

WORLD = tables_of(__file__)


def world() -> Results:
    """Six seeds whose accuracy differs by a thousandth."""
    metrics: dict[str, Any] = {}
    scores_of: dict[str, Any] = {}
    for name in {name: None for claims in read_claims().values() for c in claims for name in c.runs}:
        accuracy, formatting, entropy = WORLD[max((key for key in WORLD if name.startswith(key)), key=len)]
        for seed in range(1, 7):
            metrics.setdefault(name, {})[seed] = [
                {
                    "step": 50 * step,
                    "accuracy": accuracy[part] * (1 + seed / 1000),
                    "formatting": formatting[part],
                    "entropy": entropy[part],
                    "kl": float(step == 7),
                    "conflict_tokens": 15.0 if "g12" in name else 10.0,
                    "conflict_push": -0.00205 if "dapo" in name else -0.005,
                }
                for step, part in enumerate((0, 0, 1, 1, 1, 1, 2, 2))
            ]
            score = accuracy[-1] + 5.0 * name.startswith("gtpo")
            scores = {kind: dict.fromkeys(("1", "32", "64"), score) for kind in ("pass", "maj", "pass_lenient")}
            scores["format"] = 90.0
            for benchmark in ("arithmetic", "arithmetic_hard"):
                for scored in (name, f"{name}@best"):
                    scores_of.setdefault(scored, {}).setdefault(benchmark, {})[seed] = {"scores": scores}
    return results_of(metrics, scores_of)
