"""Train and evaluate what a figure, a table or a claim lacks, and read all results."""

from collections.abc import Sequence
from pathlib import Path

from gtpo.errors import UsageError
from gtpo.files import CONFIGS
from gtpo.paper.matrix import RUNS, Evaluation, Experiment
from gtpo.paper.results import Results, read_results
from gtpo.paper.runner import run_all, slots_of
from gtpo.paper.slurm import read_cluster, run_jobs


def run_missing(
    scale: str,
    experiments: Sequence[Experiment],
    evaluations: Sequence[Evaluation],
    jobs: int | None = None,
    gpus: Sequence[str] | None = None,
    slurm: Sequence[str] | None = None,
) -> tuple[Results, list[str]]:
    """Do what is missing, here or as Slurm jobs; all results of the scale, and a message for each failure."""
    if not Path("evaluate.py").is_file():  # the scripts are those of the working directory
        raise UsageError(f"the working directory has no evaluate.py: first `cd {str(CONFIGS.parent)!r}`.")
    if slurm:
        failures = run_jobs(experiments, evaluations, read_cluster(slurm, scale, RUNS / scale / "jobs"))
    else:
        failures = run_all(experiments, evaluations, slots_of(scale, gpus, jobs))
    return read_results([RUNS / scale]), failures
