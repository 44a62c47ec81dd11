"""reproduce.py: missing runs are trained and evaluated, finished ones skipped, interrupted ones resumed."""

import itertools
import subprocess
import sys
import threading
from typing import Any

import pytest

from gtpo.errors import UsageError
from gtpo.paper.matrix import experiments_of, load_matrix, runs_of
from gtpo.paper.runner import run_one
from gtpo.runs import RunDirectory

MATRIX = load_matrix()


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


def test_run_with_a_checkpoint_resumes_and_one_without_starts_again(sandbox: Any) -> None:
    resumable, failed = (
        RunDirectory(sandbox / "outputs/reproduce/tiny" / f"{name}-s1") for name in ("gtpo-g8", "grpo-g8-beta0")
    )
    resumable.checkpoint(150).mkdir(parents=True)
    (resumable.checkpoint(150) / "files.json").write_text("{}")
    failed.path.mkdir(parents=True)
    failed.config.write_text("")
    assert sandbox.reproduce("fig3", "--seeds", "1") == 0
    flags = {name: given for _, name, given in sandbox.calls()}
    assert flags["gtpo-g8-s1"] == ["--resume"] and flags["grpo-g8-beta0-s1"] == ["--overwrite"]
    assert flags["grpo-g8-beta0.04-s1"] == []


def test_one_failure_does_not_stop_the_rest(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (sandbox / "fail").write_text("gtpo-g8-s1")
    assert sandbox.reproduce("fig3", "--seeds", "1", "--jobs", "1") == 1
    assert len(sandbox.calls()) == 5
    printed = capsys.readouterr().out
    log = "outputs/reproduce/tiny/logs/gtpo-g8-s1.log"
    assert f"gtpo-g8-s1 failed with exit code 1, see {log}; the command was `python train_gtpo.py --G 8" in printed
    assert "CUDA error" in (sandbox / log).read_text()
    assert "fig3: run gtpo-g8 is missing: " in printed and "fig3.png" in printed
    (sandbox / "fail").unlink()
    assert sandbox.reproduce("fig3", "--seeds", "1") == 0
    assert [name for _, name, _ in sandbox.calls()] == ["gtpo-g8-s1"]


def test_failed_evaluation_is_reported(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (sandbox / "fail").write_text("evaluate")
    assert sandbox.reproduce("fig2", "--seeds", "1") == 1
    printed = capsys.readouterr().out
    log = "outputs/reproduce/tiny/logs/evaluate-tiny-arithmetic-last.log"
    assert (
        f"evaluate-tiny-arithmetic-last failed with exit code 1, see {log}; the command was `python evaluate" in printed
    )
    assert "CUDA error" in (sandbox / log).read_text()
    assert "fig2: run gtpo-g8 is not evaluated on arithmetic: " in printed


def test_evaluation_follows_where_the_figure_needs_it(sandbox: Any) -> None:
    assert sandbox.reproduce("fig2", "table1", "--seeds", "1", "2") == 0
    evaluated = [call for call in sandbox.calls() if call[0] == "evaluate"]
    assert sorted(evaluated) == [  # GRPO at its highest accuracy reward, the others at the end
        ["evaluate", "arithmetic", "best", 2 * 4],
        ["evaluate", "arithmetic", "last", 2 * 3],
        ["evaluate", "arithmetic_hard", "best", 2 * 4],
        ["evaluate", "arithmetic_hard", "last", 2 * 3],
    ]
    assert (sandbox / "outputs/reproduce/tiny/figures/table1.md").is_file()
    assert sandbox.reproduce("fig2", "table1", "--seeds", "1", "2") == 0
    assert sandbox.calls() == []


def test_each_gpu_has_one_run_at_a_time_and_evaluations_wait_for_theirs(sandbox: Any) -> None:
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


def test_an_evaluation_starts_before_other_runs_have_ended(sandbox: Any) -> None:
    """The runs of Llama wait until an evaluation of Qwen has started; if it waited for them, they would fail."""
    (sandbox / "wait").write_text("llama until evaluate qwen")
    argv = ["table1", "--scale", "paper", "--seeds", "1", "--only", "gtpo-qwen-gsm8k-g8", "gtpo-llama-gsm8k-g8"]
    assert sandbox.reproduce(*argv, "--gpus", "0", "1") == 0
    assert len(sandbox.spans()) == 2 + 2 * 3


def test_run_of_another_process_is_awaited(sandbox: Any) -> None:
    """Two processes of reproduce.py share the runs: the second waits and does not train again."""
    run = experiments_of(MATRIX, ["fig3"], "tiny", [1])[0]
    run.log.parent.mkdir(parents=True)
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    codes: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        thread = threading.Thread(target=lambda: codes.append(run_one(run, {})))
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive() and sandbox.calls() == []
        run.run.adapter.mkdir(parents=True)
        (run.run.adapter / "adapter_config.json").write_text("{}")
        process.communicate()
    thread.join(timeout=10)
    assert codes == [0] and sandbox.calls() == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no figure given: pick from fig1, fig2"),
        (["fig33"], "figure 'fig33' is unknown"),
        (["word", "--scale", "paper"], "word has no runs at paper scale"),
        (["fig3", "--jobs", "0"], "--jobs is 0: expected at least 1"),
        (["fig3", "--scale", "paper", "--jobs", "4"], "--jobs 4 would start 4 runs on the same GPU: name the GPUs"),
        (["fig3", "--gpus", "0", "1", "0"], "--gpus 0 1 0 names a GPU twice"),
    ],
)
def test_bad_usage_is_refused(argv: list[str], message: str, sandbox: Any) -> None:
    with pytest.raises(UsageError, match=message):
        sandbox.reproduce(*argv)
    assert sandbox.calls() == []
