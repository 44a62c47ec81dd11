"""Runs and evaluations as jobs of a Slurm cluster, or of this machine (``cluster=local``), through submitit.

    python reproduce.py table1 --scale paper --slurm partition=gpu time=24:00:00 parallel=16

Training is one array; the evaluations that wait for the same runs are an array with a dependency on them. A job that
is preempted, or reaches its time limit, is requeued and resumes the run. submitit's files are in the directory ``jobs``
next to the runs.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line
from gtpo.files import CONFIGS
from paper.matrix import RUNS, Evaluation, Experiment
from paper.results import Results, read_results
from paper.runner import Process, Work, cores, failure, run_all, run_one, slots_of, threads_of

SIGNAL_SECONDS = 120  # between a script that Slurm has stopped and the end of its job
POLL_SECONDS = {"slurm": 10, "local": 0.1}
STOPPED = {-signal.SIGTERM, -signal.SIGUSR2, 128 + signal.SIGTERM, 128 + signal.SIGUSR2}
NOT_KEYS = (
    *("nodes", "tasks_per_node", "ntasks_per_node", "gpus_per_node", "gpus_per_task"),
    *("dependency", "map_count", "array_parallelism", "timeout_min"),
)


@dataclass(frozen=True)
class Cluster:
    """Where jobs go."""

    name: str  # slurm or local, an executor of submitit
    parallel: int | None  # jobs at the same time, of an array or on this machine; None leaves it to Slurm
    parameters: dict[str, Any]  # for submitit.AutoExecutor.update_parameters
    folder: Path  # of submitit's files

    def submit(self, works: Sequence[Work], after: Sequence[str] = ()) -> dict[Work, Any]:
        """Submit an array that starts when the jobs ``after`` have ended."""
        import submitit

        executor = submitit.AutoExecutor(self.folder, cluster=self.name, **{f"{self.name}_max_num_timeout": 1000})
        executor.update_parameters(
            **self.parameters,
            slurm_array_parallelism=self.parallel,
            slurm_dependency=f"afterany:{':'.join(after)}" if after else None,
        )
        share = (self.parallel or 1) if self.name == "local" else 1
        with executor.batch():
            jobs = [executor.submit(Job(work, share)) for work in works]
        return dict(zip(works, jobs, strict=True))


@dataclass
class Job:
    """What a job does, pickled by submitit; ``share``: jobs that share the cores which the process sees."""

    work: Work
    share: int
    process: Process | None = None

    def __call__(self) -> int:
        code = run_one(self.work, threads_of(self.share), partial(setattr, self, "process"))
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
        return DelayedSubmission(Job(self.work, self.share))


def run_jobs(works: Sequence[Work], cluster: Cluster) -> list[str]:
    """Submit what is missing, and wait for it; a message for each run or evaluation that failed or was killed."""
    from tqdm import tqdm

    jobs: dict[Work, Any] = {}
    arrays: dict[tuple[Experiment, ...], list[Work]] = {}  # by the runs that they wait for
    for work in works:
        if not work.is_finished:
            arrays.setdefault(getattr(work, "experiments", ()), []).append(work)
    with tqdm(total=sum(map(len, arrays.values())), unit=" runs and evaluations") as bar:

        def wait(most: int) -> None:
            while (left := sum(not job.done() for job in jobs.values())) > most:
                bar.update(len(jobs) - left - bar.n)
                time.sleep(POLL_SECONDS[cluster.name])
            bar.update(len(jobs) - left - bar.n)

        for needed, array in arrays.items():
            if cluster.name == "slurm":
                jobs |= cluster.submit(array, after=[jobs[run].job_id for run in needed if run in jobs])
                continue
            wait(0)
            for work in array:  # submitit starts a local job at once
                wait((cluster.parallel or 1) - 1)
                jobs |= cluster.submit([work])
        wait(0)
    messages = [_message(work, job) for work, job in jobs.items()]
    return [*filter(None, messages)]


def _message(work: Work, job: Any) -> str | None:
    """About a job that failed or was killed; None if it did neither."""
    if not job.paths.result_pickle.exists():
        return failure(work, f"was killed in job {job.job_id}, and the same command resumes it")
    if error := job.exception():
        trace = [line for line in str(error).splitlines() if re.match(r"\w+(\.\w+)*: ", line)]  # of submitit's process
        return failure(work, f"failed in job {job.job_id} ({trace[-1] if trace else first_line(error)})")
    return failure(work, f"failed with exit code {code}") if (code := job.result()) else None


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
    for experiment in experiments:
        experiment.run.check_settings(experiment.settings)
    if slurm:
        cluster = read_cluster(slurm, scale, RUNS / scale / "jobs")
        failures = run_jobs([*experiments, *evaluations], cluster)
    else:
        failures = run_all(experiments, evaluations, slots_of(scale, gpus, jobs))
    return read_results([RUNS / scale]), failures


def read_cluster(words: Sequence[str], scale: str, folder: Path) -> Cluster:
    """The cluster that ``--slurm`` describes: cluster, parallel, time, and the parameters of submitit's SlurmExecutor.

    At paper ``scale`` a job has a GPU. UsageError if a value is invalid, a key is unknown or would give a run more than
    one task or GPU, or jobs of the same name are queued.
    """
    given = _read_parameters(words)
    name = given.pop("cluster", "slurm")
    parallel = given.pop("parallel", None)
    limit = given.pop("time", "24:00:00")
    parameters = {"name": "gtpo", "slurm_signal_delay_s": 300, "timeout_min": minutes(str(limit))}
    if scale == "paper" and "slurm_gres" not in given:
        parameters["gpus_per_node"] = 1
    parameters |= given
    if name == "slurm":
        _check_queue(str(parameters["name"]))
    elif scale == "paper" and (parallel or 1) > 1:
        raise UsageError("--slurm cluster=local has one GPU: remove parallel, or use --gpus 0 1 ... instead.")
    elif parallel is None:
        parallel = cores() if scale == "tiny" else 1
    return Cluster(name, parallel, parameters, folder)


def _read_parameters(words: Sequence[str]) -> dict[str, Any]:
    """``key=value``: keys of ours as they are, those of submitit as ``update_parameters`` takes them; a UsageError."""
    from submitit import AutoExecutor, SlurmExecutor

    ours = {"cluster", "parallel", "time"}
    shared = AutoExecutor._valid_parameters()
    known = (ours | shared | SlurmExecutor._valid_parameters()).difference(NOT_KEYS)
    given: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in known or not text:
            raise UsageError(f"--slurm {word}: expected a value, and a key of {', '.join(sorted(known))}.")
        value = int(text) if re.fullmatch("0|[1-9][0-9]*", text) else text
        of_submitit = key if key in ours | shared else f"slurm_{key}"
        given[of_submitit] = [value] if key == "setup" else value  # lines of a script
    return given


def _check_queue(name: str) -> None:
    """Refuse a second job of a run: the jobs of a command that was stopped stay in the queue."""
    if shutil.which("squeue") is None:
        raise UsageError("--slurm: this machine has no squeue: start it on a login node, or use --commands.")
    squeue = ["squeue", "--me", "--noheader", "--array", "--format=%i", f"--name={name}"]
    queued = subprocess.run(squeue, check=True, capture_output=True, text=True).stdout.split()
    if queued:
        raise UsageError(f"--slurm: {len(queued)} jobs named {name} are queued: wait, or choose another name=...")


def minutes(limit: str) -> int:
    """A time limit in minutes; Slurm's format is minutes or [days-]hours:minutes:seconds."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+))", limit)
    days, hours, mins, seconds, alone = (int(part or 0) for part in match.groups()) if match else (0,) * 5
    if total := alone or ((days * 24 + hours) * 60 + mins + (seconds > 0)):
        return total
    raise UsageError(f"--slurm time={limit}: expected minutes or [days-]hours:minutes:seconds, as in 24:00:00.")
