"""Train and evaluate what is missing, one subprocess per run; finished runs are skipped, interrupted ones resumed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from gtpo.checkpoints import latest_complete
from gtpo.paper.matrix import Evaluation, Experiment


def train(experiments: Sequence[Experiment], scale: str, jobs: int | None = None) -> list[str]:
    """Train the runs that are not finished; a run that fails does not stop the others.

    Args:
        jobs: Runs at the same time; by default one per core at tiny scale, 1 at paper scale.

    Returns:
        A message for each run that failed.
    """
    from tqdm import tqdm

    todo = [experiment for experiment in experiments if not experiment.run.is_finished]
    if todo and scale == "tiny":
        from gtpo.tiny import ensure_tiny

        ensure_tiny()  # the base model of all runs
    jobs = jobs or (cores() if scale == "tiny" else 1)
    threads = max(1, cores() // jobs)
    skipped = len(experiments) - len(todo)
    failed = []
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(experiments), initial=skipped, unit=" runs") as bar:
        futures = {pool.submit(train_one, experiment, threads): experiment for experiment in todo}
        try:
            for future in as_completed(futures):
                experiment = futures[future]
                bar.set_postfix_str(experiment.label)
                bar.update()
                if code := future.result():
                    failed.append(_failure(experiment.label, code, experiment.log, experiment.command))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def train_one(experiment: Experiment, threads: int) -> int:
    """Train one run, or resume it from its last checkpoint; waits while another process trains it.

    Returns:
        The exit code of the train script; 0 if the run is finished.
    """
    run = experiment.run
    experiment.log.parent.mkdir(parents=True, exist_ok=True)
    with experiment.log.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # the subprocess inherits the file and holds the lock until it exits
        if run.is_finished:
            return 0
        argv = [sys.executable, *experiment.argv]
        if latest_complete(run.path):
            argv += ["--resume", str(run.path)]
        elif run.path.exists():
            argv += ["--overwrite", "true"]
        return _call(argv, log, threads)


def evaluate(evaluations: Sequence[Evaluation], logs: Path) -> list[str]:
    """Evaluate what has no scores yet.

    Args:
        logs: Directory of the log files.

    Returns:
        A message for each evaluation that failed.
    """
    from tqdm import tqdm

    logs.mkdir(parents=True, exist_ok=True)
    todo = [evaluation for evaluation in evaluations if not evaluation.is_finished]
    failed = []
    for evaluation in tqdm(todo, unit=" evaluations", disable=not todo):
        path = logs / f"evaluate-{evaluation.benchmark}-{evaluation.checkpoint}.log"
        with path.open("a") as log:
            if code := _call([sys.executable, *evaluation.argv], log, cores()):
                failed.append(_failure(path.stem, code, path, evaluation.command))
    return failed


def cores() -> int:
    """CPU cores available to this process; outside Linux all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _call(argv: Sequence[str], log: IO[str], threads: int) -> int:
    """Run a command with its output in a log file; the exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return subprocess.run(argv, stdout=log, stderr=log, env=environment).returncode


def _failure(label: str, code: int, log: Path, command: str) -> str:
    return f"{label} failed with exit code {code}, see {log}; the command was `{command}`"
