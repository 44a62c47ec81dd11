"""The experiment matrix (``configs/experiments.yaml``): the runs of each figure and table, their commands and states.

A run is identified by its name and seed; its directory is ``<name>-s<seed>``. Nothing is executed here.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from gtpo.data.load import SOURCES
from gtpo.errors import UsageError, nearest
from gtpo.evaluation.records import Head
from gtpo.evaluation.storage import sampled_as, weights_have_changed
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.hours import hours_of_steps
from gtpo.runs.directory import OUTPUTS, RunDirectory, label_of, latest_complete, to_argv
from paper.results import GREEDY

RUNS = OUTPUTS / "reproduce"
UNITS = {"tiny": "CPU minutes", "paper": "GPU hours"}  # scale -> that of the costs
SCALES = tuple(UNITS)
Matrix = dict[str, Any]


class Work(Protocol):
    """What the runners do: a run, an evaluation, or a measurement of the study. ``log`` is locked while it is done."""

    @property
    def label(self) -> str: ...
    @property
    def log(self) -> Path: ...
    @property
    def argv(self) -> tuple[str, ...]: ...
    @property
    def is_finished(self) -> bool: ...
    def remaining(self) -> tuple[str, ...]: ...


def command_of(work: Work) -> str:
    return f"python {shlex.join(work.argv)}"


@dataclass(frozen=True)
class Experiment:
    """A training run of the matrix: a kind of work."""

    name: str
    seed: int
    model: str
    argv: tuple[str, ...]  # the train script and its flags
    directory: Path = field(compare=False)  # argv names it
    log: Path
    cost: float  # estimated duration in UNITS; at paper scale the upper end
    settings: Matrix = field(default_factory=dict, compare=False)  # those of configs/

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"

    @cached_property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory)

    @property
    def is_finished(self) -> bool:
        return self.run.is_finished

    def remaining(self) -> tuple[str, ...]:
        """The script and flags that are left to run, from the newest complete checkpoint; none of a finished run."""
        if self.is_finished:
            return ()
        if latest_complete(self.run.path):
            return (*self.argv, "--resume", str(self.run.path))
        return (*self.argv, "--overwrite", "true") if self.run.path.exists() else self.argv


@dataclass(frozen=True)
class Evaluation:
    """One call of evaluate.py, a kind of work: the runs of one base model on one benchmark, all at the same checkpoint.

    ``flags`` are those other than ``--runs``.
    """

    model: str
    benchmark: str
    checkpoint: str
    experiments: tuple[Experiment, ...]
    flags: tuple[str, ...]
    directory: Path
    log: Path
    cost: float

    @property
    def label(self) -> str:
        return self.log.stem

    @property
    def argv(self) -> tuple[str, ...]:
        return self._argv(self.experiments)

    @property
    def is_finished(self) -> bool:
        return all(map(self.is_scored, self.experiments))

    def is_scored(self, experiment: Experiment) -> bool:
        """Whether a run has scores, of the weights that it has now, and sampled as the matrix says."""
        path = self.result(experiment)
        if not path.is_file():
            return False
        scored = Head.of_entry(json.loads(path.read_bytes()))
        return sampled_as(scored.settings, self.flags) and not weights_have_changed(scored)

    def result(self, experiment: Experiment) -> Path:
        """The scores of a run, a JSON file."""
        suffix = "" if self.checkpoint == "last" else f"@{self.checkpoint}"
        benchmark = self.benchmark.removesuffix(GREEDY)
        return self.directory / f"{label_of(experiment.run.path)}{suffix}" / f"{benchmark}.json"

    def remaining(self) -> tuple[str, ...]:
        """The script and flags for the finished runs without scores; none if there are no such runs.

        Scores of earlier weights are replaced.
        """
        left = [run for run in self.experiments if run.is_finished and not self.is_scored(run)]
        if not left:
            return ()
        is_again = any(self.result(run).is_file() for run in left)
        return (*self._argv(left), *(["--overwrite", "true"] if is_again else []))

    def _argv(self, experiments: Sequence[Experiment]) -> tuple[str, ...]:
        base = ["base"] if self.checkpoint == "last" else []  # two evaluations would share its files
        return (
            "evaluate.py",
            *self.flags,
            "--runs",
            *base,
            *(str(experiment.run.path) for experiment in experiments),
        )


def load_matrix(path: Path = CONFIGS / "experiments.yaml") -> Matrix:
    """The content of the YAML file; the installed package has none."""
    return read_yaml(path)


def figure_names(matrix: Matrix) -> list[str]:
    """Every figure, then the table."""
    return [*matrix["figures"], "table1"]


def find_figure(matrix: Matrix, name: str) -> dict[str, Any]:
    """The entry of a figure or table."""
    if name not in (known := figure_names(matrix)):
        raise UsageError(f"figure {name!r} is unknown{nearest(name, known)}: pick from {', '.join(known)}, or all.")
    return matrix["table1"] if name == "table1" else matrix["figures"][name]


def select_figures(matrix: Matrix, names: Sequence[str], scale: str | None = None) -> list[str]:
    """The figures that a command line names, without duplicates; ``all``: every figure with runs at this or any scale.

    UsageError if a name is unknown, or a figure named has no runs at this scale.
    """
    if "all" in names:
        return [name for name in figure_names(matrix) if scale is None or groups_of(matrix, name, scale)]
    for name in names or [""]:
        if scale is not None and not groups_of(matrix, name, scale):
            raise UsageError(f"{name} has no runs at {scale} scale: choose another --scale.")
    return list(dict.fromkeys(names))


def groups_of(matrix: Matrix, figure: str, scale: str) -> dict[str, dict[str, str]]:
    """Title of a group of curves -> legend label -> run name; empty if the figure has no runs at this scale."""
    return find_figure(matrix, figure).get(scale) or {}


def runs_of(matrix: Matrix, figures: Sequence[str], scale: str) -> list[str]:
    """The names of the runs of some figures, without duplicates."""
    names: dict[str, None] = {}
    for figure in figures:
        for curves in groups_of(matrix, figure, scale).values():
            names |= dict.fromkeys(curves.values())
    return [*names]


def settings_of(matrix: Matrix, scale: str, name: str) -> dict[str, Any]:
    """The settings of a run other than the defaults of its script."""
    if scale == "paper":
        return read_yaml(CONFIGS / "paper" / f"{name}.yaml")
    spec = matrix[scale]
    return {**spec["base"][name.partition("-")[0]], **spec["runs"][name]}


def experiment(matrix: Matrix, scale: str, name: str, seed: int) -> Experiment:
    """One run of the matrix with its command."""
    spec = matrix[scale]
    method = name.partition("-")[0]
    settings = settings_of(matrix, scale, name)
    directory = RUNS / scale / f"{name}-s{seed}"
    if scale != "paper":
        flags = to_argv(settings)
        model = "tiny"
        cost = spec["minutes"][method] * settings["max_steps"] / spec["base"][method]["max_steps"]
    else:
        flags = ["--config", f"configs/paper/{name}.yaml"]
        model = settings["model"]
        dataset = settings["dataset"]
        steps = spec["steps"][dataset]
        cost = steps * spec["seconds_per_solution"][model] / 3600
        if method != "sft":
            group = settings["num_generations"]
            usual = spec["longest_completion"][dataset][group]
            cost = hours_of_steps(spec, model, group, usual, steps)
    argv = (
        f"train_{method}.py",
        *flags,
        "--seed",
        str(seed),
        "--output_dir",
        str(directory),
    )
    log = RUNS / scale / "logs" / f"{directory.name}.log"
    return Experiment(name, seed, model, argv, directory, log, cost, settings)


def seeds_of_all(matrix: Matrix, scale: str) -> list[int]:
    """The seeds of ``all``; at tiny scale the verdicts on the claims rest on them."""
    spec = matrix[scale]
    return list(spec["seeds_of"].get("all", spec["seeds"]))


def experiments_of(
    matrix: Matrix, figures: Sequence[str], scale: str, seeds: Sequence[int] | None = None, only: Sequence[str] = ("",)
) -> list[Experiment]:
    """The runs of some figures without duplicates; the first seed of all before the second.

    ``seeds``: by default those of the figure, of ``all`` or of the scale; ``only``: parts, one of which a name has.
    """
    spec = matrix[scale]
    is_all = [*figures] == select_figures(matrix, ["all"], scale)
    default = seeds_of_all(matrix, scale) if is_all else spec["seeds"]
    runs = []
    for figure in figures:
        chosen = seeds or spec["seeds_of"].get(figure, default)
        for name in runs_of(matrix, [figure], scale):
            if any(part in name for part in only):
                runs += [(number, name, seed) for number, seed in enumerate(chosen)]
    if not runs and (known := runs_of(matrix, figures, scale)):
        raise UsageError(f"--only {' '.join(only)} matches none of {', '.join(known)}{nearest(only[0], known)}.")
    runs.sort(key=itemgetter(0))  # stable: the order of the figures
    unique = dict.fromkeys((name, seed) for _, name, seed in runs)
    return [experiment(matrix, scale, name, seed) for name, seed in unique]


def evaluations_of(
    matrix: Matrix, figures: Sequence[str], scale: str, experiments: Sequence[Experiment]
) -> list[Evaluation]:
    """The evaluations of some figures: one per base model, benchmark and checkpoint, with every seed of its runs."""
    needed = []
    for figure in figures:
        groups = groups_of(matrix, figure, scale)
        for group, benchmarks in find_figure(matrix, figure).get("benchmarks", {}).items():
            shown = groups.get(group, {}).values()
            runs = [run for run in experiments if run.name in shown]
            needed += [(run, benchmark) for benchmark in benchmarks for run in runs]
    return plan_evaluations(matrix, scale, needed)


def models_of_runs(matrix: Matrix) -> dict[str, str]:
    """Name of a run of any figure -> the model that it trains."""
    models = {}
    for scale in SCALES:
        for name in runs_of(matrix, figure_names(matrix), scale):
            models[name] = experiment(matrix, scale, name, 1).model
    return models


def scored_name(matrix: Matrix, scale: str, run: str) -> str:
    """The name under which the scores that figures and tables show are stored: at the end, or at the best step."""
    return f"{run}@best" if run.startswith(tuple(matrix[scale]["best"])) else run


def plan_evaluations(matrix: Matrix, scale: str, needed: Iterable[tuple[Experiment, str]]) -> list[Evaluation]:
    """The evaluations of some runs on some benchmarks: one per base model, benchmark and checkpoint."""
    spec = matrix[scale]
    directory = RUNS / scale / "evaluation"
    together: dict[tuple[str, str, str], dict[Experiment, None]] = {}
    for run, benchmark in needed:
        checkpoints = ["last" if scored_name(matrix, scale, run.name) == run.name else "best"]
        if run.name.startswith(tuple(spec["both"])):
            checkpoints = ["last", "best"]
        for checkpoint in checkpoints:
            together.setdefault((run.model, benchmark, checkpoint), {})[run] = None
    evaluations = []
    for (model, benchmark, checkpoint), runs in together.items():
        sampling = spec["evaluation"][benchmark]
        flags = to_argv(
            {
                "benchmarks": benchmark,
                "checkpoint": checkpoint,
                **sampling,
                "output_dir": str(directory),
            }
        )
        problems = sampling.get("limit") or SOURCES[f"test/{benchmark}"].rows
        policies = len(runs) + (checkpoint == "last")  # and the base
        seconds = sampling["k"] * problems * policies * spec["seconds_per_sample"][model]
        cost = seconds / (60 if UNITS[scale] == "CPU minutes" else 3600)
        log = RUNS / scale / "logs" / f"evaluate-{model}-{benchmark}-{checkpoint}.log"
        evaluations.append(
            Evaluation(
                model,
                benchmark,
                checkpoint,
                tuple(runs),
                tuple(flags),
                directory,
                log,
                cost,
            )
        )
    return evaluations
