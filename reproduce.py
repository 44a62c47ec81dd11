"""Run what a figure or table of the paper needs, then draw it: at tiny scale on a CPU, at paper scale on a GPU.

    python reproduce.py fig3 --scale tiny                 # five runs, three seeds each: minutes
    python reproduce.py all --scale tiny --jobs 2         # every figure and Table 1
    python reproduce.py all --scale paper --list          # what is done, running and missing, and its GPU hours
    python reproduce.py --page                            # results/tiny/ and docs/reproduction.md from the tiny runs

The runs of each figure stand in configs/experiments.yaml. A complete run is skipped and a half-done one resumed, so the
same command goes on where it stopped; a run that fails is told at the end and does not stop the others. Two commands at
once share the work.
"""

import argparse
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from config import UsageError, run_script
from experiments import (
    ROOT,
    SCALES,
    Evaluation,
    Experiment,
    evaluations,
    experiments_of,
    figure_names,
    find_figure,
    load_matrix,
    read_results,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, or all.")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="tiny: a CPU; paper: one GPU. [tiny]")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="Those of the matrix by default.")
    parser.add_argument("--jobs", type=int, metavar="N", help="Runs at once. [tiny: one for each core; paper: 1]")
    parser.add_argument("--list", action="store_true", help="Show the runs and their state, and stop.")
    parser.add_argument("--page", action="store_true", help="Write results/tiny/ and docs/reproduction.md, and stop.")
    flags = parser.parse_args()
    matrix = load_matrix()
    if flags.page:
        from page import write_page

        print(*write_page(matrix), sep="\n")
        return
    if not flags.figures:
        raise UsageError(f"no figure named: pick from {', '.join(figure_names(matrix))}, or all.")
    figures = figure_names(matrix) if "all" in flags.figures else list(dict.fromkeys(flags.figures))
    for name in figures:
        if not find_figure(matrix, name).get(flags.scale):
            if "all" not in flags.figures:
                raise UsageError(f"{name} has no runs at {flags.scale} scale.")
            figures = [other for other in figures if other != name]
    if flags.jobs is not None and flags.jobs < 1:
        raise UsageError(f"--jobs is {flags.jobs}: expected at least 1.")
    runs = experiments_of(matrix, figures, flags.scale, flags.seeds)
    if flags.list:
        print(listing(runs, flags.scale))
        return

    failed = train(runs, flags.scale, flags.jobs or (cores() if flags.scale == "tiny" else 1))
    failed += evaluate(evaluations(matrix, figures, flags.scale, flags.seeds), ROOT / flags.scale / "logs")

    from figures import draw_all

    drawn, missing = draw_all(
        matrix, figures, flags.scale, read_results([ROOT / flags.scale]), ROOT / flags.scale / "figures"
    )
    print(*drawn, *missing, *failed, sep="\n")
    if failed:
        sys.exit(1)


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
        from models import ensure_tiny

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


if __name__ == "__main__":
    run_script(main)
