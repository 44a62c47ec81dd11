"""What figures and tables are drawn from: metrics and scores, read from run directories, wandb or condensed files."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pandas import DataFrame, Series, concat, read_parquet

from gtpo.arguments import hub_name
from gtpo.errors import UsageError
from gtpo.evaluation.records import Head
from gtpo.evaluation.storage import weights_have_changed
from gtpo.files import read_regular
from gtpo.runs.directory import RunDirectory, check_seeds, find_runs, is_held_out, run_around, run_label

logger = logging.getLogger(__name__)

METRICS_FILE, SCORES_FILE = "metrics.parquet", "evaluation.json"  # condensed results
METRICS_INDEX, SCORES_INDEX = ["run", "seed", "step"], ["run", "benchmark", "seed"]
GREEDY = "_greedy"  # ends the name of a benchmark at temperature 0
Run = tuple[str, int]  # name and seed
Entry = dict[str, Any]  # of results.json


class Sampled(NamedTuple):
    """What evaluations of one figure have in common; 0 where it is not known."""

    problems: int
    k: int
    temperature: float
    problems_hash: str
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True)
class Results:
    """Metrics and scores of some runs.

    ``metrics`` has a row per training step, with index run, seed, step. ``scores`` has a row per evaluation, with index
    run (``NAME@best`` at its best step, ``NAME@40`` of a checkpoint, ``base``), benchmark, seed; a column per score in
    percent (``pass@8``, ``format``), and ``entry``, that of ``results.json``.
    """

    metrics: DataFrame
    scores: DataFrame

    @classmethod
    def of(cls, runs: Mapping[Run, Any], entries: Iterable[Entry] = ()) -> "Results":
        """From the rows of each run, and entries of ``results.json``; of two of the same run the later one counts."""
        tables = [DataFrame(rows).assign(run=name, seed=seed) for (name, seed), rows in runs.items()]
        metrics = concat(tables) if tables else DataFrame(columns=METRICS_INDEX)
        latest = {}
        for entry in entries:
            row = _scores_of(entry)
            base = entry["label"] if row["run"] == "base" else None  # of several models
            latest[row["run"], row["benchmark"], row["seed"], base] = row
        scores = DataFrame([*latest.values()], columns=None if latest else SCORES_INDEX)
        return cls(
            metrics.set_index(METRICS_INDEX).sort_index(),
            scores.set_index(SCORES_INDEX).sort_index(),
        )

    @cached_property
    def runs(self) -> dict[Run, DataFrame]:
        """Name and seed -> the metrics of a run by step."""
        by_run = self.metrics.groupby(level=["run", "seed"])
        return {run: rows.droplevel(["run", "seed"]) for run, rows in by_run}

    @property
    def names(self) -> set[str]:
        """The runs that have metrics or scores."""
        return {name for name, *_ in (*self.runs, *self.scores.index)}

    def seeds(self, name: str) -> list[int]:
        """The seeds with metrics of a run."""
        return [seed for run, seed in self.runs if run == name]

    def curve(self, name: str, seed: int, metric: str) -> "Series[float]":
        """A metric of a run by step; KeyError if there is no such run or metric."""
        values = self.runs[name, seed][metric].dropna()
        if values.empty:
            raise KeyError(metric)
        return values.astype(float)

    def smoothed(self, name: str, metric: str, window: int) -> DataFrame:
        """The trailing mean of a metric, a column per seed, at the steps of all seeds; NaN if the window is empty."""
        curves = {}
        for seed in self.seeds(name):
            with suppress(KeyError):
                logged = self.runs[name, seed][metric].astype(float)
                curves[seed] = logged.rolling(window, min_periods=1).mean()
        if not curves:
            return DataFrame()
        return concat(curves, axis=1, join="inner").dropna(axis=1, how="all")

    def scored(self, name: str | None, benchmark: str | None) -> DataFrame:
        """The evaluations of a run on a benchmark by seed, with the scores that one of them has."""
        index = self.scores.index
        of_run = index.get_level_values("run") == name
        on_benchmark = index.get_level_values("benchmark") == benchmark
        rows = self.scores[of_run & on_benchmark]
        return rows.droplevel(["run", "benchmark"]).dropna(axis=1, how="all")


def _scores_of(entry: Entry) -> Entry:
    """The row of an entry; of the adapters of a run the final one has its name, others ``NAME@best``, ``NAME@40``."""
    adapter = Path(entry["adapter"] or "base/adapter")
    run = run_around(adapter)
    name, seed = split_name(run.path)
    if adapter != run.adapter:
        name += f"@{adapter.name.removeprefix('checkpoint-')}"
    row = {"run": name, "benchmark": entry["benchmark"], "seed": seed or 0, "entry": entry}
    for kind, value in entry["scores"].items():
        if isinstance(value, dict):
            row |= {f"{kind}@{k}": score for k, score in value.items()}
        else:
            row[kind] = value
    return row


def split_name(directory: Path) -> tuple[str, int | None]:
    """The name and seed of a run; without a suffix ``-paper``, which the SFT files of ``configs/paper/`` have."""
    name, seed = run_label(directory.name)
    return name.removesuffix("-paper"), seed


def _identify(directory: Path, config: Mapping[str, Any]) -> Run:
    """The name and seed of a run, whose name may lack a seed that its settings have."""
    name, seed = split_name(directory)
    return name, int(config.get("seed", 0)) if seed is None else seed


def read_results(directories: list[Path], models: Mapping[str, str] = MappingProxyType({})) -> Results:
    """Every run and evaluation below some directories, condensed or not; of two with one name and seed, the newer one.

    ``models``: run name -> model; a run of that name with another model in its settings is left out.
    """
    runs: dict[Run, Any] = {}
    condensed: list[Entry] = []
    read = []
    for directory in directories:
        if (directory / METRICS_FILE).is_file():
            rows = read_parquet(directory / METRICS_FILE)
            runs |= dict(iter(rows.groupby(["run", "seed"])))
            condensed += json.loads(read_regular(directory / SCORES_FILE))
    for run in find_runs(directories, having="metrics"):
        if expected := _expected_model(run, models):
            logger.warning("%s is left out: it does not train %s, as the run of that name does", run.path, expected)
            continue
        with suppress(UsageError):  # no step is logged yet
            key = _identify(run.path, run.read_config())
            runs[key] = [row for row in run.read_metrics() if not is_held_out(row)]
            read.append((*key, run))
    evaluations: set[Path] = set()
    for directory in directories:
        evaluations |= {*directory.rglob("results.json")}
    oldest_first = sorted(evaluations, key=lambda path: path.stat().st_mtime)
    found = [entry for path in oldest_first for entry in _entries_of(path, models)]
    for entry in filter(itemgetter("adapter"), found):
        run = run_around(entry["adapter"])
        read.append((*_identify(run.path, {}), run))
    check_seeds(read)
    return Results.of(runs, condensed + _comparable(found))


def _comparable(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that have the same problems and sampling as the others of a benchmark; what is left out is logged.

    The others are of runs in the same directory, of a base model all. Most evaluations decide, then the larger number
    of problems, of samples, the higher temperature, and the newer one.
    """
    votes = {(entry["benchmark"], _place(entry), entry["adapter"], _sampling(entry)): None for entry in entries}
    kept = []
    for entry in entries:
        benchmark = entry["benchmark"]
        place = _place(entry)
        others = []  # the newest first
        for name, of_other, _, other in reversed(votes):
            if name == benchmark and place in (of_other, Path()):
                others.append(other)
        chosen = max(others, key=lambda other: (others.count(other), other.problems, other.k, other.temperature))
        if _sampling(entry) == chosen:
            kept.append(entry)
        else:
            logger.warning(
                "scores of %s on %s are left out: problems or sampling are not as in the others",
                entry["label"],
                benchmark,
            )
    return kept


