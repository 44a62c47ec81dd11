"""Jobs of submitit: its local executor with kills, its Slurm executor with a queue in place of Slurm, the options."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import submitit
from helpers.refusals import refused
from helpers.scripts import ROOT

from gtpo.runs.directory import RunDirectory
from paper import slurm as module
from paper.slurm import Cluster, Job, minutes, read_cluster, run_jobs

STEPS = 12
TRAIN = """
import hashlib, json, pathlib, random, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = pathlib.Path(flags["--output_dir"])
with open("starts", "a") as file:
    file.write(run.name + "\\n")
received = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: received.append(number))
steps, value = [], random.Random(run.name).random()
if "--resume" in flags:
    checkpoints = run.glob("checkpoint-*/files.json")
    step = max(int(path.parent.name.partition("-")[2]) for path in checkpoints)
    steps = (run / "metrics.jsonl").read_text().splitlines()[:step]
    value = json.loads(steps[-1])["accuracy"]
run.mkdir(parents=True, exist_ok=True)
for step in range(len(steps) + 1, STEPS + 1):
    time.sleep(0.05)
    while step == 6 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    value = random.Random(value).random()
    steps.append(json.dumps({"step": step, "accuracy": value, "formatting": 1.0, "entropy": 0.1}))
    (run / "metrics.jsonl").write_text("\\n".join(steps) + "\\n")
    with open("steps", "a") as file:
        file.write(f"{run.name} {step}\\n")
    time.sleep(1.0 if received else 0.0)  # a signal comes early in a long step
    if received or step % 4 == 0:
        checkpoint = run / f"checkpoint-{step}"
        checkpoint.mkdir(exist_ok=True)
        names = ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
        for name in names:
            (checkpoint / name).write_text("")
        (checkpoint / "files.json").write_text(json.dumps(dict.fromkeys(names, hashlib.sha256(b"").hexdigest())))
    if received:
        sys.exit(128 + received[0])
for name in ("adapter", "best"):
    (run / name).mkdir()
    (run / name / "adapter_config.json").write_text("{}")
""".replace("STEPS", str(STEPS))


@dataclass(frozen=True)
class Made:
    """A run or evaluation without a script."""

    label: str
    experiments: tuple[Any, ...] = ()
    is_finished: bool = False
    log = Path("a.log")
    argv = ("train.py",)


@pytest.mark.parametrize("name", ["slurm", "local"])
def test_what_is_missing_is_submitted_and_each_failure_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array waits for the runs that it needs, but for the finished one; on this machine two jobs at a time."""
    works = [Made(each) for each in ("killed", "raises", "fails", "good")]
    done = Made("done", (), True)
    killed, raises, fails, good = works
    scores = [Made("scores", (killed, done)), Made("others", (killed, done)), Made("all", tuple(works))]
    submitted: list[tuple[list[str], list[str]]] = []
    running: list[Any] = []

    def submit(cluster: Cluster, of_array: Any, after: Any = ()) -> dict[Any, Any]:
        submitted.append(([work.label for work in of_array], [*after]))
        jobs = {}
        for work in of_array:
            job = SimpleNamespace(job_id=f"7_{work.label}", polls=0)
            result = tmp_path / work.label
            if work is not killed:
                result.touch()
            job.paths = SimpleNamespace(result_pickle=result)
            job.exception = lambda work=work: RuntimeError(trace) if work is raises else None
            job.result = lambda work=work: 4 if work is fails else 0
            jobs[work] = job
            running.append(job)
        most = 2 if name == "local" else 9
        assert sum(not is_done(job) for job in running) <= most

        def done_later(job: Any) -> bool:
            job.polls += 1
            return is_done(job)

        for job in jobs.values():
            job.done = partial(done_later, job)
        return jobs

    def is_done(job: Any) -> bool:
        return job.polls > 2

    trace = "Traceback:\n  File x\nValueError: of mine\nthe end"
    slept: list[float] = []
    monkeypatch.setattr(Cluster, "submit", submit)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    found = run_jobs([killed, raises, done, fails, good, *scores], Cluster(name, 2, {}, tmp_path))
    assert found == [
        "killed was killed in job 7_killed, and the same command resumes it, see a.log; the command was `python "
        "train.py`",
        "raises failed in job 7_raises (ValueError: of mine), see a.log; the command was `python train.py`",
        "fails failed with exit code 4, see a.log; the command was `python train.py`",
    ]
    assert {*slept} == {10 if name == "slurm" else 0.1}
    ids = [f"7_{work.label}" for work in works]
    if name == "slurm":
        of_runs = [work.label for work in works]
        assert submitted == [(of_runs, []), (["scores", "others"], ids[:1]), (["all"], ids)]
    else:
        assert submitted == [([work.label], []) for work in (*works, *scores)]


