"""A script that is killed, or whose disk is full, at a file operation recovers: a sample (tests/kill.py tries all)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.file_operations import Operation, build_library, choose, read_log
from helpers.recovery import Scenario, build_small_model
from helpers.scripts import ScriptServer

pytestmark = pytest.mark.slow

SAMPLE = (  # scenario, method, kills, full disks
    ("start", "gtpo", 2, 2),
    ("overwrite", "sft", 2, 0),
    ("rotation", "grpo", 1, 0),
    ("resume", "sft", 1, 0),
    ("evaluation", "gtpo", 1, 1),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_library(tmp_path_factory.mktemp("library"))
    return built or pytest.skip("no C compiler")


@pytest.fixture(scope="module")
def servers(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ScriptServer]]:
    servers = [ScriptServer(tmp_path_factory.mktemp("logs"), library, hash_seed=seed) for seed in (1, 2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_model(tmp_path_factory.mktemp("model"))


def final_path(path: str) -> str:
    """Where a file ends that is written below ``adapter.tmp/`` or, by safetensors, as ``.tmpXXXXXX``."""
    return re.sub(r"/\.tmp\w{6}$", "/adapter_model.safetensors", path.replace(".tmp/", "/"))


@pytest.mark.parametrize(("name", "method", "kills", "full"), SAMPLE, ids=[f"{row[1]}-{row[0]}" for row in SAMPLE])
def test_recovery(
    name: str, method: str, kills: int, full: int, servers: list[ScriptServer], model: Path, tmp_path: Path
) -> None:
    scenario = Scenario(name, method, servers, model, tmp_path)
    assert scenario.operations
    if name == "start":  # every file was written by operations that were counted
        paths = {final_path(operation.path) for operation in scenario.operations}
        assert scenario.expected.keys() <= paths
    for fault, number in (("kill", kills), ("full", full)):
        for at in choose(scenario.operations, fault, number):
            point = scenario.try_point(fault, at)
            assert not point.problem, (fault, point)


# The library itself, on a few lines of Python


def run_python(library: Path, directory: Path, kind: str, at: int, code: str) -> tuple[int, list[Operation]]:
    watched, log = directory / "watched", directory / "log"
    watched.mkdir()
    (watched / "kept").write_text("kept")
    begin = f"import ctypes, os, sys\nctypes.CDLL(None).start_counting({bytes(watched)!r}, ord('{kind}'), {at}, "
    code = f"{begin}{bytes(log)!r})\nos.chdir({str(watched)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], env={"LD_PRELOAD": str(library)}, capture_output=True)
    return done.returncode, read_log(log)


CODE = """
import shutil, subprocess
open("kept").read()
os.makedirs("a/b", exist_ok=True)
with open("a/b/file", "wb", buffering=0) as file:
    file.write(b"0123456789")
os.makedirs("a/b", exist_ok=True)
os.replace("a/b/file", "renamed")
subprocess.run(["touch", "from a child"])
open(os.path.abspath("../elsewhere"), "w").write("x")
shutil.copyfile("renamed", "copy")
shutil.rmtree("a")
if os.path.exists("kept"): os.unlink("kept")
"""
OPERATIONS = [
    ("mkdir", "a"),
    ("mkdir", "a/b"),
    ("open", "a/b/file"),
    ("write", "a/b/file"),
    ("rename", "renamed"),
    ("open", "copy"),
    ("write", "copy"),
    ("write", "copy"),  # sendfile, until it returns 0
    ("rmdir", "a/b"),
    ("rmdir", "a"),
    ("unlink", "kept"),
]


def test_operations_that_change_something_are_counted(library: Path, tmp_path: Path) -> None:
    code, operations = run_python(library, tmp_path, "-", 0, CODE)
    assert code == 0
    found = [(name, path) for _, name, path in operations]
    assert found == OPERATIONS
    assert [operation.number for operation in operations] == list(range(1, len(OPERATIONS) + 1))


def test_a_kill_tears_the_write(library: Path, tmp_path: Path) -> None:
    code, operations = run_python(library, tmp_path, "k", 4, CODE)
    assert code == -9 and len(operations) == 4
    assert (tmp_path / "watched/a/b/file").read_text() == "01234"


def test_a_kill_precedes_any_other_operation(library: Path, tmp_path: Path) -> None:
    code, _ = run_python(library, tmp_path, "k", 11, CODE)
    assert code == -9
    assert (tmp_path / "watched/kept").is_file() and not (tmp_path / "watched/a").exists()


def test_on_a_full_disk_files_can_be_truncated_and_removed_but_not_grow(library: Path, tmp_path: Path) -> None:
    code = """
import errno
file = open("file", "wb", buffering=0)
assert file.write(b"0123456789") == 5
def refused(call):
    try:
        call()
    except OSError as error:
        return error.errno == errno.ENOSPC
assert refused(lambda: file.write(b"0"))
assert refused(lambda: open("another", "w"))
assert refused(lambda: os.mkdir("directory"))
assert not refused(lambda: open("kept", "w"))
os.rename("file", "renamed")
os.unlink("kept")
"""
    code_, operations = run_python(library, tmp_path, "f", 2, code)
    assert code_ == 0 and len(operations) == 8
    assert {path.name for path in (tmp_path / "watched").iterdir()} == {"renamed"}


def test_choose_keeps_the_ends_and_the_middle_of_a_series_of_writes() -> None:
    writes = [Operation(number, "write", "a") for number in range(2, 9)]
    operations = [Operation(1, "open", "a"), *writes, Operation(9, "rename", "b"), Operation(10, "write", "b")]
    assert choose(operations, "kill") == [1, 2, 5, 8, 9, 10]
    assert choose(operations, "full") == [1, 2, 5, 8, 10]
    assert len(set(choose(operations, "kill", 3))) == 3
    assert choose(operations, "kill", 3, seed=1) == choose(operations, "kill", 3, seed=1)


def test_commands_run_under_the_hash_seeds_in_turn(servers: list[ScriptServer], tmp_path: Path) -> None:
    (script := tmp_path / "order.py").write_text("print(list({'q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj'}))")
    scenario = Scenario("start", "gtpo", servers, tmp_path, tmp_path)
    first, second, third = (scenario._run([str(script)]).stdout for _ in range(3))
    assert first == third != second
