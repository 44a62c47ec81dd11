"""The experiment matrix (``configs/experiments.yaml``): the runs of each figure and table, their commands and states.

A run is identified by its name and seed; its directory is ``<name>-s<seed>``. Nothing is executed here.
"""

import fcntl
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, nearest
from gtpo.evaluation.targets import label_of
from gtpo.files import CONFIGS, read_yaml
from gtpo.runs import RunDirectory

SCALES = ("tiny", "paper")
RUNS = Path("outputs") / "reproduce"
UNITS = {"tiny": "CPU minutes", "paper": "GPU hours"}  # of Experiment.cost
STATES = ("finished", "running", "interrupted", "missing")
Matrix = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A training run of the matrix.

    Attributes:
        argv: The train script and its flags.
        run: The run directory.
        log: Terminal output of the script; locked while it runs.
        cost: Estimated duration in ``UNITS``.
    """

    name: str
    seed: int
    argv: tuple[str, ...]
    run: RunDirectory
    log: Path
    cost: float

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.argv)}"

    @property
    def state(self) -> str:
        """One of ``STATES``: finished has the final adapter, interrupted has a checkpoint."""
        if self.run.is_finished:
            return "finished"
        if self.log.is_file():
            with self.log.open() as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return "running"
        return "interrupted" if self.run.has_checkpoint else "missing"


@dataclass(frozen=True)
class Evaluation:
    """One call of evaluate.py: a benchmark and the runs that are evaluated on it, all at the same checkpoint.

    Attributes:
        argv: The script and its flags.
        results: The scores of each run, a JSON file.
    """

    benchmark: str
    checkpoint: str
    argv: tuple[str, ...]
    results: tuple[Path, ...]

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.argv)}"

    @property
    def is_finished(self) -> bool:
        return all(path.is_file() for path in self.results)


# The YAML file


def load_matrix(path: Path = CONFIGS / "experiments.yaml") -> Matrix:
    """The content of the YAML file.

    Raises:
        UsageError: Outside a clone of the repository: the installed package has no configs/.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist: run this from a clone of the repository.")
    return read_yaml(path)


def figure_names(matrix: Matrix) -> list[str]:
    """Every figure, then the table."""
    return [*matrix["figures"], "table1"]


def find_figure(matrix: Matrix, name: str) -> dict[str, Any]:
    """The entry of a figure or table.

    Raises:
        UsageError: If the name is unknown.
    """
    if name not in (known := figure_names(matrix)):
        raise UsageError(f"figure {name!r} is unknown{nearest(name, known)}: pick from {', '.join(known)}, or all.")
    return matrix["table1"] if name == "table1" else matrix["figures"][name]


def select_figures(matrix: Matrix, names: Sequence[str], scale: str | None = None) -> list[str]:
    """The figures that a command line names, without duplicates; ``all`` stands for every figure that has runs.

    Args:
        scale: Only figures that have runs at this scale; at any scale by default.

    Raises:
        UsageError: If a name is unknown, or a figure named has no runs at this scale.
    """
    if "all" in names:
        return [name for name in figure_names(matrix) if scale is None or groups_of(matrix, name, scale)]
    for name in names:
        entry = find_figure(matrix, name)
        if scale is not None and not entry.get(scale):
            raise UsageError(f"{name} has no runs at {scale} scale: choose another --scale.")
    return list(dict.fromkeys(names))


def groups_of(matrix: Matrix, figure: str, scale: str) -> dict[str, dict[str, str]]:
    """Title of a group of curves -> legend label -> run name; empty if the figure has no runs at this scale."""
    return find_figure(matrix, figure).get(scale) or {}


def runs_of(matrix: Matrix, figures: Sequence[str], scale: str) -> list[str]:
    """The names of the runs of some figures, without duplicates."""
    groups = [group for figure in figures for group in groups_of(matrix, figure, scale).values()]
    return list(dict.fromkeys(name for group in groups for name in group.values()))


# Runs and evaluations


