"""Condensed results: what results/ has of some runs, which ``gtpo.paper.results.read_results`` reads back."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from gtpo.files import write_atomically
from gtpo.paper.results import METRICS_FILE, SCORES_FILE, Results

ENTRY_KEYS = ("label", "adapter", "benchmark", "problems", "k", "scores", "counts")  # of an evaluation


def condense(results: Results, directory: Path, metrics: Iterable[str]) -> None:
    """Store some metrics of every step, rounded to five significant digits, and the scores without completions.

    ``counts`` of a score are samples and correct ones by problem, from which pass@k can be computed again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = results.metrics.reindex(columns=list(metrics)).map(rounded).reset_index()
    entries = []
    for entry in results.scores.get("entry", []):
        counts = [[problem["n"], problem["c"]] for problem in entry.get("per_problem", ())]
        entry = {**entry, "counts": counts} if counts else entry
        entries.append({key: entry[key] for key in ENTRY_KEYS if key in entry})
    write_atomically(directory / SCORES_FILE, "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
    # Last: it is by this file that results are found.
    write_atomically(directory / METRICS_FILE, lambda path: kept.to_parquet(path, compression="zstd", index=False))


def rounded(value: float | None) -> float | None:
    """To five significant digits; None for NaN and infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
