"""Condensed results: the metrics of every step, scores with counts by problem, and where each run is from."""

import json
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from gtpo.files import write_atomically
from gtpo.runs.provenance import trainer_of
from paper.matrix import Experiment
from paper.results import METRICS_FILE, SCORES_FILE, Results, Run, read_results
from study import Row, Words
from study.measures import rounded

ORIGINS = "origins.json"
ORIGIN_KEYS = ("git_revision", "platform", "cpu_count")  # of environment.json; trainer and versions follow
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")  # whose versions decide what a step computes
ENTRY_KEYS = ("label", "adapter", "benchmark", "problems", "k", "scores", "counts")  # of an evaluation


def store(directory: Path, source: Path, runs: Iterable[Experiment], metrics: Words) -> None:
    """Add the finished ones of some runs below ``source``, and their scores, to the condensed results in ``directory``.

    The origin of each run is stored too, and the scores of the base.
    """
    new = {(run.name, run.seed): run.label for run in runs if run.is_finished}
    if not new:
        return
    stored = read_results([directory])
    added = only(read_results([source]), new)
    rows = {}
    entries = []
    for results in (stored, added):
        entries.extend(results.scores.get("entry", ()))
        for key, table in results.runs.items():
            rows[key] = table.reset_index()
    condense(Results.of(rows, entries), directory, metrics)
    origins = read_origins(directory)
    origins |= {label: origin for label, origin in origins_in(source).items() if label in new.values()}
    write_atomically(directory / ORIGINS, json.dumps(origins, indent=1, sort_keys=True) + "\n")


def condense(results: Results, directory: Path, metrics: Words) -> None:
    """Store some metrics of every step, rounded to five significant digits, and the scores without completions.

    ``counts`` of a score are samples and correct ones by problem, from which pass@k can be computed again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = results.metrics.reindex(columns=metrics).map(rounded).reset_index()
    entries = []
    for entry in results.scores.get("entry", []):
        if "per_problem" in entry:
            entry = {**entry, "counts": [[problem["n"], problem["c"]] for problem in entry["per_problem"]]}
        of_entry = {key: entry[key] for key in ENTRY_KEYS if key in entry}
        entries.append(json.dumps(of_entry))
    write_atomically(directory / SCORES_FILE, "[\n" + ",\n".join(entries) + "\n]\n")
    # Last: it is by this file that results are found.
    write_atomically(directory / METRICS_FILE, partial(kept.to_parquet, compression="zstd", index=False))


def origins_in(directory: Path) -> Row:
    """Label of each run below a directory -> its origin: revision, platform, cores, trainer, versions."""
    found = {}
    for path in sorted(directory.glob("*/environment.json")):
        found[path.parent.name] = origin_of(read_json(path))
    return found


def origin_of(environment: Row) -> list[Any]:
    """From the content of environment.json."""
    origin = [environment.get(key) for key in ORIGIN_KEYS]
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {packages[name]}" for name in LIBRARIES if name in packages)
    return [*origin, trainer_of(origin[0]), versions]


def read_origins(directory: Path) -> Row:
    """:func:`origins_in` of condensed runs, earlier ones shorter by one or two; empty if they were stored without."""
    return read_json(directory / ORIGINS)


def read_json(path: Path) -> Row:
    """A file that may be absent: empty."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def only(results: Results, runs: Collection[Run]) -> Results:
    """The metrics and scores of some runs, each a name and a seed, and the scores of the base."""
    entries = []
    for (name, _, seed), entry in results.scores.get("entry", {}).items():
        if name == "base" or (name.removesuffix("@best"), seed) in runs:
            entries.append(entry)
    kept = {run: results.runs[run].reset_index() for run in runs}
    return Results.of(kept, entries)
