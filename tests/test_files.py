"""Atomic writes, permissions, links and named pipes."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import refused
from helpers.scripts import ROOT
from pandas import DataFrame

from gtpo.arguments import read_texts
from gtpo.data.tables import read_file
from gtpo.evaluation.records import read_entries
from gtpo.evaluation.scores import write_results
from gtpo.files import apply_umask, fingerprint, open_regular, remove, replace_directory, write_atomically
from gtpo.models.hub import check_model_files
from gtpo.models.source import ModelSource
from gtpo.reports.html import _shown_tables
from gtpo.runs.directory import RunDirectory, damage
from paper.results import read_results


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


@pytest.mark.parametrize("name", ["file", "link"])
def test_a_directory_replaces_a_file_or_a_link(name: str, tmp_path: Path) -> None:
    for directory in ("mine", "new"):
        (tmp_path / directory).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    replace_directory(tmp_path / "new", tmp_path / name)
    assert not (tmp_path / name).is_symlink() and (tmp_path / name).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mine"]


def test_files_get_the_permissions_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "ref").mkdir()
    files = [tmp_path / "adapter", tmp_path / "ref" / "adapter"]
    for file in files:
        file.touch(0o600)  # as safetensors writes it
    before = os.umask(0o027)
    apply_umask(tmp_path)
    assert os.umask(before) == 0o027  # left as it was
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640] * 2


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
    files = ("model.safetensors", "chat_template.jinja", "adapter_config.json", "tokenizer.json")
    for name, text in product(files, ("000", "100", "001")):
        (tmp_path / name).write_text(text)
        seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").write_text("not a weight")
    assert fingerprint(tmp_path) in seen and len(seen) == 12
    assert fingerprint("Qwen/Qwen2.5-3B-Instruct") is None
    stored = ROOT / "tests" / "stored" / "run_of_eada378" / "adapter"
    assert fingerprint(stored) == "e9fee0cd3a8561b5"  # stored with completions: it may not change


@pytest.fixture
def kill() -> Iterator[Callable[[int], None]]:
    """``kill(n)``: raise KeyboardInterrupt before the n-th rename, deletion or copy from now on."""
    left: list[None] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if left and event in ("os.rename", "os.remove", "os.rmdir", "shutil.copyfile"):
            left.pop()
            if not left:
                raise KeyboardInterrupt

    sys.addaudithook(hook)  # it stays until the process ends
    yield lambda operation: left.extend([None] * operation)
    left.clear()


@pytest.mark.parametrize(("operation", "expected"), [(1, "old"), (2, "old"), (3, "new")])
def test_a_file_is_replaced_at_once(operation: int, expected: str, tmp_path: Path, kill: Callable[[int], None]) -> None:
    """After a deletion, of a link under the temporary name, there is a single rename."""
    path = tmp_path / "a.json"
    path.write_text("old")
    kill(operation)
    with suppress(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == expected


@pytest.mark.parametrize("operation", range(1, 7))
def test_a_killed_replacement_leaves_a_complete_directory(
    operation: int, tmp_path: Path, kill: Callable[[int], None]
) -> None:
    directory = tmp_path / "adapter"
    unfinished = tmp_path / "adapter.tmp"
    for path, text in ((directory, "old"), (unfinished, "new")):
        path.mkdir()
        (path / "weights").write_text(text)
    kill(operation)
    with suppress(KeyboardInterrupt):
        replace_directory(unfinished, directory)
    kept = directory if directory.is_dir() else tmp_path / "adapter.old"
    assert (kept / "weights").read_text() == ("new" if operation > 3 else "old")


# The file of a run, of results, of data or of a model -> what reads it below its directory.
READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda d: RunDirectory(d).read_metrics(),
    "config.yaml": lambda d: RunDirectory(d).read_config(),
    "metrics.jsonl to append to": lambda d: open_regular(d / "metrics.jsonl to append to"),
    "rows.parquet": lambda d: read_file(d / "rows.parquet"),
    "results.json": lambda d: read_entries(d / "results.json"),
    "old results": lambda d: write_results((d / "old results").rename(d / "results.json").parent, []),
    "evaluation.json": lambda d: condensed(d),
    "adapter_config.json": lambda d: ModelSource("", "", "", d).lora,
    "model.safetensors": lambda d: check_model_files(d),
    "prompt.txt": lambda d: read_texts({"system_prompt": str(d / "prompt.txt")}),
}


def condensed(directory: Path) -> None:
    """The condensed results of paper.results, whose scores are the pipe."""
    DataFrame({"run": ["a"], "seed": [1], "step": [1]}).to_parquet(directory / "metrics.parquet")
    read_results([directory])


@pytest.fixture
def soon() -> Iterator[None]:
    """A test that waits for what never comes fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_a_named_pipe_is_refused(name: str, tmp_path: Path, soon: None) -> None:
    os.mkfifo(tmp_path / name)
    with refused("is not a regular file"):
        READERS[name](tmp_path)


def test_a_named_pipe_is_no_manifest_and_no_table(tmp_path: Path, soon: None) -> None:
    run = RunDirectory(tmp_path)
    for path in (run.checkpoint(1) / "files.json", run.completions / "1.parquet"):
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    assert damage(run.checkpoint(1)) == "files.json is missing or unreadable"
    assert _shown_tables(run) == []
