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
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import refused
from helpers.runs import finish, held
from helpers.scripts import ROOT, user_environment

from gtpo.runs.directory import RunDirectory
from paper.matrix import Experiment, experiments_of, load_matrix, runs_of
from paper.runner import run_forked, run_one

MATRIX = load_matrix()


@pytest.mark.slow
def test_runs_are_trained_then_skipped_and_drawn(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.reproduce("fig3", "fig1", "--seeds", "4", "--jobs", "2") == 0
    calls = sandbox.calls()
    assert {name for _, name, _ in calls} == {f"{name}-s4" for name in runs_of(MATRIX, ["fig1", "fig3"], "tiny")}
    assert len(calls) == 5 and all(script == f"train_{name.partition('-')[0]}" for script, name, _ in calls)
    assert "outputs/reproduce/tiny/figures/fig3.png" in capsys.readouterr().out
    assert (sandbox / "outputs/reproduce/tiny/figures/fig1.pdf").is_file()
    assert sandbox.reproduce("fig3", "--seeds", "4") == 0
    assert sandbox.calls() == []  # all finished
    assert sandbox.reproduce("fig3", "--seeds", "4", "5") == 0
    assert {name for _, name, _ in sandbox.calls()} == {f"{name}-s5" for name in runs_of(MATRIX, ["fig3"], "tiny")}


@pytest.mark.slow
def test_one_failure_does_not_stop_the_rest(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (sandbox / "fail").write_text("gtpo-late-g8-s1")
    assert sandbox.reproduce("fig3", "--seeds", "1", "--jobs", "1") == 1
    assert len(sandbox.calls()) == 5
    printed = capsys.readouterr().out
    log = "outputs/reproduce/tiny/logs/gtpo-late-g8-s1.log"
    assert f"gtpo-late-g8-s1 failed with exit code 1, see {log}; the command was `python train_gtpo.py --" in printed
    assert "CUDA error" in (sandbox / log).read_text()
    assert "fig3: no run of gtpo-late-g8: " in printed and "fig3.png" in printed
    (sandbox / "fail").unlink()
    assert sandbox.reproduce("fig3", "--seeds", "1") == 0
    assert [name for _, name, _ in sandbox.calls()] == ["gtpo-late-g8-s1"]


@pytest.mark.slow
def test_a_gpu_has_one_run_and_evaluations_wait(sandbox: Any) -> None:
    argv = ["table1", "--scale", "paper", "--seeds", "1", "--only", "gsm8k-g8"]
    assert sandbox.reproduce(*argv, "--gpus", "3", "MIG-a", "0") == 0
    spans = sandbox.spans()
    assert len(spans) == 6 + 3 * 3  # three runs per model; per benchmark LLaMA's last and best, and Qwen
    assert {gpu for _, gpu, _, _ in spans} == {"3", "MIG-a", "0"}
    for gpu in ("3", "MIG-a", "0"):
        mine = sorted((start, end) for _, used, start, end in spans if used == gpu)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    overlap = [(a, b) for a, b in itertools.combinations(spans, 2) if a[2] < b[3] and b[2] < a[3]]
    assert overlap  # they do run at the same time
    ends = {name: end for name, _, _, end in spans}
    for name, _, start, _ in spans:
        if name.startswith("evaluate"):
            adapters = name.split()[1:]
            assert adapters and len({"qwen" in adapter for adapter in adapters}) == 1
            assert all(ends[adapter] <= start for adapter in adapters)
    compiled = [path.read_text() for path in (sandbox / "outputs/reproduce/paper").glob("*/compiled")]
    assert len(set(compiled)) == len(compiled) == 6 and "unsloth_compiled_cache/gtpo-qwen-gsm8k-g8-s1" in compiled


def test_a_long_evaluation_is_split_over_the_gpus(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """GSM8K takes four hours and a half for the base and three runs: 1,319 problems, k = 32, 0.1 s.

    The first shard fails if the second does not start beside it.
    """
    (sandbox / "wait").write_text("1/3 gsm8k last until 2/3 gsm8k last")
    argv = ["fig2", "--scale", "paper", "--seeds", "1", "--only", "llama-gsm8k"]
    assert sandbox.reproduce(*argv, "--gpus", "3", "0", "1") == 0
    ends = {name: (start, end) for name, _, start, end in sandbox.spans()}
    for at in ("last", "best"):
        shards = [name.split() for name in ends if f"gsm8k {at}" in name]
        assert sorted(words[0] for words in shards) == ["1/3", "2/3", "3/3"]
        ((*runs,),) = {tuple(words[3:]) for words in shards}
        whole = ends[" ".join([f"evaluate:gsm8k:{at}", *runs])]
        parts = [ends[" ".join(words)] for words in shards]
        assert len(runs) >= 3 and all(part[1] <= whole[0] for part in parts)
        assert all(ends[run][1] <= part[0] for run in runs for part in parts)
    assert len({gpu for name, gpu, *_ in sandbox.spans() if "gsm8k last" in name}) > 1
    assert len(list((sandbox / "outputs/reproduce/paper/logs").glob("evaluate-llama-gsm8k-last-[123]-of-3.log"))) == 3
    assert "failed" not in capsys.readouterr().out
    sandbox.calls()
    assert sandbox.reproduce(*argv, "--gpus", "3", "0") == 0 and sandbox.calls() == []


@pytest.mark.slow
@pytest.mark.parametrize("run_it", [run_one, run_forked])
def test_run_of_another_process_is_awaited(run_it: Callable[..., int], sandbox: Any) -> None:
    """Two processes of reproduce.py share the runs: the second waits and does not train again."""
    run = experiments_of(MATRIX, ["fig3"], "tiny", [1])[0]
    run.log.parent.mkdir(parents=True)
    codes: list[int] = []
    with held(run.log):
        thread = threading.Thread(target=lambda: codes.append(run_it(run, {})))
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive() and sandbox.calls() == []
        finish(run.run.adapter)
    thread.join(timeout=10)
    assert codes == [0] and sandbox.calls() == []


@pytest.mark.slow
def test_a_killed_fork_fails_alone(sandbox: Any) -> None:
    """Its exit code is the signal; the log is locked until then."""
    killed, other = experiments_of(MATRIX, ["fig3"], "tiny", [1])[:2]
    script = sandbox / killed.argv[0]
    stops = f"if {killed.label!r} in str(sys.argv):\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
    script.write_text("import os, sys, time\n" + stops + script.read_text())
    codes: dict[str, int] = {}
    threads = [
        threading.Thread(target=lambda run=run: codes.update({run.label: run_forked(run, {})}))
        for run in (killed, other)
    ]
    for thread in threads:
        thread.start()
    threads[1].join(timeout=20)
    while not killed.log.exists() or not (text := killed.log.read_text()):
        time.sleep(0.02)
    with killed.log.open() as log, pytest.raises(BlockingIOError):
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(int(text), signal.SIGKILL)
    threads[0].join(timeout=20)
    assert codes == {killed.label: -signal.SIGKILL, other.label: 0}
    with killed.log.open() as log:
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
            run=RunDirectory(run),
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
    times = {"step_time", "tokens_per_second"}
    rows, forked = (
        [{name: value for name, value in row.items() if name not in times} for row in work.run.read_metrics()]
        for work in (own, fork)
    )
    assert len(rows) == 2 and rows == forked
    weights, forked_weights = ((work.run.adapter / "adapter_model.safetensors").read_bytes() for work in (own, fork))
    assert weights == forked_weights
    assert "Run finished" in own.log.read_text() and "Run finished" in fork.log.read_text()


def test_another_directory_than_the_repository_is_refused_at_once(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with refused(rf"^the working directory has no evaluate\.py: first `cd '{re.escape(str(ROOT))}'`"):
        sandbox.reproduce("fig3", "--seeds", "1", "--jobs", "1")
    assert not list(Path().iterdir())
