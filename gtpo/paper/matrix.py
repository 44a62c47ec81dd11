"""The experiment matrix (configs/experiments.yaml): the runs behind each figure and table, their commands, their state.

A run is known by its name and seed: its directory is ``<name>-s<seed>``, wherever it lies. Nothing is run here.
"""

import fcntl
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from config import CONFIGS, UsageError, nearest, read_yaml

SCALES = ("tiny", "paper")
ROOT = Path("outputs") / "reproduce"
Matrix = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A training run of the matrix.

    Attributes:
        words: The train script and its flags.
        folder: The run directory.
        log: What the script writes to the terminal; locked while it runs.
        cost: CPU minutes at tiny scale, GPU hours at paper scale; an estimate.
    """

    name: str
    seed: int
    words: tuple[str, ...]
    folder: Path
    log: Path
    cost: float

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.words)}"

    @property
    def done(self) -> bool:
        return (self.folder / "adapter" / "adapter_config.json").is_file()

    @property
    def has_checkpoint(self) -> bool:
        return any(self.folder.glob("checkpoint-*/files.json"))

    @property
    def state(self) -> str:
        """done (its adapter is there), running, half done (a checkpoint is there), or missing."""
        if self.done:
            return "done"
        if self.log.is_file():
            with self.log.open() as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return "running"
        return "half done" if self.has_checkpoint else "missing"


def load_matrix(path: Path = CONFIGS / "experiments.yaml") -> Matrix:
    """The matrix as it stands in the YAML file."""
    return read_yaml(path)


def figure_names(matrix: Matrix) -> list[str]:
    """Every figure, then the table."""
    return [*matrix["figures"], "table1"]


def find_figure(matrix: Matrix, name: str) -> dict[str, Any]:
    """What the matrix says of a figure or table.

    Raises:
        UsageError: If there is none of that name.
    """
    if name not in (known := figure_names(matrix)):
        raise UsageError(f"figure {name!r} is unknown{nearest(name, known)}: pick from {', '.join(known)}, or all.")
    return matrix["table1"] if name == "table1" else matrix["figures"][name]


def groups_of(matrix: Matrix, figure: str, scale: str) -> dict[str, dict[str, str]]:
    """Title of a group of curves -> legend name -> run; empty where the figure has no runs at this scale."""
    return find_figure(matrix, figure).get(scale) or {}


def runs_of(matrix: Matrix, figures: Sequence[str], scale: str) -> list[str]:
    """The names of the runs behind some figures, each once."""
    groups = [group for figure in figures for group in groups_of(matrix, figure, scale).values()]
    return list(dict.fromkeys(name for group in groups for name in group.values()))


def experiment(matrix: Matrix, scale: str, name: str, seed: int, root: Path = ROOT) -> Experiment:
    """One run of the matrix, with its command."""
    folder = root / scale / f"{name}-s{seed}"
    method = name.partition("-")[0]
    if scale == "tiny":
        settings = matrix["tiny"]["base"][method] | matrix["tiny"]["runs"][name]
        flags = [word for key, value in settings.items() for word in (f"--{key}", *_as_words(value))]
        cost = matrix["tiny"]["minutes"][method]
    else:
        path = Path("configs") / "paper" / f"{name}.yaml"
        settings = read_yaml(CONFIGS / "paper" / path.name)
        flags = ["--config", str(path)]
        model, kind = settings["model"], "solution" if method == "sft" else "completion"
        steps, size = matrix["paper"]["steps"][settings["dataset"]], settings.get("num_generations", 1)
        cost = steps * size * matrix["paper"][f"seconds_per_{kind}"][model] / 3600
    words = (f"train_{method}.py", *flags, "--seed", str(seed), "--output_dir", str(folder))
    return Experiment(name, seed, words, folder, root / scale / "logs" / f"{folder.name}.log", cost)


def experiments_of(
    matrix: Matrix, figures: Sequence[str], scale: str, seeds: Sequence[int] | None = None, root: Path = ROOT
) -> list[Experiment]:
    """The runs behind some figures, each once, the first seed of all before the second.

    Args:
        seeds: Those of the figure, or of the scale, by default.
    """
    order: dict[tuple[int, str, int], None] = {}
    for figure in figures:
        own = seeds or find_figure(matrix, figure).get("seeds") or matrix[scale]["seeds"]
        order |= {(i, name, seed): None for name in runs_of(matrix, [figure], scale) for i, seed in enumerate(own)}
    runs = dict.fromkeys((name, seed) for _, name, seed in sorted(order, key=lambda key: key[0]))
    return [experiment(matrix, scale, name, seed, root) for name, seed in runs]


def _as_words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(part) for part in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


@dataclass(frozen=True)
class Evaluation:
    """One call of evaluate.py: a benchmark and the adapters scored on it, all at one checkpoint.

    Attributes:
        results: The JSON file that each of them ends with.
    """

    benchmark: str
    checkpoint: str
    results: tuple[Path, ...]
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.words)}"

    @property
    def done(self) -> bool:
        return all(path.is_file() for path in self.results)


def evaluations(
    matrix: Matrix, figures: Sequence[str], scale: str, seeds: Sequence[int] | None = None, root: Path = ROOT
) -> list[Evaluation]:
    """The evaluations that some figures show, of the runs that are done."""
    wanted: dict[tuple[str, str], dict[str, None]] = {}  # benchmark and checkpoint -> names
    for figure in figures:
        for group, benchmarks in find_figure(matrix, figure).get("benchmarks", {}).items():
            for name in groups_of(matrix, figure, scale).get(group, {}).values():
                checkpoint = "best" if name.startswith(tuple(matrix[scale]["best"])) else "last"
                for benchmark in benchmarks:
                    wanted.setdefault((benchmark, checkpoint), {})[name] = None
    calls = []
    folder = root / scale / "evaluation"
    for (benchmark, checkpoint), names in wanted.items():
        runs = [
            experiment(matrix, scale, name, seed, root) for name in names for seed in seeds or matrix[scale]["seeds"]
        ]
        done = [run for run in runs if run.done]
        at = "" if checkpoint == "last" else f"@{checkpoint}"
        labels = ["-".join(run.folder.parts[1:]) + at for run in done]  # evaluate.py's: the path under outputs/
        flags = {"benchmarks": benchmark, "checkpoint": checkpoint} | matrix[scale]["evaluation"][benchmark]
        words = ["evaluate.py", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
        words += ["--output_dir", str(folder), "--adapter", *(str(run.folder) for run in done)]
        if done:
            results = tuple(folder / label / f"{benchmark}.json" for label in labels)
            calls.append(Evaluation(benchmark, checkpoint, results, tuple(words)))
    return calls


# What there is


@dataclass(frozen=True)
class Results:
    """What figures are drawn from.

    Attributes:
        metrics: Run name -> seed -> the rows of its ``metrics.jsonl``.
        scores: Run name -> benchmark -> seed -> its entry of an evaluation (docs/evaluation.md).
    """

    metrics: dict[str, dict[int, list[dict[str, Any]]]]
    scores: dict[str, dict[str, dict[int, dict[str, Any]]]]


def split_name(folder: Path) -> tuple[str, int | None]:
    """Name and seed of a run from its directory: ``gtpo-g8-s2`` is run gtpo-g8 with seed 2; no seed, then None.

    An ending ``-paper`` is left out: the files of SFT in configs/paper/ call their runs so.
    """
    match = re.fullmatch(r"(.+)-s(\d+)", folder.name)
    name, seed = (match[1], int(match[2])) if match else (folder.name, None)
    return name.removesuffix("-paper"), seed


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a run, oldest first; a last line cut short by a kill is left out.

    An offline run of wandb (``RUN/wandb/offline-run-...``) is read beside it: the run's own file has the same names and
    values.

    Raises:
        UsageError: If the run has no metrics.
    """
    path = run_directory(run) / "metrics.jsonl"
    if not path.is_file():
        what = "holds no metrics.jsonl" if Path(run).is_dir() else "is no folder"
        raise UsageError(f"{run} {what}: name the directory of a training run.")
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not rows:
        raise UsageError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def run_directory(folder: str | Path) -> Path:
    """The run directory that holds an offline wandb run, or the folder itself."""
    folder = Path(folder)
    return folder.parent.parent if folder.parent.name == "wandb" else folder


