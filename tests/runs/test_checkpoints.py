"""Checkpoints on disk: damage found by the manifest, the newest complete one, and rotation by step."""

from hashlib import sha256
from pathlib import Path

import pytest
from helpers.files import read_json, write_json
from helpers.runs import checkpoint, fake_run
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.runs.directory import MANIFEST, damage, delete, latest_complete, rotate, sorted_checkpoints, steps_are_done


def names(run: Path) -> list[str]:
    return [path.name for path in sorted_checkpoints(run)]


def test_a_manifest_lists_the_files_their_sizes_and_hashes(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 1)
    stored = read_json(directory / MANIFEST)
    files = ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "ref/adapter_model.safetensors"]
    assert [*stored] == [*files, "rng_state.pth", "trainer_state.json"]
    content = b"optimizer.pt 1"
    assert stored["optimizer.pt"] == [len(content), sha256(content).hexdigest()] and damage(directory) is None


@pytest.mark.parametrize("name", ["optimizer.pt", "ref/adapter_model.safetensors"])
def test_a_missing_and_a_truncated_file_are_named(name: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 1)
    (directory / name).write_bytes(b"opt")
    assert str(damage(directory)).startswith(name)
    (directory / name).unlink()
    assert str(damage(directory)).startswith(name)


FILES = ["adapter_model.safetensors", "optimizer.pt", "ref/adapter_model.safetensors", "rng_state.pth"]


@pytest.mark.parametrize("name", [*FILES, "trainer_state.json"])
def test_damage_that_keeps_the_size_is_named(name: str, tmp_path: Path) -> None:
    """As a power cut leaves it: the second half is zeros."""
    fake_run(tmp_path, steps=(1, 2))
    file = tmp_path / "checkpoint-2" / name
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:half] + b"\0" * (len(content) - half))
    assert damage(file.parents[name.count("/")]) == f"{name} is not as it was written"
    assert damage(file.parents[name.count("/")], contents=False) is None  # what rotation asks, after each checkpoint
    assert latest_complete(tmp_path) == tmp_path / "checkpoint-1"


def test_a_manifest_of_sizes_alone_is_read(tmp_path: Path) -> None:
    """Of an earlier revision."""
    directory = checkpoint(tmp_path, 1)
    write_json(directory / MANIFEST, {"optimizer.pt": len("optimizer.pt 1")})
    assert damage(directory) is None
    (directory / "optimizer.pt").write_text("optimizer")
    assert damage(directory) == "optimizer.pt has 9 bytes instead of 14"


@pytest.mark.parametrize("text", ["", "{}", '{"optimizer.pt', "3", None])
def test_an_unreadable_or_missing_manifest_is_damage(text: str | None, tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, 1) / MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    assert str(damage(manifest.parent)).startswith(MANIFEST)


def test_a_manifest_of_an_earlier_revision_has_hashes(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 1)
    write_json(directory / MANIFEST, {"optimizer.pt": "0b4fccc2"})
    assert damage(directory) is None
    (directory / "optimizer.pt").unlink()
    assert damage(directory)


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    fake_run(tmp_path, steps=(100, 20, 3))
    (tmp_path / "checkpoint-old").mkdir()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_a_damaged_checkpoint_is_skipped_by_name(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    fake_run(tmp_path, steps=(2, 4, 6))
    (tmp_path / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    assert latest_complete(tmp_path) == tmp_path / "checkpoint-4"
    assert len(caplog.messages) == 1 and "checkpoint-6" in caplog.text and "optimizer.pt" in caplog.text
    assert latest_complete(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("damaged", "limit", "kept"), [([6], 2, [4, 8]), ([6, 8], 1, [4, 6, 8])])
def test_rotation_keeps_the_newest_complete_ones(
    damaged: list[int], limit: int, kept: list[int], tmp_path: Path
) -> None:
    fake_run(tmp_path, steps=(2, 4, 6, 8))
    for step in damaged:
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    rotate(tmp_path, limit)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in kept]


def test_a_linked_checkpoint_is_unlinked_and_its_target_kept(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "large disk", 1)
    (tmp_path / "checkpoint-1").symlink_to(target)
    checkpoint(tmp_path, 2)
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-2"] and damage(target) is None


def test_a_checkpoint_that_is_being_deleted_is_skipped(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    directory = checkpoint(tmp_path, 2)
    monkeypatch.setattr("gtpo.runs.directory.remove", lambda path: None)  # killed before a file is gone
    delete(directory)
    assert damage(directory)


@pytest.mark.parametrize(("step", "max_steps", "done"), [(4, 5, False), (5, 5, True), (7, -1, False), (8, -1, True)])
def test_steps_are_done_at_the_last_step(step: int, max_steps: int, done: bool, tmp_path: Path) -> None:
    write_json(tmp_path / "trainer_state.json", {"global_step": step, "max_steps": 8})
    assert steps_are_done(tmp_path, max_steps) is done
