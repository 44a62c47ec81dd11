"""Run directories without a training."""

from pathlib import Path
from typing import Any

from helpers.files import read_lines, write_json

from gtpo.runs.directory import RunDirectory, write_manifest


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The logged lines of a run."""
    return read_lines(RunDirectory(run).metrics)


def checkpoint(run: Path, step: int) -> Path:
    """A complete checkpoint of a run of ten steps: the files that are read, with their manifest."""
    directory = run / f"checkpoint-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "trainer_state.json", {"global_step": step, "max_steps": 10})
    for name in ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth"):
        (directory / name).write_text("")
    write_manifest(directory)
    return directory
