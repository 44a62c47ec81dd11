"""Limits of the grading process: memory, files, and what it does with untrusted text."""

import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gtpo.grading import algebra, is_correct, symbolic, worker
from gtpo.grading.worker import Worker, shared_worker


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits of another process")
def test_the_running_process_has_its_limits() -> None:
    assert is_correct("x+x^9", "x(x^8+1)")
    assert shared_worker.process is not None
    for name, limit in ((resource.RLIMIT_AS, symbolic.MEMORY_LIMIT), (resource.RLIMIT_FSIZE, 0)):
        assert resource.prlimit(shared_worker.process.pid, name) == (limit, limit)
    assert symbolic.ORPHAN_LIMIT > algebra.TIME_LIMIT


def test_a_comparison_that_exceeds_the_memory_limit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = worker.SCRIPT.read_text()
    greedy = tmp_path / "symbolic.py"
    greedy.write_text(source.replace("else is_same(a, b, tolerance)", "else bool(bytes(MEMORY_LIMIT))"))
    assert greedy.read_text() != source
    monkeypatch.setattr(worker, "SCRIPT", greedy)
    own = Worker()
    assert own.compare("x+1", "1+x", None, 5.0)[0] is None
    own.stop()


@pytest.mark.parametrize("end", [EOFError, MemoryError])
def test_the_process_answers_until_its_parent_closes(end: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends without a traceback, and at every request its time begins anew."""
    requests = iter([["2", "x", None, False], ["3", "y", "0.1", True]])
    sent: list[bytes] = []
    alarms: list[int] = []
    given: list[tuple[str, ...]] = []

    def receive() -> bytes:
        for request in requests:
            return json.dumps(request).encode()
        raise end

    connection = SimpleNamespace(recv_bytes=receive, send_bytes=sent.append)
    monkeypatch.setattr(symbolic, "Connection", lambda number: {3: connection}[number])
    monkeypatch.setattr(symbolic, "limit_resources", lambda: None)
    monkeypatch.setattr(symbolic, "prepare", lambda: None)
    monkeypatch.setattr(symbolic, "reply", lambda *request: given.append(request) or request[0].encode())
    monkeypatch.setattr(symbolic.signal, "alarm", alarms.append)
    monkeypatch.setattr("sys.argv", ["symbolic.py", "3", "one", "two"])
    monkeypatch.setattr("sys.path", ["here"])
    symbolic.main()
    assert sent == [b"ready", b"2", b"3"] and sys.path == ["here", "one", "two"]
    assert given == [("2", "x", None, False), ("3", "y", "0.1", True)]
    assert alarms == [symbolic.ORPHAN_LIMIT, 0] * 2


@pytest.mark.parametrize(("alone", "name"), [(False, "is_same"), (True, "math_verify_accepts")])
def test_what_sympy_cannot_handle_is_not_equal(alone: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or the other decides; without memory the process ends, and the parent starts another."""
    replies: list[object] = [True, False, RecursionError("deep"), MemoryError()]

    def decide(*_: object) -> object:
        if isinstance(reply := replies.pop(0), BaseException):
            raise reply
        return reply

    for each in ("is_same", "math_verify_accepts"):
        monkeypatch.setattr(symbolic, each, decide if each == name else None)
    assert [symbolic.reply("1", "2", None, alone) for _ in range(3)] == [b"1", b"0", b"0"]
    with pytest.raises(MemoryError):
        symbolic.reply("1", "2", None, alone)
