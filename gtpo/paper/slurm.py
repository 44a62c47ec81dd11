"""Runs and evaluations as jobs of a Slurm cluster, or of this machine (``cluster=local``), through submitit.

    python reproduce.py table1 --scale paper --slurm partition=gpu time=24:00:00 parallel=16

Training is one array; the evaluations that wait for the same runs are an array with a dependency on them. A job that
is preempted, or reaches its time limit, is requeued and resumes the run. submitit's files are in the directory ``jobs``
beside the runs. Beside the log of a run or evaluation a record names its job; a job that is not in the record does
nothing, so a run is never in two jobs, also where file locks do not reach from one machine to the other.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line, nearest
from gtpo.files import write_atomically
from gtpo.paper.matrix import Evaluation, Experiment
from gtpo.paper.runner import Process, Work, cores, ensure_base, failure, run_one, threads_of

ROUNDS = 3  # submissions of a job that is killed without a word
RECORD_SECONDS = 60  # the record of a job is written after its array is submitted
SIGNAL_SECONDS = 120  # between a script that Slurm has stopped and the end of its job
POLL_SECONDS = {"slurm": 10, "local": 0.1}
STOPPED = {-signal.SIGTERM, -signal.SIGUSR2, 128 + signal.SIGTERM, 128 + signal.SIGUSR2}
_ONE_GPU = "each run is one task on one GPU"
OWN_KEYS = ("cluster", "parallel", "time")
NOT_KEYS = {  # what the jobs themselves need
    **dict.fromkeys(("nodes", "tasks_per_node", "ntasks_per_node"), "examples/slurm/train.sbatch starts one large run"),
    **dict.fromkeys(("dependency", "map_count", "array_parallelism"), "parallel=N limits the jobs of an array"),
}


@dataclass(frozen=True)
class Cluster:
    """Where jobs go.

    Attributes:
        name: slurm or local, an executor of submitit.
        parallel: Jobs at the same time, of an array or on this machine; None leaves it to Slurm.
        parameters: For ``submitit.AutoExecutor.update_parameters``.
        folder: Directory of submitit's files.
    """

    name: str
    parallel: int | None
    parameters: dict[str, Any]
    folder: Path

    def submit(self, works: Sequence[Work], after: Sequence[str] = ()) -> dict[Work, Any]:
        """Submit an array that starts when the jobs ``after`` have ended, and record its jobs.

        Raises:
            UsageError: If Slurm refuses it.
        """
        import submitit
        from submitit.core.utils import FailedJobError

        folder = self.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        executor = submitit.AutoExecutor(folder, cluster=self.name, **{f"{self.name}_max_num_timeout": 1000})
        executor.update_parameters(
            **self.parameters,
            slurm_array_parallelism=self.parallel,
            slurm_dependency=f"afterany:{':'.join(after)}" if after else None,
        )
        threads = self.parallel if self.name == "local" else None
        try:
            with executor.batch():
                jobs = [executor.submit(Job(work, threads)) for work in works]
        except FailedJobError as error:
            raise UsageError(f"sbatch refuses the job: {error} Change the values of --slurm.") from error
        for work, job in zip(works, jobs, strict=True):
            place = {"cluster": self.name, "folder": str(folder), "id": job.job_id}
            work.log.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(record_of(work), json.dumps(place))
        return dict(zip(works, jobs, strict=True))


def record_of(work: Work) -> Path:
    """The file that names the job of a run or evaluation."""
    return work.log.with_suffix(".job")


def job_of(work: Work) -> Any | None:
    """The job of a run or evaluation, if it has not ended; one of this machine is known to its driver alone."""
    record = record_of(work)
    if not record.is_file():
        return None
    import submitit

    place = json.loads(record.read_text())
    kind = submitit.SlurmJob if place["cluster"] == "slurm" else submitit.LocalJob
    job: Any = kind(place["folder"], place["id"])
    return None if job.done() else job


class Job:
    """What a job does: it is pickled by submitit, and called where Slurm starts it.

    Args:
        work: The run or evaluation.
        jobs: Jobs that share the cores of the machine; None if the cores that the process sees are its own.
    """

    def __init__(self, work: Work, jobs: int | None) -> None:
        self.work, self.jobs = work, jobs
        self.process: Process | None = None

    def __call__(self) -> int:
        if not self._is_recorded():
            return 0
        code = run_one(self.work, threads_of(self.jobs or 1), self._keep)
        if code in STOPPED:  # the signal that requeues the job, or ends it, is on its way to this process too
            time.sleep(SIGNAL_SECONDS)
        return code

    def checkpoint(self) -> Any:
        """Stop the script, which writes its checkpoint, and requeue; submitit calls this on SIGUSR2."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            self.process.send_signal(signal.SIGUSR2)
            with suppress(ChildProcessError):  # it has ended before
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # Popen.wait is what was interrupted
        return DelayedSubmission(Job(self.work, self.jobs))

    def _keep(self, process: Process) -> None:
        self.process = process

    def _is_recorded(self) -> bool:
        from submitit import JobEnvironment

        record, end = record_of(self.work), time.monotonic() + RECORD_SECONDS
        while time.monotonic() < end:
            if record.is_file() and json.loads(record.read_text())["id"] == JobEnvironment().job_id:
                return True
            time.sleep(0.1)
        return False


