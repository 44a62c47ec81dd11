"""Run directories without a training."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.files import read_lines, write_json, write_lines, write_settings

from gtpo.runs.directory import RunDirectory, write_manifest


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The logged lines of a run."""
    return read_lines(RunDirectory(run).metrics)


def rows_of(count: int) -> list[dict[str, str]]:
    """So many training rows."""
    return [{"prompt": f"{i} + 1?"} for i in range(count)]


def checkpoint(run: Path, step: int) -> Path:
    """A complete checkpoint of a run of ten steps: the files that are read, with their manifest."""
    directory = run / f"checkpoint-{step}"
    (directory / "ref").mkdir(parents=True, exist_ok=True)
    write_json(directory / "trainer_state.json", {"global_step": step, "max_steps": 10})
    write_json(directory / "adapter_config.json", {})
    for name in ("adapter_model.safetensors", "ref/adapter_model.safetensors", "optimizer.pt", "rng_state.pth"):
        (directory / name).write_text(f"{name} {step}")
    write_manifest(directory)
    return directory


def finish(adapter: Path) -> None:
    """A saved adapter: its config says that a run is finished."""
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").write_text("weights")
    write_json(adapter / "adapter_config.json", {})


def fake_run(
    path: Path, config: Any = None, rows: Iterable[Any] = (), steps: Iterable[int] = (), saved: Iterable[str] = ()
) -> RunDirectory:
    """A run directory with what is given.

    Args:
        path: The directory, which may exist.
        config: Its settings; an empty ``environment.json`` lies beside them.
        rows: Its metrics.
        steps: Its complete checkpoints.
        saved: Its adapters, by name.
    """
    run = RunDirectory(path)
    path.mkdir(parents=True, exist_ok=True)
    if config:
        write_settings(run.config, config)
        write_json(run.environment, {})
    if rows:
        write_lines(run.metrics, rows)
    for step in steps:
        checkpoint(path, step)
    for name in saved:
        finish(path / name)
    return run


def write_results(directory: Path, *entries: Any, age: int = 0) -> None:
    """The ``results.json`` of evaluations, ``age`` seconds old."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "results.json", {"results": entries})
    os.utime(directory / "results.json", (1e9 - age, 1e9 - age))


@contextmanager
def held(log: Path) -> Iterator[None]:
    """Another process holds the lock of a run's log."""
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, str(log)], bufsize=0, **pipes) as process:
        assert process.stdout and process.stdout.readline()
        yield
        process.communicate()
