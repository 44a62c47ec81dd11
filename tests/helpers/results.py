"""Results from nested dictionaries, a completion file as an entry, and a disk on which they do not fit."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo.evaluation.records import Entry, Job, Problems
from gtpo.evaluation.scores import grade
from gtpo.evaluation.storage import completions_of, read_head
from paper.results import Results


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Inside, a file cannot grow beyond ``size`` bytes: a write is torn there, and fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def results_of(metrics: dict[str, Any], scores: dict[str, Any] | None = None) -> Results:
    """From run -> seed -> rows, and run (``NAME@best``, ``base``) -> benchmark -> seed -> the rest of an entry."""
    entries = []
    for name, benchmarks in (scores or {}).items():
        run, at, _ = name.partition("@")
        for benchmark, seeds in benchmarks.items():
            for seed, entry in seeds.items():
                adapter = None if name == "base" else f"runs/{run}-s{seed}/{'best' if at else 'adapter'}"
                entries.append({"label": run, "adapter": adapter, "benchmark": benchmark, **entry})
    return Results.of({(name, seed): rows for name, seeds in metrics.items() for seed, rows in seeds.items()}, entries)


def grade_file(path: Path, problems: Problems) -> Entry:
    """The entry of a completion file."""
    job = Job(path, problems, read_head(path))
    return grade(job, completions_of(job))