def run_jobs(experiments: Sequence[Experiment], evaluations: Sequence[Evaluation], cluster: Cluster) -> list[str]:
    """Submit what is missing and in no job yet, and wait for all of it; what is killed is submitted again.

    Returns:
        A message for each run or evaluation that failed.
    """
    from tqdm import tqdm

    ensure_base(experiments)
    works: list[Work] = [*experiments, *evaluations]
    failed: dict[Work, str] = {}
    with tqdm(total=len(works), unit=" runs and evaluations") as bar:
        for _ in range(ROUNDS):
            left = _left(works, failed)
            if not left:
                break
            jobs = {work: job for work in left if (job := job_of(work))}
            waiting = [work for work in left if work not in jobs]
            while waiting or not all(job.done() for job in jobs.values()):
                for work in (chosen := _next(waiting, jobs, cluster)):
                    waiting.remove(work)
                for kind in (Experiment, Evaluation):
                    for after, array in _arrays([work for work in chosen if isinstance(work, kind)], jobs).items():
                        jobs |= cluster.submit(array, after)
                ended = len(works) - len(waiting) - sum(not job.done() for job in jobs.values())
                bar.update(ended - bar.n)
                time.sleep(POLL_SECONDS[cluster.name])
            failed |= {work: message for work, job in jobs.items() if (message := _message(work, job))}
    lost = {work: failure(work, f"was killed {ROUNDS} times") for work in _left(works, failed)}
    return list((failed | lost).values())


def _left(works: Sequence[Work], failed: dict[Work, str]) -> list[Work]:
    """What is to be submitted: no evaluation whose runs have scores already, or have failed."""
    left: list[Work] = []
    for work in works:
        if isinstance(work, Evaluation):
            missing = bool(work.remaining()) or any(run in left for run in work.experiments)
        else:
            missing = not work.is_finished  # `remaining` would read whole checkpoints
        if missing and work not in failed:
            left.append(work)
    return left


def _next(waiting: Sequence[Work], jobs: dict[Work, Any], cluster: Cluster) -> list[Work]:
    """What is submitted now: with Slurm everything; this machine has no queue, so what can start."""
    if cluster.name == "slurm":
        return list(waiting)
    running = {work for work, job in jobs.items() if not job.done()}
    ready = [work for work in waiting if not running.union(waiting).intersection(_needed(work))]
    return ready[: max(0, (cluster.parallel or 1) - len(running))]


def _arrays(works: Sequence[Work], jobs: dict[Work, Any]) -> dict[tuple[str, ...], list[Work]]:
    """Runs and evaluations by the jobs that they wait for."""
    arrays: dict[tuple[str, ...], list[Work]] = {}
    for work in works:
        after = [jobs[run].job_id for run in _needed(work) if run in jobs and not jobs[run].done()]
        arrays.setdefault(tuple(after), []).append(work)
    return arrays


def _needed(work: Work) -> tuple[Experiment, ...]:
    return work.experiments if isinstance(work, Evaluation) else ()


