"""Limits of the grading process: memory, files, and what it does with untrusted text."""

import resource
import sys
from pathlib import Path

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
