"""Limits of the grading process: memory, files, and what it does with untrusted text."""

import resource
import sys
from pathlib import Path

import pytest
from helpers.scripts import run_process

from gtpo.grading import algebra, is_correct, symbolic, worker
from gtpo.grading.worker import ComparisonFailed, Worker, shared_worker

LIMITED = """
import resource, sys
sys.path[:0] = PATHS
import child, symbolic
child.limit_resources(symbolic.MEMORY_LIMIT)
for mode in ("w", "a"):
    try:
        with open("new" if mode == "w" else "existing", mode) as file:
            file.write("text")
    except OSError:
        continue
    print("could write with mode", mode)
try:
    bytes(symbolic.MEMORY_LIMIT)
    print("could allocate")
except MemoryError:
    pass
assert symbolic.is_same(r"\\\\sqrt{8}", r"2\\\\sqrt{2}", None)
print("still compares")
"""


def test_files_cannot_be_written_and_memory_is_limited(tmp_path: Path) -> None:
    (tmp_path / "existing").write_text("kept")
    code = f"PATHS = {[str(worker.SCRIPT.parent), *sys.path]!r}\n" + LIMITED
    run = run_process([sys.executable, "-I", "-c", code], cwd=tmp_path)
    assert run.stdout.splitlines() == ["still compares"], run.stderr
    assert (tmp_path / "existing").read_text() == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits of another process")
def test_the_running_process_has_the_limits_and_outlasts_a_comparison() -> None:
    assert is_correct("x+x^9", "x(x^8+1)")
    assert shared_worker.process is not None
    expected = {resource.RLIMIT_AS: symbolic.MEMORY_LIMIT, resource.RLIMIT_FSIZE: 0}
    for name, limit in expected.items():
        assert resource.prlimit(shared_worker.process.pid, name) == (limit, limit)
    assert symbolic.ORPHAN_LIMIT > algebra.TIME_LIMIT


def test_a_comparison_that_exceeds_the_memory_limit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = worker.SCRIPT.read_text()
    greedy = tmp_path / "symbolic.py"
    greedy.write_text(source.replace("else is_same(a, b, tolerance)", "else bool(bytes(MEMORY_LIMIT))"))
    assert greedy.read_text() != source
    monkeypatch.setattr(worker, "SCRIPT", greedy)
    own = Worker()
    with pytest.raises(ComparisonFailed):
        own.compare("x+1", "1+x", None, 5.0)
    assert own.calls == 1
    monkeypatch.undo()
    own.stop()
    own = Worker()
    assert own.compare("x+1", "1+x", None, 5.0)[0]
    own.stop()
