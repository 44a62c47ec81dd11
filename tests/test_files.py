"""Atomic writes, permissions, and YAML settings."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from helpers.refusals import refused
from helpers.scripts import ROOT
from pandas import DataFrame

from gtpo.arguments import PromptArguments
from gtpo.data.tables import read_file
from gtpo.evaluation.records import read_entries
from gtpo.evaluation.scores import write_results
from gtpo.evaluation.targets import adapter_config
from gtpo.files import apply_umask, fingerprint, open_regular, read_yaml, remove, replace_directory, write_atomically
from gtpo.models.hub import check_model_files
from gtpo.reports.html import _spread, read_held_out
from gtpo.runs.directory import RunDirectory, damage
from paper.results import read_results


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")  # cannot be encoded: fails while writing
    assert path.read_text() == "old"


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "file.tmp").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "mine").read_text() == "years of work" and not (tmp_path / "file").is_symlink()


def test_a_link_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    remove(tmp_path / "link")
    assert (tmp_path / "mine" / "file").exists() and not (tmp_path / "link").is_symlink()
    remove(tmp_path / "mine")
    remove(tmp_path / "mine")  # gone already
    assert list(tmp_path.iterdir()) == []


def test_a_directory_replaces_a_file_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("file", "link"):
        (tmp_path / "new").mkdir()
        replace_directory(tmp_path / "new", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mine"]
    assert not (tmp_path / "link").is_symlink()


def settings(tmp_path: Path, text: str) -> dict:
    (tmp_path / "settings.yaml").write_text(text)
    return read_yaml(tmp_path / "settings.yaml")


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    assert settings(tmp_path, "a: &a [q_proj]\nb: *a\nc: {<<: {x: 1}, y: 2}\n") == {
        "a": ["q_proj"],
        "b": ["q_proj"],
        "c": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_get_the_permissions_of_the_umask(umask: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "ref").mkdir()
    files = [tmp_path / "adapter", tmp_path / "ref" / "adapter"]
    for file in files:
        file.write_text("")
        file.chmod(0o600)  # as safetensors writes it
    before = os.umask(umask)
    try:
        apply_umask(tmp_path)
        assert os.umask(umask) == umask  # left as it was
    finally:
        os.umask(before)
    assert [file.stat().st_mode & 0o777 for file in files] == [expected] * 2


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "metrics.jsonl").write_text("years of work")
    (tmp_path / "metrics.jsonl").symlink_to(mine / "metrics.jsonl")
    (tmp_path / "run").symlink_to(mine)
    for path in (tmp_path / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl"):
        with refused("is a link"):
            open_regular(path)
    with open_regular(mine / "metrics.jsonl") as file:
        file.write(", appended")
    assert (mine / "metrics.jsonl").read_text() == "years of work, appended"


def test_fingerprint_sees_any_changed_byte(tmp_path: Path) -> None:
    seen = set()
    for weights in (b"000", b"100", b"001"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.add(fingerprint(tmp_path))
    for name in ("chat_template.jinja", "adapter_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
        seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").write_text("not a weight")
    assert fingerprint(tmp_path) in seen and len(seen) == 6
    assert fingerprint("Qwen/Qwen2.5-3B-Instruct") is None
    stored = ROOT / "tests" / "stored" / "run_of_eada378" / "adapter"
    assert fingerprint(stored) == "e9fee0cd3a8561b5"  # stored with completions: it may not change


@pytest.fixture
def audited() -> Iterator[Callable[[int], list[str]]]:
    """``audited(n)``: raise KeyboardInterrupt before the n-th rename, deletion or copy from now on; what came first."""
    state: dict[str, Any] = {"left": None, "seen": []}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if state["left"] is not None and event in ("os.rename", "os.remove", "os.rmdir", "shutil.copyfile"):
            state["seen"].append(event)
            state["left"] -= 1
            if state["left"] < 0:
                state["left"] = None
                raise KeyboardInterrupt

    def kill(operation: int) -> list[str]:
        state.update(left=operation, seen=[])
        return state["seen"]

    sys.addaudithook(hook)  # it stays until the process ends
    yield kill
    state["left"] = None


@pytest.mark.parametrize("operation", range(4))
def test_a_file_is_replaced_at_once(operation: int, tmp_path: Path, audited: Callable[[int], list[str]]) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    seen = audited(operation)
    with suppress(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == ("old" if operation < 2 else "new")
    assert seen == ["os.remove", "os.rename"][: operation + 1]  # a link under the temporary name, then the file


@pytest.mark.parametrize("operation", range(6))
def test_a_killed_replacement_leaves_a_complete_directory(
    operation: int, tmp_path: Path, audited: Callable[[int], list[str]]
) -> None:
    directory = tmp_path / "adapter"
    unfinished = tmp_path / "adapter.tmp"
    for path, text in ((directory, "old"), (unfinished, "new")):
        path.mkdir()
        (path / "weights").write_text(text)
    audited(operation)
    with suppress(KeyboardInterrupt):
        replace_directory(unfinished, directory)
    kept = directory if directory.is_dir() else tmp_path / "adapter.old"
    assert (kept / "weights").read_text() == ("new" if operation > 2 else "old")


WAIT = 20  # seconds
# The file of a run, of results, of data or of a model -> what reads it below its directory.
READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda d: RunDirectory(d).read_metrics(),
    "config.yaml": lambda d: RunDirectory(d).read_config(),
    "settings.yaml": lambda d: read_yaml(d / "settings.yaml"),
    "metrics.jsonl to append to": lambda d: open_regular(d / "metrics.jsonl to append to"),
    "rows.jsonl": lambda d: read_file(d / "rows.jsonl"),
    "rows.csv": lambda d: read_file(d / "rows.csv"),
    "rows.parquet": lambda d: read_file(d / "rows.parquet"),
    "results.json": lambda d: read_entries(d / "results.json"),
    "old results": lambda d: write_results((d / "old results").rename(d / "results.json").parent, []),
    "evaluation.json": lambda d: condensed(d),
    "adapter_config.json": lambda d: adapter_config(d),
    "model.safetensors": lambda d: check_model_files(d),
    "prompt.txt": lambda d: PromptArguments(system_prompt=str(d / "prompt.txt")),
    "template.jinja": lambda d: PromptArguments(chat_template=str(d / "template.jinja")),
}


def condensed(directory: Path) -> None:
    """The condensed results of paper.results, whose scores are the pipe."""
    DataFrame({"run": ["a"], "seed": [1], "step": [1]}).to_parquet(directory / "metrics.parquet")
    read_results([directory])


@pytest.fixture
def pipe() -> Iterator[Callable[[Path], None]]:
    """``pipe(path)``: make a named pipe, whose reader waits; after a while it is an empty file for it."""
    timers = []

    def make(path: Path) -> None:
        os.mkfifo(path)
        writes = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        timers.append(Timer(WAIT, os.close, [writes]))
        timers[-1].start()

    yield make
    for timer in timers:
        timer.cancel()


@pytest.mark.parametrize("name", READERS)
def test_a_named_pipe_is_refused(name: str, tmp_path: Path, pipe: Callable[[Path], None]) -> None:
    pipe(tmp_path / name)
    with refused("is not a regular file"):
        READERS[name](tmp_path)


def test_a_named_pipe_is_no_manifest_and_no_table(tmp_path: Path, pipe: Callable[[Path], None]) -> None:
    run = RunDirectory(tmp_path)
    for path in (run.checkpoint(1) / "files.json", run.completions / "1.parquet", run.completions / "held_out_1.json"):
        path.parent.mkdir(exist_ok=True)
        pipe(path)
    assert damage(run.checkpoint(1)) == "files.json is missing or unreadable"
    assert read_held_out(run, 3) == [] == _spread(run.completion_tables(), 3)
