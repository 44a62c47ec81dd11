"""The experiment matrix (configs/experiments.yaml): the runs behind each figure and table, their commands, their state.

A run is known by its name and seed: its directory is ``<name>-s<seed>``, wherever it lies. Nothing is run here.
"""

import fcntl
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.cli import CONFIGS, read_yaml
from gtpo.errors import UsageError, nearest

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
