"""A queue in place of Slurm: sbatch, squeue, srun, scontrol and sacct, all this file under other names, in a directory.

One process per job runs the script of the batch file; files hold its state. ``scontrol requeue`` marks a job, which is
then run again when its script has ended.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(sys.argv[0]).parent
ENDED = ("COMPLETED", "FAILED")


def state_file(job: str) -> Path:
    return HERE / "states" / job


def write(job: str, state: str) -> None:
    (HERE / f"{job}.tmp").write_text(state)
    (HERE / f"{job}.tmp").replace(state_file(job))


def sbatch(path: str) -> None:
    text = Path(path).read_text()
    number = 100 + len(list(HERE.glob("*.sh")))
    (HERE / f"{number}.sh").write_text(text)
    array = re.search(r"--array=0-(\d+)%", text)
    jobs = [f"{number}_{index}" for index in range(int(array[1]) + 1)] if array else [str(number)]
    for job in jobs:
        write(job, "PENDING")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([sys.executable, str(HERE / "run"), job], start_new_session=True, **quiet)
    print(f"Submitted batch job {number}")


def run(job: str) -> None:
    number, _, index = job.partition("_")
    batch = HERE / f"{number}.sh"
    after = re.search(r"--dependency=afterany:(\S+)", batch.read_text())
    while after and any(state_file(other).read_text() not in ENDED for other in after[1].split(":")):
        time.sleep(0.05)
    names = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    if index:
        names |= {"SLURM_JOB_ID": f"9{number}{index}", "SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    while True:
        write(job, "RUNNING")
        code = subprocess.run(["bash", str(batch)], env=os.environ | names).returncode
        requeued = HERE / f"{job}.requeue"
        if not requeued.exists():
            return write(job, "FAILED" if code else "COMPLETED")
        requeued.unlink()
        write(job, "PENDING")


def srun(*words: str) -> None:
    """Only the options that submitit gives: --unbuffered, and files for the output."""
    words = words[1:]
    while words[0] in ("--output", "--error"):
        words = words[2:]
    os.execvp(words[0], words)


def scontrol(verb: str, job: str) -> None:
    """Also kills the script of the job, as Slurm does at once: it has to have ended before."""
    assert verb == "requeue"
    (HERE / f"{job}.requeue").touch()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.name)) == os.getpgrp() and b"train_" in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def squeue(*_: str) -> None:
    print(*(path.name for path in (HERE / "states").iterdir() if path.read_text() not in ENDED), sep="\n")


def sacct(*_: str) -> None:
    print("JobID|State|NodeList")
    for path in sorted((HERE / "states").iterdir()):
        print(f"{path.name}|{path.read_text()}|node1")


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](*sys.argv[1:])