def experiment(matrix: Matrix, scale: str, name: str, seed: int, root: Path = RUNS) -> Experiment:
    """One run of the matrix with its command."""
    run = RunDirectory(root / scale / f"{name}-s{seed}")
    method = name.partition("-")[0]
    if scale == "tiny":
        settings = matrix["tiny"]["base"][method] | matrix["tiny"]["runs"][name]
        flags = [word for key, value in settings.items() for word in (f"--{key}", *_as_argv(value))]
        cost = matrix["tiny"]["minutes"][method]
    else:
        path = Path("configs") / "paper" / f"{name}.yaml"
        settings = read_yaml(CONFIGS / "paper" / path.name)
        flags = ["--config", str(path)]
        model, kind = settings["model"], "solution" if method == "sft" else "completion"
        steps, size = matrix["paper"]["steps"][settings["dataset"]], settings.get("num_generations", 1)
        cost = steps * size * matrix["paper"][f"seconds_per_{kind}"][model] / 3600
    argv = (f"train_{method}.py", *flags, "--seed", str(seed), "--output_dir", str(run.path))
    return Experiment(name, seed, argv, run, root / scale / "logs" / f"{run.path.name}.log", cost)


def experiments_of(
    matrix: Matrix, figures: Sequence[str], scale: str, seeds: Sequence[int] | None = None, root: Path = RUNS
) -> list[Experiment]:
    """The runs of some figures without duplicates, the first seed of all runs before the second.

    Args:
        seeds: By default those of the figure, or of the scale.
    """
    order: dict[tuple[int, str, int], None] = {}
    for figure in figures:
        chosen = seeds or find_figure(matrix, figure).get("seeds") or matrix[scale]["seeds"]
        order |= {(i, name, seed): None for name in runs_of(matrix, [figure], scale) for i, seed in enumerate(chosen)}
    runs = dict.fromkeys((name, seed) for _, name, seed in sorted(order, key=lambda key: key[0]))
    return [experiment(matrix, scale, name, seed, root) for name, seed in runs]


def _as_argv(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(part) for part in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def evaluations_of(
    matrix: Matrix, figures: Sequence[str], scale: str, seeds: Sequence[int] | None = None, root: Path = RUNS
) -> list[Evaluation]:
    """The evaluations of some figures, for the runs that are finished."""
    needed: dict[tuple[str, str], dict[str, None]] = {}  # (benchmark, checkpoint) -> run names
    for figure in figures:
        for group, benchmarks in find_figure(matrix, figure).get("benchmarks", {}).items():
            for name in groups_of(matrix, figure, scale).get(group, {}).values():
                checkpoint = "best" if name.startswith(tuple(matrix[scale]["best"])) else "last"
                for benchmark in benchmarks:
                    needed.setdefault((benchmark, checkpoint), {})[name] = None
    evaluations = []
    directory = root / scale / "evaluation"
    for (benchmark, checkpoint), names in needed.items():
        candidates = [
            experiment(matrix, scale, name, seed, root) for name in names for seed in seeds or matrix[scale]["seeds"]
        ]
        runs = [candidate.run.path for candidate in candidates if candidate.run.is_finished]
        if not runs:
            continue
        suffix = "" if checkpoint == "last" else f"@{checkpoint}"
        flags = {"benchmarks": benchmark, "checkpoint": checkpoint} | matrix[scale]["evaluation"][benchmark]
        argv = ["evaluate.py", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
        argv += ["--output_dir", str(directory), "--adapter", *map(str, runs)]
        results = tuple(directory / f"{label_of(path)}{suffix}" / f"{benchmark}.json" for path in runs)
        evaluations.append(Evaluation(benchmark, checkpoint, tuple(argv), results))
    return evaluations


def state_table(experiments: Sequence[Experiment], scale: str) -> str:
    """The state and cost of each run, one per line, and the total that remains."""
    rows = [(experiment, experiment.state) for experiment in experiments]
    width = max(len(experiment.label) for experiment in experiments)
    lines = [f"{item.label:{width}}  {state:11}  {item.cost:5.1f} {UNITS[scale]}" for item, state in rows]
    states = [state for _, state in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    remaining = sum(item.cost for item, state in rows if state != "finished")
    return "\n".join(
        [*lines, f"{len(rows)} runs: {counts}; about {remaining:.0f} {UNITS[scale]} of training remaining."]
    )