def _place(entry: Entry) -> Path:
    """The directory of the run of an adapter and of the runs that it is compared with."""
    return Path(entry["adapter"] or "").parent.parent


def _sampling(entry: Entry) -> Sampled:
    stored = entry.get("settings", {}) | {"problems": entry.get("problems")}
    return Sampled._make(stored.get(name) or 0 for name in Sampled._fields)


def _entries_of(path: Path, models: Mapping[str, str]) -> Iterator[Entry]:
    """The entries of a ``results.json`` that are of the runs as they are now; greedy ones under a name of their own."""
    for entry in json.loads(read_regular(path))["results"]:
        run = run_around(entry["adapter"] or "base/adapter")
        if _expected_model(run, models):
            continue
        if weights_have_changed(Head.of_entry(entry)):
            logger.warning("scores in %s are left out: %s has other weights now", path, entry["adapter"])
            continue
        if entry.get("settings", {}).get("temperature") == 0:
            entry["benchmark"] += GREEDY
        yield entry


def _expected_model(run: RunDirectory, models: Mapping[str, str]) -> str | None:
    """The model that the run of this name trains, if this one trains another, as far as its settings say."""
    name, _ = split_name(run.path)
    expected = models.get(name)
    if expected is None:
        return None
    stored = run.read_config().get("model", expected)
    if hub_name(stored) == hub_name(expected):
        return None
    return expected


def read_wandb(project: str) -> Results:
    """The runs of a wandb project, under the same names and with the same metrics; it has no scores."""
    import wandb

    runs = {}
    for run in wandb.Api().runs(project):
        rows = [row for row in run.scan_history() if row.get("step") is not None and not is_held_out(row)]
        if rows:
            runs[_identify(Path(run.name), run.config)] = rows
    return Results.of(runs)
