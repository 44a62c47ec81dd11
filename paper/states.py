"""What reproduce.py prints without running anything: states and costs, and a shell command per run and evaluation."""

from collections.abc import Iterable, Sequence

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
    speedup = matrix[scale].get("speedup", {})
    states = {run: state_of(run) for run in experiments}
    left = [run for run in experiments if states[run] != "finished"]
    labels = [run.label for run in experiments] + [work.label for work in evaluations]
    width = max(map(len, labels))
    lines = [f"{unit}, of training at most:"] if speedup else []
    lines += [f"{run.label:{width}}  {states[run]:11}  {run.cost:6.1f}" for run in experiments]
    for work in evaluations:
        scored = sum(map(work.is_scored, work.experiments))
        state = f"{scored} of {len(work.experiments)}"
        lines.append(f"{work.label:{width}}  {state:11}  {work.cost:6.1f}")
    if figures:
        lines += ["", f"Training by figure, {unit}; runs that several figures share are in each:"]
    for figure in figures:
        shown = [run for run in experiments if run.name in runs_of(matrix, [figure], scale)]
        to_do = _cost(run for run in left if run in shown)
        lines.append(f"{figure:10} {len(shown):4} runs   {_cost(shown):7.1f}, {to_do:.1f} remaining")
    hours = f"{_cost(left):.0f}"
    if speedup:  # of GPUs since the logs that the costs are from
        least = sum(run.cost / speedup.get(run.model, 1) for run in left)
        hours = f"{least:.0f} to {hours}"
    scoring = _cost(work for work in evaluations if not work.is_finished)
    counts = ", ".join(f"{[*states.values()].count(state)} {state}" for state in STATES)
    lines += [
        "",
        f"{len(experiments)} runs: {counts};",
        f"about {hours} {unit} of training and {scoring:.0f} of evaluation remaining",
        "(estimates, configs/experiments.yaml).",
    ]
    return "\n".join(lines)


def _cost(works: Iterable[Experiment | Evaluation]) -> float:
    return sum(work.cost for work in works)


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