@pytest.mark.parametrize(("code", "waits"), [(0, False), (1, False), (-10, False), (-12, True), (143, True)])
def test_a_job_that_was_stopped_waits_for_its_end(code: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its last exit code would be taken for a failure; what is requeued is the same work."""
    slept: list[float] = []
    given: list[Any] = []
    sent: list[int] = []

    def run_one(work: Any, environment: Any, started: Any) -> int:
        given.append((work.label, environment))
        started(SimpleNamespace(send_signal=sent.append, pid=2**22 + 1))  # no process has it
        return code

    monkeypatch.setattr(module, "run_one", run_one)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr("paper.runner.cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(Made("one"), 3)
    assert job() == code and slept == [120] * waits
    assert given == [("one", {"OMP_NUM_THREADS": "2"})]
    again = job.checkpoint().function
    assert sent == [signal.SIGUSR2] and (again.work, again.share, again.process) == (Made("one"), 3, None)
    assert Job(Made("two"), 1).checkpoint().function.work == Made("two")  # before its script


@pytest.fixture
def slow(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sandbox in which a run takes a second, writes checkpoints, and stops on a signal as the real scripts do."""
    for method in ("sft", "grpo", "gtpo"):
        (sandbox / f"train_{method}.py").write_text(TRAIN)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a user is in the root of the clone
    return sandbox


def check_runs(sandbox: Any, *names: str) -> None:
    """Every run is complete, with the metrics of an undisturbed one, and evaluated."""
    root = sandbox / "outputs/reproduce/tiny"
    for name in names:
        assert RunDirectory(root / name).is_finished
        rows = RunDirectory(root / name).read_metrics()
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
        value = random.Random(name).random()
        for row in rows:
            value = random.Random(value).random()
            assert row["accuracy"] == value
        assert (root / "evaluation" / f"reproduce-tiny-{name}" / "arithmetic.json").is_file()


def steps_of(sandbox: Any) -> list[str]:
    """Run and step, of every step that was made."""
    path = sandbox / "steps"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def process(sandbox: Any, *words: str) -> psutil.Process:
    """The process in the sandbox with these words in its command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(sandbox.path) and all(word in " ".join(process.cmdline()) for word in words):
                found.append(process)
    [process] = found
    return process


@pytest.mark.slow
def test_the_same_command_resumes_a_killed_job(slow: Any, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fig2", "--seeds", "1", "--only", "gtpo-g8", "--slurm", "cluster=local"]
    (slow / "hold").touch()
    with ThreadPoolExecutor() as pool:
        code = pool.submit(slow.reproduce, *argv)
        wait_for(lambda: "gtpo-g8-s1 5" in steps_of(slow))
        job = process(slow, "submitit.local._local")
        for each in [*job.children(recursive=True), job]:
            each.kill()
        (slow / "hold").unlink()
        assert code.result(timeout=60) == 1
    assert "gtpo-g8-s1 was killed in job " in capsys.readouterr().out
    assert slow.reproduce(*argv) == 0
    check_runs(slow, "gtpo-g8-s1")


@pytest.fixture
def slurm(slow: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a queue in place of Slurm, first in PATH."""
    directory = slow / "slurm"
    (directory / "states").mkdir(parents=True)
    for name in ("sbatch", "squeue", "srun", "scontrol", "sacct", "run"):
        (directory / name).write_text(f"#!{sys.executable} -IS\n" + (Path(__file__).parent / "slurm.py").read_text())
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "POLL_SECONDS", {"slurm": 0.1})
    monkeypatch.setattr(submitit.SlurmJob.watcher, "_delay_s", 0)
    return directory


