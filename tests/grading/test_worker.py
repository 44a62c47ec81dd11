"""The grading process: time limit, hostile text, threads, signals, forks, restarts, and start-up from any script."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.scripts import ROOT, run_process
from hostile import HOSTILE
from verdicts import CASES

from gtpo.grading import algebra, compare, grade_text, is_correct, lenient_answer, timeouts, worker
from gtpo.grading.worker import Worker, shared_worker


@pytest.fixture
def own() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


def test_hostile_text_is_wrong_bounded_and_never_executed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "TIME_LIMIT", 0.5)  # shorter than in production, to keep the test short
    compare.decide.cache_clear()
    for text in HOSTILE:
        for gold in ("18", r"\sqrt{2}", "x^2+1", "(3,4)", r"\text{even}", text + "+1"):
            assert not is_correct(text, gold), text[:60]
        for completion in (text, f"<answer>{text}</answer>", rf"\boxed{{{text}}}"):
            lenient_answer(completion, None, "(A)")
            assert not grade_text(completion, "1.23456789").correct_leniently, text[:60]
    assert list(here.iterdir()) == []


def test_a_late_comparison_is_wrong_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "\\sin(" * 20 + "x" + ")" * 20  # each level doubles the time to parse
    compare.decide.cache_clear()
    assert is_correct("x+2x^2", "x(1+2x)")  # the process is running
    monkeypatch.setattr(algebra, "TIME_LIMIT", 0.2)
    before = timeouts()
    process = shared_worker.process
    assert not is_correct(nested, nested.replace("x", "x+x-x"))
    assert timeouts() == before + 1
    assert process is not None and process.poll() is not None  # it has ended
    monkeypatch.undo()
    assert is_correct("2x+x^2", "x(x+2)")
    assert timeouts() == before + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of another process")
def test_the_process_inherits_no_token(own: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SECRET"):
        monkeypatch.setenv(name, "hf_secret")
    own.start()
    assert own.process is not None
    assert b"secret" not in Path(f"/proc/{own.process.pid}/environ").read_bytes()


def test_threads_agree() -> None:
    """No alarm is used, which the main thread alone could set."""
    sample = CASES[::7]
    compare.decide.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda case: is_correct(case[1], case[0]), sample))
    assert verdicts == [case[2] for case in sample]


@pytest.mark.parametrize("after", ["_start", "_connect", "compare"])
def test_a_killed_process_is_replaced(after: str, own: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it imports, as by the system out of memory; before it compares, which is asked again, once; idle."""
    kills = []
    step = getattr(own, after)

    def step_then_kill(*arguments: Any) -> Any:
        found = step(*arguments)
        if own.process and not kills:
            kills.append(own.process.pid)
            own.process.kill()
            own.process.wait()
        return found

    monkeypatch.setattr(own, after, step_then_kill)
    assert own.compare("x+1", "1+x", None, 5.0)[0]
    assert own.compare("x+2", "2+x", None, 5.0)[0]
    assert (len(kills), own.calls) == (1, 2)


def test_a_forked_child_starts_its_own_process() -> None:
    assert is_correct("x+x^5", "x(x^4+1)")
    process = shared_worker.process
    with shared_worker._lock:  # as another thread may hold it at the time of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that waits for the parent's lock
            own = is_correct("x+x^6", "x(x^5+1)") and shared_worker.process is not process
            shared_worker.stop()
            os._exit(not own)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared_worker.process is process and is_correct("x+x^7", "x(x^6+1)")


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_the_process_ends_with_its_parent(ending: str) -> None:
    code = (
        "import os\n"
        "from gtpo.grading import is_correct, worker\n"
        "is_correct('x+x^2', 'x(1+x)')\n"
        "print(worker.shared_worker.process.pid, flush=True)\n"
    )
    ended = run_process([sys.executable, "-c", code + ending], code=-9 if ending else 0)
    for _ in range(200):
        try:
            os.kill(int(ended.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the grading process is still running")


def test_the_grader_runs_a_script_once(tmp_path: Path) -> None:
    code = (
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "from gtpo.grading import is_correct\n"
        "print(is_correct('x+x^2', 'x(1+x)'), flush=True)\n"
    )
    (tmp_path / "train.py").write_text(code)
    assert run_process([sys.executable, "train.py"], cwd=tmp_path).stdout == "True\n"


WITHOUT = "import sys\nsys.modules['math_verify'] = None  # not installed\n" + worker.SCRIPT.read_text()
TIMES = "killed while it started, or took over .* seconds, two times: free memory"


@pytest.mark.parametrize(
    ("text", "limit", "reason", "starts"),
    [
        (WITHOUT, 60.0, r"did not start \(.*math_verify.*\): install math-verify and sympy", 1),
        ("import os\nos.kill(os.getpid(), 9)\n", 60.0, TIMES, 2),
        ("import time\ntime.sleep(60)\n", 1.0, TIMES, 2),
    ],
    ids=["not installed", "killed", "late"],
)
def test_a_process_that_cannot_start_gives_the_reason(
    text: str,
    limit: float,
    reason: str,
    starts: int,
    own: Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing is named; a process that is killed is started two times, and no package is named."""
    script = tmp_path / "symbolic.py"
    script.write_text(text)
    monkeypatch.setattr(worker, "SCRIPT", script)
    monkeypatch.setattr(worker, "START_LIMIT", limit)
    monkeypatch.setattr(own, "_start", start := MagicMock(side_effect=own._start))
    with pytest.raises(RuntimeError, match=reason):
        own.compare("x+x^8", "x(x^7+1)", None, 5.0)
    assert start.call_count == starts
