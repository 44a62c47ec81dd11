"""What figures and tables are drawn from: metrics and scores, read from run directories, wandb or condensed files."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES
from gtpo.errors import UsageError
from gtpo.reports.metrics import is_held_out
from gtpo.runs.directory import RunDirectory, find_runs, run_label

logger = logging.getLogger(__name__)

METRICS_FILE, SCORES_FILE = "metrics.parquet", "evaluation.json"  # condensed results


@dataclass(frozen=True)
class Results:
    """Metrics and scores of some runs.

    Attributes:
        metrics: Run name -> seed -> the rows of :meth:`gtpo.runs.directory.RunDirectory.read_metrics`.
        scores: Run name (``NAME@best`` at its best step, ``base``) -> benchmark -> seed -> an entry of ``results.json``
            (docs/evaluation.md).
    """

    metrics: dict[str, dict[int, list[dict[str, Any]]]]
    scores: dict[str, dict[str, dict[int, dict[str, Any]]]]


def split_name(directory: Path) -> tuple[str, int | None]:
    """:func:`gtpo.runs.directory.run_label` of a directory, without a suffix ``-paper``: the run name in the
    SFT files of ``configs/paper/``.
    """
    name, seed = run_label(directory.name)
    return name.removesuffix("-paper"), seed


def read_results(directories: list[Path], models: Mapping[str, str] | None = None) -> Results:
    """Every run and evaluation below some directories; of two with the same name and seed, the newer one.

    A directory of condensed results (:func:`condense`) is read too, and an offline wandb run counts as its run.

    Args:
        directories: Where to look.
        models: Run name -> model; a run of that name with another model in its settings is left out.
    """
    results = Results({}, {})
    for directory in directories:
        if (directory / METRICS_FILE).is_file():
            _read_condensed(directory, results)
    for run in find_runs(directories, having="metrics"):
        name, seed = split_name(run.path)
        if not _has_model(run, expected := (models or {}).get(name)):
            logger.warning("%s is left out: it does not train %s, as the run of that name does", run.path, expected)
            continue
        if seed is None:
            seed = int(run.read_config().get("seed", 0)) if run.config.is_file() else 0
        try:
            rows = run.read_metrics()
        except UsageError:  # no step is logged yet
            continue
        results.metrics.setdefault(name, {})[seed] = rows
    evaluations = {path for directory in directories for path in directory.rglob("results.json")}
    for path in sorted(evaluations, key=lambda path: path.stat().st_mtime):
        for entry in json.loads(path.read_text(encoding="utf-8"))["results"]:
            run = RunDirectory(Path(entry["adapter"] or "base/adapter").parent)
            if _has_model(run, (models or {}).get(split_name(run.path)[0])):
                add_score(results, entry)
    return results


def _has_model(run: RunDirectory, expected: str | None) -> bool:
    """Whether a run trains a model, as far as its settings say."""
    stored = run.read_config().get("model") if expected and run.config.is_file() else None
    return stored is None or MODEL_ALIASES.get(stored, stored) == MODEL_ALIASES.get(str(expected), expected)


def add_score(results: Results, entry: dict[str, Any]) -> None:
    """Add an entry of ``results.json`` under the name and seed of its run: ``NAME@best`` at its best step, ``base``."""
    adapter = Path(entry["adapter"] or "base/adapter")
    name, seed = split_name(adapter.parent)
    name += "@best" if adapter == RunDirectory(adapter.parent).best else ""
    results.scores.setdefault(name, {}).setdefault(entry["benchmark"], {})[seed or 0] = entry


def read_wandb(project: str) -> Results:
    """The runs of a wandb project, under the same names and with the same metrics; it has no scores.

    Raises:
        UsageError: If wandb cannot be reached or the project does not exist.
    """
    import wandb

    results = Results({}, {})
    try:
        for run in wandb.Api().runs(project):
            name, seed = split_name(Path(run.name))
            rows = [row for row in run.scan_history() if row.get("step") is not None]
            if rows:
                seed = int(run.config.get("seed", 0)) if seed is None else seed
                results.metrics.setdefault(name, {})[seed] = rows
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise UsageError(
            f"cannot read {project!r} from wandb: {error} Expected ENTITY/PROJECT and a login (`wandb login`)."
        ) from error
    return results


# Condensed results, small enough for the repository


def condense(results: Results, directory: Path, metrics: Iterable[str]) -> None:
    """Write some metrics of every step, rounded to five significant digits, and the scores without completions."""
    from pyarrow import Table, parquet

    metrics = list(metrics)
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"run": name, "seed": seed, "step": row["step"]} | {key: rounded(row.get(key)) for key in metrics}
        for name, seeds in sorted(results.metrics.items())
        for seed, logged in sorted(seeds.items())
        for row in logged
        if not is_held_out(row)
    ]
    parquet.write_table(Table.from_pylist(rows), directory / METRICS_FILE, compression="zstd")
    keys = ("label", "adapter", "benchmark", "problems", "k", "scores")
    entries = [
        {key: entry[key] for key in keys}
        for _, benchmarks in sorted(results.scores.items())
        for _, seeds in sorted(benchmarks.items())
        for _, entry in sorted(seeds.items())
    ]
    (directory / SCORES_FILE).write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")


def rounded(value: float | None) -> float | None:
    """To five significant digits; None for NaN and infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _read_condensed(directory: Path, results: Results) -> None:
    from pyarrow.parquet import read_table

    for row in read_table(directory / METRICS_FILE).to_pylist():
        name, seed = row.pop("run"), row.pop("seed")
        values = {key: value for key, value in row.items() if value is not None}
        results.metrics.setdefault(name, {}).setdefault(seed, []).append(values)
    for entry in json.loads((directory / SCORES_FILE).read_text(encoding="utf-8")):
        add_score(results, entry)