def _message(work: Work, job: Any) -> str | None:
    """About a job that failed; None if it did not, or was killed before it could say so."""
    if not job.paths.result_pickle.exists():
        return None
    if error := job.exception():
        trace = [line for line in str(error).splitlines() if re.match(r"\w+(\.\w+)*: ", line)]  # of submitit's process
        return failure(work, f"failed in job {job.job_id} ({trace[-1] if trace else first_line(error)})")
    code = job.result()
    return failure(work, f"failed with exit code {code}") if code else None


# --slurm


def read_cluster(words: Sequence[str], scale: str, folder: Path) -> Cluster:
    """The cluster that ``--slurm`` describes.

    Args:
        words: ``key=value``: cluster, parallel, time, and the parameters of submitit's SlurmExecutor.
        scale: At paper scale a job has a GPU.
        folder: Directory of submitit's files.

    Raises:
        UsageError: If submitit or Slurm is missing, or a key or value is not one.
    """
    try:
        from submitit import AutoExecutor, SlurmExecutor
    except ImportError as error:
        raise UsageError("--slurm needs submitit: `pip install submitit==1.5.4` (the extra `slurm`).") from error
    known = {*SlurmExecutor._valid_parameters(), *AutoExecutor._valid_parameters()} - {*NOT_KEYS, "timeout_min"}
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"--slurm {word!r} is not key=value, as in partition=gpu.")
        if key in NOT_KEYS:
            raise UsageError(f"--slurm {key}: {_ONE_GPU}; {NOT_KEYS[key]}.")
        if key not in (*OWN_KEYS, *known):
            close = nearest(key, [*OWN_KEYS, *known])
            raise UsageError(f"--slurm {key} is unknown{close}: pick from {', '.join([*OWN_KEYS, *sorted(known)])}.")
        given[key] = [value] if key == "setup" else int(value) if re.fullmatch("0|[1-9][0-9]*", value) else value
    name, parallel, limit = given.pop("cluster", "slurm"), given.pop("parallel", None), given.pop("time", "24:00:00")
    if name not in ("slurm", "local"):
        raise UsageError(f"--slurm cluster={name}: expected slurm, or local for jobs on this machine.")
    if name == "slurm" and not shutil.which("sbatch"):
        raise UsageError("--slurm: sbatch is not found; run this on a login node, or add cluster=local to try it here.")
    if parallel is not None and (not isinstance(parallel, int) or parallel < 1):
        raise UsageError(f"--slurm parallel={parallel}: expected a number of jobs, at least 1.")
    if isinstance(given.get("gpus_per_node"), int) and given["gpus_per_node"] > 1:
        raise UsageError(f"--slurm gpus_per_node={given['gpus_per_node']}: {_ONE_GPU}; {NOT_KEYS['nodes']}.")
    if name == "local":
        parallel = parallel or (cores() if scale == "tiny" else 1)
        if scale == "paper" and parallel > 1:
            raise UsageError("--slurm cluster=local has one GPU: remove parallel, or use --gpus 0 1 ... instead.")
    if scale == "paper" and not {"gpus_per_node", "gpus_per_task", "gres"} & given.keys():
        given["gpus_per_node"] = 1
    shared = AutoExecutor._valid_parameters()
    parameters = {key if key in shared else f"slurm_{key}": value for key, value in given.items()}
    defaults = {"name": "gtpo", "slurm_signal_delay_s": 300, "timeout_min": minutes(str(limit))}
    return Cluster(name, parallel, defaults | parameters, folder)


def minutes(limit: str) -> int:
    """A time limit in Slurm's format, minutes or [days-]hours:minutes:seconds, in minutes.

    Raises:
        UsageError: If it is neither, or no time at all.
    """
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+))", limit)
    days, hours, mins, seconds, alone = (int(part or 0) for part in match.groups()) if match else (0,) * 5
    total = alone or ((days * 24 + hours) * 60 + mins + (seconds > 0))
    if not total:
        raise UsageError(f"--slurm time={limit}: expected minutes or [days-]hours:minutes:seconds, as in 24:00:00.")
    return total