@pytest.mark.slow
def test_jobs_of_slurm(slow: Any, slurm: Path) -> None:
    """Two runs are an array, and their evaluation waits for it; one is preempted twice: Slurm signals its whole step.

    The first time the script ends before the signal reaches submitit's process, the second time the script has it last.
    """
    figure = ["fig2", "--seeds", "1", "--only", "gtpo-g"]
    cluster = ["--slurm", "partition=long", "time=2-00:30:00", "parallel=2", "gres=gpu:1"]
    with ThreadPoolExecutor() as pool:
        code = pool.submit(slow.reproduce, *figure, *cluster)
        for step in (4, 8):
            wait_for(lambda step=step: f"gtpo-g12-s1 {step}" in steps_of(slow))
            script = process(slow, "train_gtpo.py", "gtpo-g12-s1")
            job = script.parent()
            if step == 4:
                script.send_signal(signal.SIGUSR2)
                script.wait(timeout=30)
                time.sleep(0.3)
            job.send_signal(signal.SIGUSR2)
        assert code.result(timeout=60) == 0
    check_runs(slow, "gtpo-g8-s1", "gtpo-g12-s1")
    assert len({*steps_of(slow)}) == len(steps_of(slow)) == 2 * STEPS
    assert sorted((slow / "starts").read_text().split()) == ["gtpo-g12-s1"] * 3 + ["gtpo-g8-s1"]
    training, evaluation = (path.read_text() for path in sorted(slurm.glob("*.sh")))
    for line in ("array=0-1%2", "partition=long", "time=2910", "gres=gpu:1", "signal=USR2@300", "open-mode=append"):
        assert f"#SBATCH --{line}\n" in training, line
    assert "#SBATCH --dependency=afterany:100_0:100_1\n" in evaluation and "--array" not in evaluation
    states = (slurm / "states").iterdir
    wait_for(lambda: {path.read_text() for path in states()} == {"COMPLETED"})  # the job ends after its script
    assert slow.reproduce(*figure, *cluster) == 0 and len(list(slurm.glob("*.sh"))) == 2  # nothing is left


def test_a_second_command_is_refused_while_jobs_are_queued(slow: Any, slurm: Path) -> None:
    for job, state in (("100_0", "RUNNING"), ("100_1", "PENDING"), ("99", "COMPLETED")):
        (slurm / "states" / job).write_text(state)
    with refused("2 jobs named gtpo"):
        slow.reproduce("fig2", "--seeds", "1", "--slurm", "partition=long")
    assert not list(slurm.glob("*.sh"))


def test_the_options_of_slurm(slurm: Path, tmp_path: Path) -> None:
    words = ["partition=gpu", "time=90", "parallel=16", "cpus_per_task=8", "account=00123"]
    cluster = read_cluster([*words, "setup=module load cuda"], "paper", tmp_path)
    assert (cluster.name, cluster.parallel) == ("slurm", 16)
    assert cluster.parameters == {
        "name": "gtpo",
        "timeout_min": 90,
        "cpus_per_task": 8,
        "gpus_per_node": 1,
        "slurm_partition": "gpu",
        "slurm_account": "00123",
        "slurm_setup": ["module load cuda"],
        "slurm_signal_delay_s": 300,
    }
    assert "gpus_per_node" not in read_cluster(["gres=gpu:a100:1"], "paper", tmp_path).parameters
    assert read_cluster(["cluster=local", "parallel=3"], "tiny", tmp_path).parallel == 3


@pytest.mark.parametrize(("limit", "expected"), [("90", 90), ("2-00:30:00", 2910), ("00:00:01", 1)])
def test_time_limits(limit: str, expected: int) -> None:
    assert minutes(limit) == expected


@pytest.mark.parametrize(
    "words",
    [
        *("gpu", "partition=", "partiton=gpu", "time=2h", "time=0"),
        *("nodes=2", "gpus_per_node=2", "array_parallelism=4", "cluster=local parallel=2"),
    ],
)
def test_invalid_options_are_refused(words: str, slurm: Path, tmp_path: Path) -> None:
    with refused(f"--slurm {words.split('=')[0]}"):
        read_cluster(words.split(), "paper", tmp_path)


def test_a_machine_without_slurm_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    with refused("--slurm: this machine has no squeue: start it on a login node, or use --commands"):
        read_cluster(["partition=gpu"], "tiny", here)
