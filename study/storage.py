"""Condensed results: the metrics of every step, scores with counts by problem, and where each run is from."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gtpo.files import write_atomically
from paper.matrix import Experiment
from paper.results import METRICS_FILE, SCORES_FILE, Results, read_results
from study.measures import rounded

ORIGINS = "origins.json"
ENTRY_KEYS = ("label", "adapter", "benchmark", "problems", "k", "scores", "counts")  # of an evaluation


def store(directory: Path, source: Path, finished: Sequence[Experiment], metrics: Iterable[str], origins: bool) -> None:
    """Add some finished runs below ``source``, and their scores, to the condensed results in ``directory``.

    ``origins``: revision and machine of each run are stored too.
    """
    stored = read_results([directory])
    new = only(read_results([source]), [(run.name, run.seed) for run in finished])
    runs = {run: rows.reset_index() for results in (stored, new) for run, rows in results.runs.items()}
    merged = Results.of(runs, [*stored.scores.get("entry", ()), *new.scores.get("entry", ())])
    condense(merged, directory, metrics)
    if origins:
        labels = {run.label for run in finished}
        path = directory / ORIGINS
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known |= {label: origin for label, origin in origins_in(source).items() if label in labels}
        write_atomically(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


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
    write_atomically(directory / METRICS_FILE, partial(kept.to_parquet, compression="zstd", index=False))


def origins_in(directory: Path) -> dict[str, list[Any]]:
    """Label of each run below a directory -> its revision and machine: a pair of two origins is not compared."""
    found = {}
    for path in sorted(directory.glob("*/environment.json")):
        environment = json.loads(path.read_text(encoding="utf-8"))
        found[path.parent.name] = [environment.get(key) for key in ("git_revision", "platform", "cpu_count")]
    return found


def only(results: Results, runs: Sequence[tuple[str, int]]) -> Results:
    """The metrics and scores of some runs, each a name and a seed, and the scores of the base."""
    entries = [
        row.entry
        for (name, _, seed), row in results.scores.iterrows()
        if name == "base" or (name.removesuffix("@best"), seed) in runs
    ]
    return Results.of({run: results.runs[run].reset_index() for run in runs}, entries)
