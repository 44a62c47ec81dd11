"""What reproduce.py prints without running anything: states and costs, and a shell command per run and evaluation."""

from collections.abc import Sequence

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
    """The state and cost of each run and evaluation, the cost of each figure, and what remains."""
    unit, speedup = UNITS[scale], matrix[scale].get("speedup", {})
    states = {run: state_of(run) for run in experiments}
    width = max(map(len, (*(run.label for run in experiments), *(evaluation.label for evaluation in evaluations))))
    lines = []
    for run in experiments:
        collapsed = f", {run.collapsed:.0f} if it collapses at once" if run.collapsed else ""
        lines.append(f"{run.label:{width}}  {states[run]:11}  {run.cost:6.1f} {unit}{collapsed}")
    for work in evaluations:
        scored = sum(work.result(run).is_file() for run in work.experiments)
        lines.append(f"{work.label:{width}}  {f'{scored} of {len(work.experiments)}':11}  {work.cost:6.1f} {unit}")
    lines += ["", "Training by figure; runs that several figures share are in each:"] if figures else []
    for figure in figures:
        shown = [run for run in experiments if run.name in runs_of(matrix, [figure], scale)]
        left = sum(run.cost for run in shown if states[run] != "finished")
        total = sum(run.cost for run in shown)
        lines.append(f"{figure:{width}}  {len(shown):4} runs   {total:6.1f} {unit}, {left:.1f} remaining")
    left_runs = [run for run in experiments if states[run] != "finished"]
    least = sum(run.cost / speedup.get(run.model, 1) for run in left_runs)  # than the logs that the costs are from
    hours = f"{least:.0f} to " * bool(speedup) + f"{sum(run.cost for run in left_runs):.0f}"
    counts = ", ".join(f"{list(states.values()).count(state)} {state}" for state in STATES)
    scoring = sum(work.cost for work in evaluations if not work.is_finished)
    lines += [
        "",
        f"{len(experiments)} runs: {counts}; about {hours} {unit} of training and {scoring:.0f} of evaluation",
    ]
    return "\n".join(lines) + " remaining (estimates, configs/experiments.yaml)."


def commands(scale: str, experiments: Sequence[Experiment], evaluations: Sequence[Evaluation]) -> str:
    """A shell command per line, each after those that it depends on; started again, it continues where it stopped."""
    lines = []
    for experiment in experiments:
        run = experiment.run
        checkpoints = run.checkpoint("*") / MANIFEST
        again = f"$(ls {checkpoints} > /dev/null 2>&1 && echo --resume {run.path} || echo --overwrite true)"
        what = f"{experiment.label}; {experiment.cost:.1f} {UNITS[scale]}"
        lines.append(f"[ -e {run.adapter / 'adapter_config.json'} ] || {command_of(experiment)} {again}  # {what}")
    for work in evaluations:
        after = " ".join(run.label for run in work.experiments)
        lines.append(f"{command_of(work)}  # {work.label}; {work.cost:.1f} {UNITS[scale]}; after: {after}")
    return "\n".join(lines)
