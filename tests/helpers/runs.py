"""Run directories without a training."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def finish(adapter: Path) -> None:
    """The file of a saved adapter that says that a run is finished."""
    adapter.mkdir(parents=True)
    write_json(adapter / "adapter_config.json", {})


@contextmanager
def held(log: Path) -> Iterator[None]:
    """Another process holds the lock of a run's log."""
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, str(log)], bufsize=0, **pipes) as process:
        assert process.stdout and process.stdout.readline()
        yield
        process.communicate()
