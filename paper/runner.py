"""Train and evaluate what is missing on this machine, one process at a time per GPU or share of the cores.

Finished runs are skipped, interrupted ones resumed. Without a GPU the processes are forks of one that has imported the
libraries: importing them takes longer than a short run of the tiny model.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from graphlib import TopologicalSorter
from multiprocessing import connection
from queue import SimpleQueue
from typing import IO

from gtpo.errors import UsageError
from gtpo.files import open_regular
from gtpo.models.backend import gpu_is_available
from gtpo.processes import limit_openmp_spinning
from paper.matrix import Work, command_of

Process = subprocess.Popen[bytes]
Environment = Mapping[str, str]  # variables of a process, over those of this one
Run = Callable[[Work, Environment], int]  # it returns the exit code

LIBRARIES = [  # imported before the forks; none starts a thread
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",
]
_forks = multiprocessing.get_context("forkserver")
_polling = threading.Lock()


def run_one(work: Work, environment: Environment, started: Callable[[Process], None] | None = None) -> int:
    """Do what is left of a run or evaluation; waits while another process of this machine does it.

    Returns the exit code of the script, whose process ``started`` is given; 0 if nothing is left.
    """
    with _locked_log(work) as log:  # the subprocess inherits it
        words = work.remaining()
        if not words:
            return 0
        argv = [sys.executable, *words]
        compiled = {"UNSLOTH_COMPILE_LOCATION": f"unsloth_compiled_cache/{work.label}"}  # no other run writes there
        with subprocess.Popen(argv, stdout=log, stderr=log, env={**compiled, **os.environ, **environment}) as process:
            if started:
                started(process)
            return process.wait()


def run_forked(work: Work, environment: Environment) -> int:
    """As :func:`run_one`, in a fork of a process that has imported ``LIBRARIES``."""
    process = _forks.Process(target=_run_script, args=(work, {**os.environ, **environment}))
    with _polling:  # each start polls all processes, and an exit code can be read once
        process.start()
    connection.wait([process.sentinel])
    with _polling:
        process.join()
    return process.exitcode or 0


def _run_script(work: Work, environment: Environment) -> None:
    gc.freeze()  # the libraries stay: no collection has to look through them
    log = _locked_log(work)
    if words := work.remaining():
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ |= environment
        is_module = words[0] == "-m"
        sys.argv = [*words[is_module:]]
        run = runpy.run_module if is_module else runpy.run_path
        run(sys.argv[0], run_name="__main__")


def _locked_log(work: Work) -> IO[str]:
    """Waits for the lock of the log; it is held until every process that has this file open exits."""
    import fcntl  # Windows has none; run_script says that it is not supported

    work.log.parent.mkdir(parents=True, exist_ok=True)
    log = open_regular(work.log, encoding="utf-8")
    fcntl.flock(log, fcntl.LOCK_EX)
    return log


def run_all(experiments: Sequence[Work], evaluations: Sequence[Work], slots: Sequence[Environment]) -> list[str]:
    """Do what is missing; a message for each run or evaluation that failed, which does not stop the others.

    An evaluation waits for its ``experiments``. ``slots``: the environment of each process at the same time; it may
    name a GPU.
    """
    from tqdm import tqdm

    run = _prepare(slots)
    free: SimpleQueue[Environment] = SimpleQueue()
    for slot in slots:
        free.put(slot)
    after = {work: getattr(work, "experiments", ()) for work in (*experiments, *evaluations)}
    failed: list[str] = []
    bar = tqdm(total=len(after), unit="run")
    with bar, ThreadPoolExecutor(len(slots)) as pool:
        for work, code in _completed(pool, partial(_in_a_free_slot, free=free, run=run), after):
            bar.set_postfix_str(work.label)
            bar.update()
            if code:
                failed.append(failure(work, f"failed with exit code {code}"))
    return failed


def _prepare(slots: Sequence[Environment]) -> Run:
    """How a process is started in these slots: as a fork, whose libraries will have this many threads, or a new one."""
    os.environ |= threads_of(len(slots))  # read by OpenMP when the libraries are imported
    limit_openmp_spinning(os.environ)
    _forks.set_forkserver_preload(LIBRARIES)
    on_gpus = "CUDA_VISIBLE_DEVICES" in slots[0]
    # A fork cannot use CUDA if the imports have, and macOS allows few calls after one.
    can_fork = sys.platform == "linux" and not on_gpus and not gpu_is_available()
    return run_forked if can_fork else run_one


def _completed(
    pool: ThreadPoolExecutor, do: Callable[[Work], int], after: Mapping[Work, Sequence[Work]]
) -> Iterator[tuple[Work, int]]:
    """Each work as it ends, and what ``do`` returned; ``after``: those that it waits for."""
    order = TopologicalSorter(after)
    order.prepare()
    futures: dict[Future[int], Work] = {}
    while order.is_active():
        futures |= {pool.submit(do, work): work for work in order.get_ready()}
        try:
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
        for future in done:
            work = futures.pop(future)
            order.done(work)
            yield work, future.result()


def _in_a_free_slot(work: Work, free: SimpleQueue[Environment], run: Run) -> int:
    """``run`` with the environment of a slot that no other work has at the time."""
    if work.is_finished:
        return 0
    slot = free.get()
    try:
        return run(work, slot)
    finally:
        free.put(slot)


def slots_of(scale: str, gpus: Sequence[str] | None, jobs: int | None) -> list[dict[str, str]]:
    """The environment of each run at the same time: ``--gpus``, ``--jobs``, or one per core; at paper scale 1."""
    if gpus:
        if len(set(gpus)) < len(gpus):
            raise UsageError(f"--gpus {' '.join(gpus)} names a GPU twice: each has one run at a time.")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    jobs = (cores() if scale == "tiny" else 1) if jobs is None else jobs
    if jobs < 1 or (scale == "paper" and jobs > 1):
        raise UsageError(f"--jobs is {jobs}: expected at least 1, and 1 on a GPU: --gpus 0 1 ... names several.")
    return [{}] * jobs


def threads_of(jobs: int) -> dict[str, str]:
    """OMP_NUM_THREADS of one of several runs at the same time, unless it is set."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // jobs)))}


def cores() -> int:
    """CPU cores available to this process; outside Linux all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def failure(work: Work, what: str) -> str:
    """The message about a run or evaluation that did not end well."""
    return f"{work.label} {what}, see {work.log}; the command was `{command_of(work)}`"
