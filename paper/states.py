"""What reproduce.py prints without running anything: states and costs, and a shell command per run and evaluation."""

from collections.abc import Sequence

from pandas import DataFrame, concat

from gtpo.runs.directory import MANIFEST
from paper.matrix import UNITS, Evaluation, Experiment, Matrix, command_of, runs_of

STATES = ("finished", "running", "interrupted", "missing")


def state_of(experiment: Experiment) -> str:
    """One of ``STATES``: finished has final weights, interrupted has a checkpoint."""
    if experiment.is_finished:
        return "finished"
    if experiment.log.is_file():
        import fcntl  # Windows has none

        with experiment.log.open(encoding="utf-8") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "running"
    return "interrupted" if experiment.run.has_checkpoint else "missing"


def table(
    matrix: Matrix,
    figures: Sequence[str],
    scale: str,
    experiments: Sequence[Experiment],
    evaluations: Sequence[Evaluation],
) -> str:
    """The state and cost of each run and evaluation, the cost of each figure, and what remains, in 80 columns.

    Costs of training at paper scale are an upper end: with the ``speedup`` of the matrix a run takes less.
    """
    unit = UNITS[scale]
    speedup = matrix[scale].get("speedup", {})  # by model, of GPUs since the logs that the costs are from
    runs = DataFrame(
        {
            "name": [run.name for run in experiments],
            "label": [run.label for run in experiments],
            "state": [state_of(run) for run in experiments],
            "cost": [run.cost for run in experiments],
            "speedup": [speedup.get(run.model, 1) for run in experiments],
        }
    )
    runs["left"] = runs["cost"].where(runs["state"] != "finished", 0.0)
    scored = [sum(map(work.is_scored, work.experiments)) for work in evaluations]
    works = DataFrame(
        {
            "label": [work.label for work in evaluations],
            "state": [f"{count} of {len(work.experiments)}" for work, count in zip(evaluations, scored, strict=True)],
            "cost": [work.cost for work in evaluations],
        }
    )
    lines = [f"{unit}, of training at most:"] if speedup else []
    lines += _lines_of(concat([runs, works]))
    if figures:
        lines += ["", f"Training by figure, {unit}; runs that several figures share are in each:"]
    for figure in figures:
        shown = runs[runs["name"].isin(runs_of(matrix, [figure], scale))]
        cost, left = shown["cost"].sum(), shown["left"].sum()
        lines.append(f"{figure:10} {len(shown):4} runs   {cost:7.1f}, {left:.1f} remaining")
    training = f"{runs['left'].sum():.0f}"
    if speedup:
        training = f"{(runs['left'] / runs['speedup']).sum():.0f} to {training}"
    scoring = sum(work.cost for work in evaluations if not work.is_finished)
    by_state = runs["state"].value_counts()
    counts = ", ".join(f"{by_state.get(state, 0)} {state}" for state in STATES)
    lines += [
        "",
        f"{len(runs)} runs: {counts};",
        f"about {training} {unit} of training and {scoring:.0f} of evaluation remaining",
        "(estimates, configs/experiments.yaml).",
    ]
    return "\n".join(lines)


def _lines_of(works: DataFrame) -> list[str]:
    """Label, state and cost of each, in columns."""
    width = works["label"].str.len().max()
    columns = zip(works["label"], works["state"], works["cost"], strict=True)
    return [f"{label:{width}}  {state:11}  {cost:6.1f}" for label, state, cost in columns]


def commands(scale: str, experiments: Sequence[Experiment], evaluations: Sequence[Evaluation]) -> str:
    """A shell command per line, each after those that it depends on; started again, it continues where it stopped."""
    unit = UNITS[scale]
    lines = []
    for experiment in experiments:
        run = experiment.run
        weights = run.adapter / "adapter_config.json"
        checkpoints = run.checkpoint("*") / MANIFEST
        again = f"$(ls {checkpoints} > /dev/null 2>&1 && echo --resume {run.path} || echo --overwrite true)"
        command = f"[ -e {weights} ] || {command_of(experiment)} {again}"
        lines.append(f"{command}  # {experiment.label}; {experiment.cost:.1f} {unit}")
    for work in evaluations:
        after = " ".join(run.label for run in work.experiments)
        lines.append(f"{command_of(work)}  # {work.label}; {work.cost:.1f} {unit}; after: {after}")
    return "\n".join(lines)