def read_results(places: list[Path]) -> Results:
    """Every run and evaluation under some folders; of two with one name and seed the newer.

    A folder of condensed results (``metrics.parquet`` and ``evaluation.json``, as in results/tiny) is read too.
    """
    results = Results({}, {})
    for place in places:
        if (place / "metrics.parquet").is_file():
            _read_condensed(place, results)
    found = {path for place in places for path in run_directory(place).rglob("metrics.jsonl")}
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        name, seed = split_name(path.parent)
        if seed is None:
            settings = path.parent / "config.yaml"
            seed = int(yaml.safe_load(settings.read_text()).get("seed", 0)) if settings.is_file() else 0
        if rows := _rows(path.parent):
            results.metrics.setdefault(name, {})[seed] = rows
    scored = {path for place in places for path in place.rglob("results.json")}
    for path in sorted(scored, key=lambda path: path.stat().st_mtime):
        for entry in json.loads(path.read_text())["results"]:
            if entry["adapter"]:
                add_score(results, entry)
    return results


def _rows(run: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(run)
    except UsageError:  # it has just started
        return []


def add_score(results: Results, entry: dict[str, Any]) -> None:
    """Put an entry of an evaluation where its run and seed belong."""
    name, seed = split_name(Path(entry["adapter"]).parent)
    results.scores.setdefault(name, {}).setdefault(entry["benchmark"], {})[seed or 0] = entry


def _read_condensed(folder: Path, results: Results) -> None:
    from pyarrow.parquet import read_table

    for row in read_table(folder / "metrics.parquet").to_pylist():
        name, seed = row.pop("run"), row.pop("seed")
        values = {key: value for key, value in row.items() if value is not None}
        results.metrics.setdefault(name, {}).setdefault(seed, []).append(values)
    for entry in json.loads((folder / "evaluation.json").read_text()):
        add_score(results, entry)
