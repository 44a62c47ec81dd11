"""The grading process: time limit, hostile text, threads, signals, forks, restarts, and start-up from any script."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile import HOSTILE
from verdicts import CASES

from gtpo.grading import algebra, compare, equivalent, extract_answer, is_correct, last_boxed, timeouts, worker
from gtpo.grading.worker import Worker, shared_worker

ROOT = Path(worker.__file__).resolve().parents[2]


def run_python(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program that can import gtpo."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120
    )


def test_hostile_text_is_wrong_bounded_and_never_executed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "TIME_LIMIT", 1.0)  # shorter than in production, to keep the test short
    compare.decide.cache_clear()
    for text in HOSTILE:
        for gold in ("18", r"\sqrt{2}", "x^2+1", "(3,4)", r"\text{even}"):
            assert not is_correct(text, gold), text[:60]
        assert not equivalent(text, text + "+1"), text[:60]
        extract_answer(f"<answer>{text}</answer>")
        last_boxed(text)
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
def test_the_process_inherits_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SECRET"):
        monkeypatch.setenv(name, "hf_secret")
    own = Worker()
    assert own.compare("x+1", "1+x", None, 5.0)[0]
    assert own.process is not None
    inherited = Path(f"/proc/{own.process.pid}/environ").read_bytes()
    own.stop()
    assert b"secret" not in inherited
    assert {line.partition(b"=")[0].decode() for line in inherited.split(b"\0") if line} <= set(worker.ENVIRONMENT)


def test_alarms_fire_and_threads_agree() -> None:
    fired = threading.Event()
    sample = CASES[::7]
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.set())
    compare.decide.cache_clear()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with ThreadPoolExecutor(4) as pool:
            verdicts = list(pool.map(lambda case: is_correct(case[1], case[0]), sample))
        assert verdicts == [case[2] for case in sample]
        assert fired.wait(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("when", ["it starts", "it imports", "it waits", "it compares"])
def test_a_process_killed_while(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced; killed during a comparison, the next process is asked again, once."""
    own = Worker()
    kills = []
    connect = own._connect

    def kill() -> None:
        assert own.process is not None
        own.process.kill()
        own.process.wait()
        kills.append(own.process.pid)

    def connect_then_kill() -> None:
        connect()
        if not kills:
            kill()

    if when == "it starts":
        own._start()
        kill()
    elif when == "it imports":  # as by the system, out of memory
        start = own._start

        def start_then_kill() -> None:
            start()
            if not kills:
                kill()

        monkeypatch.setattr(own, "_start", start_then_kill)
    else:
        assert own.compare("x+1", "1+x", None, 5.0)[0]
        if when == "it waits":
            kill()
        else:
            monkeypatch.setattr(own, "_connect", connect_then_kill)
    calls = own.calls
    assert own.compare("x+2", "2+x", None, 5.0)[0]
    assert (len(kills), own.calls) == (1, calls + 1)
    own.stop()


def test_a_forked_child_starts_its_own_process() -> None:
    assert is_correct("x+x^5", "x(x^4+1)")
    process = shared_worker.process
    lock = shared_worker._lock
    lock.acquire()  # as another thread may hold it at the time of the fork
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for the parent's lock
        code = 1
        try:
            code = 0 if is_correct("x+x^6", "x(x^5+1)") and shared_worker.process is not process else 1
            shared_worker.stop()
        finally:
            os._exit(code)
    lock.release()
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
    pid = int(run_python("-c", code + ending).stdout)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the grading process is still running")


def test_the_grader_is_light_and_runs_a_script_once(tmp_path: Path) -> None:
    """The process imports nothing that the script has imported."""
    (tmp_path / "heavy.py").write_text("import os\nprint('imported by', os.getpid(), flush=True)\n")
    code = (
        "import os, sys, heavy, gtpo.grading, rewards\n"
        "print(gtpo.grading.is_correct('x+x^2', 'x(1+x)'), gtpo.grading.timeouts(), os.getpid(), flush=True)\n"
        "heavy = {'torch', 'transformers', 'trl', 'sympy', 'math_verify', 'evaluate'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    (tmp_path / "train.py").write_text(code)
    run = run_python("train.py", cwd=tmp_path)
    imported, verdict = run.stdout.splitlines()
    assert (verdict, run.returncode) == (f"True 0 {imported.split()[-1]}", 0), run.stderr


def test_a_process_that_cannot_start_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named; a process that is killed is started two times, and no package is named."""
    script = tmp_path / "symbolic.py"
    without = "import sys\nsys.modules['math_verify'] = None  # not installed\n" + worker.SCRIPT.read_text()
    monkeypatch.setattr(worker, "SCRIPT", script)
    killed = "import os\nos.kill(os.getpid(), 9)\n"
    late = "import time\ntime.sleep(60)\n"
    times = "killed while it started, or took over .* seconds, two times: free memory"
    packages = r"did not start \(.*math_verify.*\): install math-verify and sympy"
    for text, reason, expected in ((without, packages, 1), (killed, times, 2), (late, times, 2)):
        script.write_text(text)
        own = Worker()
        started = []
        monkeypatch.setattr(own, "_start", lambda start=own._start, started=started: started.append(start()))
        monkeypatch.setattr(worker, "START_LIMIT", 1.0 if text == late else 60.0)
        with pytest.raises(RuntimeError, match=reason):
            own.compare("x+x^8", "x(x^7+1)", None, 5.0)
        assert len(started) == expected
