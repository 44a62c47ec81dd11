import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gtpo.paper.matrix import Evaluation, Experiment
from gtpo.tiny import ensure_tiny


def listing(runs: Sequence[Experiment], scale: str) -> str:
    """The runs as a table, and what is left to do."""
    unit = "CPU minutes" if scale == "tiny" else "GPU hours"
    states = [run.state for run in runs]
    width = max(len(run.label) for run in runs)
    lines = [f"{run.label:{width}}  {state:9}  {run.cost:5.1f} {unit}" for run, state in zip(runs, states, strict=True)]
    left = sum(run.cost for run, state in zip(runs, states, strict=True) if state != "done")
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("done", "running", "half done", "missing"))
    return "\n".join([*lines, f"{len(runs)} runs: {counts}; some {left:.0f} {unit} of training are left."])


def train(runs: Sequence[Experiment], scale: str, jobs: int) -> list[str]:
    """Run what is not done, ``jobs`` at once; a sentence for each run that failed."""
    from tqdm import tqdm

    todo = [run for run in runs if not run.done]
    if todo and scale == "tiny":
        pass

        ensure_tiny()  # all runs start from it
    threads = max(1, cores() // jobs)
    failed = []
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(runs), initial=len(runs) - len(todo), unit=" runs") as bar:
        futures = {pool.submit(run_one, run, threads): run for run in todo}
        try:
            for future in as_completed(futures):
                run = futures[future]
                bar.set_postfix_str(run.label)
                bar.update()
                if code := future.result():
                    failed.append(f"{run.label} failed (exit code {code}): {run.log} tells why; {run.command}")
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def run_one(run: Experiment, threads: int) -> int:
    """Train one run, resumed where it stopped; the exit code. It waits for another process that is at the same run."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # the script inherits the file, and with it the lock: held while it lives
        if run.done:
            return 0
        words = [sys.executable, *run.words]
        if run.has_checkpoint:
            words += ["--resume", str(run.folder)]
        elif run.folder.exists():
            words += ["--overwrite", "true"]
        return call(words, log, threads)


def evaluate(calls: Sequence[Evaluation], logs: Path) -> list[str]:
    """Score what is not scored yet; a sentence for each call that failed."""
    from tqdm import tqdm

    failed = []
    for evaluation in tqdm([evaluation for evaluation in calls if not evaluation.done], unit=" evaluations"):
        path = logs / f"evaluate-{evaluation.benchmark}-{evaluation.checkpoint}.log"
        with path.open("a") as log:
            if code := call([sys.executable, *evaluation.words], log, cores()):
                failed.append(f"{path.stem} failed (exit code {code}): {path} tells why; {evaluation.command}")
    return failed


def cores() -> int:
    """Those that this process may use; outside Linux all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def call(words: list[str], log: object, threads: int) -> int:
    """The exit code of a command of this repository whose words go to a log."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return subprocess.run(words, stdout=log, stderr=log, env=environment).returncode  # type: ignore[call-overload]
