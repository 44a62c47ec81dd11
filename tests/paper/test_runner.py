"""reproduce.py: missing runs are trained and evaluated, finished ones skipped, interrupted ones resumed."""

import fcntl
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.refusals import refused
from helpers.runs import finish, held
from helpers.scripts import ROOT, user_environment
from pandas import DataFrame

from paper import runner
from paper.matrix import Experiment, experiments_of, load_matrix, runs_of
from paper.runner import run_all, run_forked, run_one, slots_of, threads_of

MATRIX = load_matrix()


@dataclass(frozen=True)
class Job:
    """A run or evaluation without a script."""

    label: str
    experiments: tuple[Any, ...] = ()
    is_finished: bool = False

    @property
    def log(self) -> Path:
        return Path(f"{self.label}.log")

    @property
    def argv(self) -> tuple[str, ...]:
        return ("train.py", f"--name={self.label} of mine")


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_failure_is_named_and_stops_nothing(gpus: int, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three runs fail, the fourth is finished; the evaluation of the first two comes after both.

    With two GPUs two runs at a time, each on one of them and in a process of its own; else a fork with its threads.
    """
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("paper.runner.cores", lambda: 8)
    monkeypatch.setattr("sys.platform", "linux")
    works = [Job("one"), Job("two"), Job("three"), Job("done", (), True)]
    first, second = works[:2]
    evaluation = Job("scores", (first, second))
    both = threading.Barrier(2, timeout=60)
    begun: list[tuple[str, str, dict[str, str], str]] = []

    def made_by(kind: str, work: Any, environment: dict[str, str]) -> int:
        begun.append((kind, work.label, environment, os.environ["OMP_NUM_THREADS"]))
        if gpus and work in (first, second):
            both.wait()  # the other one runs too
        return {"two": 3, "three": -9}.get(work.label, 0)

    for kind in ("run_one", "run_forked"):
        monkeypatch.setattr(f"paper.runner.{kind}", partial(made_by, kind))
    slots = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "01"] if gpus else [{}, {}]
    failed = run_all(works, [evaluation], slots)
    command = "the command was `python train.py '--name={} of mine'`"
    expected = [f"{name} failed with exit code {code}, see {name}.log; {command.format(name)}"
                for name, code in (("two", 3), ("three", -9))]  # fmt: skip
    assert sorted(failed) == sorted(expected)
    labels = [label for _, label, _, _ in begun]
    assert sorted(labels) == ["one", "scores", "three", "two"]
    assert labels.index("scores") > max(labels.index("one"), labels.index("two"))
    assert {kind for kind, *_ in begun} == {"run_one" if gpus else "run_forked"}
    assert {threads for *_, threads in begun} == {"4"} and os.environ["GOMP_SPINCOUNT"] == "3000"
    assert sorted(environment.get("CUDA_VISIBLE_DEVICES", "") for _, label, environment, _ in begun
                  if label in ("one", "two")) == (["0", "1"] if gpus else ["", ""])  # fmt: skip


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (3, 3), (-9, -9), (None, 0)])
def test_the_exit_code_of_a_fork(ended: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def process(target: Any, args: Any) -> Any:
        calls.append((target, args[0], args[1]["ONLY_HERE"], args[1]["OF_BOTH"]))
        started = SimpleNamespace(exitcode=ended, sentinel="end")
        started.start, started.join = (lambda name=name: calls.append(name) for name in ("start", "join"))
        return started

    monkeypatch.setattr("paper.runner._forks", SimpleNamespace(Process=process))
    monkeypatch.setattr("paper.runner.connection", SimpleNamespace(wait=calls.append))
    monkeypatch.setenv("OF_BOTH", "here")
    monkeypatch.setenv("ONLY_HERE", "here")
    assert run_forked(Job("one"), {"OF_BOTH": "of the slot"}) == code
    [given, *rest] = calls
    assert given == (runner._run_script, Job("one"), "here", "of the slot") and rest == ["start", ["end"], "join"]


def test_how_many_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paper.runner.cores", lambda: 3)
    assert slots_of("tiny", None, None) == [{}] * 3 and slots_of("tiny", [], 2) == [{}] * 2
    assert slots_of("paper", None, None) == slots_of("paper", None, 1) == [{}]
    assert slots_of("paper", ["3", "1"], None) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of(jobs)["OMP_NUM_THREADS"] for jobs in (1, 2, 9)] == ["3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_of(2) == {"OMP_NUM_THREADS": "5"}


@pytest.mark.slow
def test_a_failure_stops_no_other_run_and_is_made_again(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What is finished is not trained again."""

    def names(seed: int) -> list[str]:
        return [f"{name}-s{seed}" for name in sorted(runs_of(MATRIX, ["fig3"], "tiny"))]

    (sandbox / "fail").write_text("gtpo-late-g8-s4")
    assert sandbox.reproduce("fig3", "--seeds", "4", "--jobs", "2") == 1
    assert sorted(sandbox.calls()) == [[f"train_{name.partition('-')[0]}", name, []] for name in names(4)]
    printed = capsys.readouterr().out
    log = "outputs/reproduce/tiny/logs/gtpo-late-g8-s4.log"
    assert f"gtpo-late-g8-s4 failed with exit code 1, see {log}; the command was `python train_gtpo.py --" in printed
    assert "CUDA error" in (sandbox / log).read_text()
    assert "fig3: no run of gtpo-late-g8: " in printed and "outputs/reproduce/tiny/figures/fig3.png" in printed
    (sandbox / "fail").unlink()
    for seeds, expected in (["4"], ["gtpo-late-g8-s4"]), (["4"], []), (["4", "5"], names(5)):
        assert sandbox.reproduce("fig3", "--seeds", *seeds) == 0
        assert sorted(name for _, name, _ in sandbox.calls()) == expected


def test_gpus_share_the_runs(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run fails if no other starts beside it."""
    (sandbox / "wait").write_text("2")
    argv = ["fig2", "--scale", "paper", "--seeds", "1", "--only", "gsm8k", "--gpus", "3", "MIG-a", "0"]
    assert sandbox.reproduce(*argv) == 0
    spans = sandbox.spans()
    assert {gpu for _, gpu, _, _ in spans} == {"3", "MIG-a", "0"}
    overlap = [(a, b) for a, b in itertools.combinations(spans, 2) if a[2] < b[3] and b[2] < a[3]]
    assert overlap and all(a[1] != b[1] for a, b in overlap)  # at the same time, on different GPUs
    times = {name: (start, end) for name, _, start, end in spans}
    runs = {name for name in times if " " not in name}
    for name in times.keys() - runs:  # an evaluation
        evaluated = runs.intersection(name.split())
        assert evaluated and len({"qwen" in run for run in evaluated}) == 1
        assert all(times[run][1] <= times[name][0] for run in evaluated)
    compiled = {path.read_text() for path in (sandbox / "outputs/reproduce/paper").glob("*/compiled")}
    assert len(compiled) == len(runs) == 14 and "unsloth_compiled_cache/gtpo-qwen-gsm8k-g8-s1" in compiled
    assert "failed" not in capsys.readouterr().out
    sandbox.calls()
    assert sandbox.reproduce(*argv) == 0 and sandbox.calls() == []


@pytest.mark.slow
@pytest.mark.parametrize("run_it", [run_one, run_forked])
def test_run_of_another_process_is_awaited(run_it: Callable[..., int], sandbox: Any) -> None:
    """Two processes of reproduce.py share the runs: the second waits and does not train again."""
    run = experiments_of(MATRIX, ["fig3"], "tiny", [1])[0]
    run.log.parent.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with held(run.log):
            code = pool.submit(run_it, run, {})
            with pytest.raises(TimeoutError):
                code.result(timeout=0.3)
            finish(run.run.adapter)
        assert code.result(timeout=10) == 0 and sandbox.calls() == []


@pytest.mark.slow
def test_a_killed_fork_fails_alone(sandbox: Any) -> None:
    """Its exit code is the signal; the log is locked until then."""
    killed, other = experiments_of(MATRIX, ["fig3"], "tiny", [1])[:2]
    script = sandbox / killed.argv[0]
    stops = f"if {killed.label!r} in str(sys.argv):\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
    script.write_text("import os, sys, time\n" + stops + script.read_text())
    with ThreadPoolExecutor() as pool:
        code, other_code = (pool.submit(run_forked, run, {}) for run in (killed, other))
        assert other_code.result(timeout=20) == 0
        while not killed.log.exists() or not (process := killed.log.read_text()):
            time.sleep(0.02)
        with killed.log.open() as log:
            with pytest.raises(BlockingIOError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.kill(int(process), signal.SIGKILL)
            assert code.result(timeout=20) == -signal.SIGKILL
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


DRIVER = """
import pickle, sys
from paper.runner import run_all
if __name__ == "__main__":
    assert run_all([pickle.load(sys.stdin.buffer)], [], [{}]) == []
"""


@pytest.mark.slow
def test_a_fork_trains_as_a_process_of_its_own(
    tiny: Path, no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical: metrics but for times, and weights."""
    monkeypatch.chdir(ROOT)
    flags = "--dataset arithmetic --max_steps 2 --G 4 --prompts_per_step 1 --max_completion_length 16 --report_to none"
    own, fork = (
        Experiment(
            *(run.name, 1, str(tiny)),
            argv=("train_gtpo.py", "--model", str(tiny), *flags.split(), "--output_dir", str(run)),
            directory=run,
            log=run.with_suffix(".log"),
            cost=0.0,
        )
        for run in (tmp_path / "own", tmp_path / "fork")
    )
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "driver.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as driver:
        assert driver.stdin
        driver.stdin.write(pickle.dumps(fork))
        driver.stdin.close()
        assert run_one(own, environment) == 0
    assert driver.returncode == 0
    times = ["step_time", "tokens_per_second"]
    rows, forked = (DataFrame(work.run.read_metrics()).drop(columns=times) for work in (own, fork))
    assert len(rows) == 2 and rows.equals(forked)
    weights, forked_weights = ((work.run.adapter / "adapter_model.safetensors").read_bytes() for work in (own, fork))
    assert weights == forked_weights
    assert "Run finished" in own.log.read_text() and "Run finished" in fork.log.read_text()


def test_another_directory_than_the_repository_is_refused(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox / "elsewhere").mkdir()
    monkeypatch.chdir(sandbox / "elsewhere")
    with refused(rf"^the working directory has no evaluate\.py: first `cd '{re.escape(str(ROOT))}'`"):
        sandbox.reproduce("fig3", "--seeds", "1", "--jobs", "1")
    assert not list(Path().iterdir())
