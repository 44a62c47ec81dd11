"""The start of a run: checks before a model is loaded, the lock, the first files, resume and replace."""

import json
import logging
import os
import sys
from pathlib import Path
from textwrap import shorten

import yaml
from filelock import FileLock, Timeout

from gtpo.arguments import MODEL_ALIASES, PromptArguments, Settings, name_of
from gtpo.errors import UsageError, command_again
from gtpo.files import remove, write_atomically
from gtpo.processes import IS_MAIN_PROCESS
from gtpo.runs.directory import (
    MANIFEST,
    SENDS,
    RunDirectory,
    delete,
    latest_complete,
    resume_command,
    sorted_checkpoints,
    steps_are_done,
)
from gtpo.runs.provenance import provenance

logger = logging.getLogger(__name__)

_NOT_OF_TRAINING = {  # what may differ when a finished run is saved, merged or uploaded again
    *("output_dir", "run_name", "data_dir", "merge", "hub_private_repo"),
    *SENDS,
}
_locks: dict[str, FileLock] = {}  # held until the process ends


def check_run(settings: Settings, rows: int) -> str | None:
    """Check that the run can start, before a model is loaded and anything written; the checkpoint to resume from."""
    prompts = settings.completions_per_step * int(os.environ.get("WORLD_SIZE", 1)) // settings.group_size
    if rows < prompts:
        raise UsageError(f"{rows} training rows are too few for a step of {prompts} prompts.")
    run, start = RunDirectory(settings.output_dir), settings.run
    if IS_MAIN_PROCESS and run.lock.exists():
        _lock(run)
    if start.resume and start.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if start.resume:
        checkpoint = latest_complete(run.path)
        if checkpoint is None:
            raise UsageError(f"{run.path} has no complete checkpoint: start it without --resume, or --resume another.")
        run.read_best()  # raises
        _check_changes(run, settings, checkpoint)
        return str(checkpoint)
    if IS_MAIN_PROCESS and _has_content(run):  # the other processes find what the main one has created
        if not _is_run(run):
            raise UsageError(f"{run.path} exists and is not a run: nothing is written to it or deleted; name another.")
        if not start.overwrite:
            raise UsageError(f"{run.path} exists: --resume continues, --overwrite replaces it, or change --run_name.")
    return None


def start_run(settings: Settings) -> None:
    """Create the run directory, checked by :func:`check_run`, with ``config.yaml`` and ``environment.json``.

    ``run.lock`` is written first and stays: a directory that has it is a run, however early or late it was killed.
    """
    if not IS_MAIN_PROCESS:
        return
    run = RunDirectory(settings.output_dir)
    run.path.mkdir(parents=True, exist_ok=True)
    _lock(run)
    if settings.run.resume:
        _delete_unfinished(run)
    else:
        _clear(run)
    write_atomically(run.config, yaml.safe_dump(settings.to_dict(), sort_keys=True))
    write_atomically(run.environment, json.dumps(provenance(), indent=2))


def _delete_unfinished(run: RunDirectory) -> None:
    """Delete what a kill left: a table of completions, or a checkpoint; restore best/ if it was being replaced."""
    if not run.best.exists() and (old := run.path / "best.old").is_dir():
        old.rename(run.best)
    for table in run.completions.glob("*.tmp"):
        table.unlink()
    for checkpoint in sorted_checkpoints(run.path):
        if not (checkpoint / MANIFEST).is_file():
            delete(checkpoint)


def _clear(run: RunDirectory) -> None:
    """Delete everything but the lock, by name, so checkpoints before their metrics; last what they were made with."""
    last = (run.environment, run.config)
    for path in sorted(run.path.iterdir(), key=lambda path: (path in last, path.name)):
        if path != run.lock:
            remove(path)


def _is_run(run: RunDirectory) -> bool:
    """Whether a directory was made by :func:`start_run`; a copy may lack the lock."""
    return run.lock.exists() or (run.config.is_file() and run.environment.is_file())


def _has_content(run: RunDirectory) -> bool:
    """Whether a directory contains more than a run leaves that failed before its first step."""
    names = {path.name.removesuffix(".tmp") for path in run.path.iterdir()} if run.path.is_dir() else set()
    before = (run.lock, run.config, run.environment, run.initial_entropy, run.completions, run.wandb, run.wandb_id)
    is_early = _is_run(run) and names <= {path.name for path in before} and not run.completion_tables()
    return bool(names) and not is_early


def _check_changes(run: RunDirectory, settings: Settings, checkpoint: Path) -> None:
    """Refuse to resume a run with another model, adapter or prompt, or with other held-out rows; log other changes.

    Of other held-out rows some may have been trained on, and best/ would compare two kinds. After the last step a
    change has no effect, and any is refused.
    """
    stored = run.read_config() if run.config.is_file() else {}  # of another program that uses the trainer
    stored = {"eval_rows": None, "eval_dataset": None} | {name_of(n): v for n, v in stored.items()} | stored
    new = settings.to_dict()
    changed = {name: value for name, value in new.items() if stored.get(name, value) != value}
    held_out = ["eval_rows", "eval_dataset", *(["seed", "dataset", "limit"] if stored["eval_rows"] else [])]
    if stored["eval_rows"] is None and stored["eval_dataset"] is None and new["eval_dataset"] is not None:
        held_out = []  # rows that were not trained on
    for name in ["model", "lora_rank", "lora_target_modules", *vars(PromptArguments()), *held_out]:
        old, value = stored.get(name), changed.get(name)
        if name in changed and MODEL_ALIASES.get(str(old), old) != MODEL_ALIASES.get(str(value), value):
            raise UsageError(
                f"{run.path} was started with --{name} {shorten(str(old), 80)}, and cannot be resumed with "
                f"{shorten(str(value), 80)}: remove --{name}, or train another run with --run_name."
            )
    changes = [f"--{n} {v} (before: {stored[n]})" for n, v in changed.items() if n not in _NOT_OF_TRAINING]
    if changes and steps_are_done(checkpoint, settings.trainer.max_steps):
        raise UsageError(
            f"{run.path} is finished, and {', '.join(changes)} would have no effect: remove it, raise "
            "--max_steps, or train another run with --run_name."
        )
    if changes:
        logger.warning("%s is resumed with %s", run.path, ", ".join(changes))


def _lock(run: RunDirectory) -> None:
    lock = _locks.setdefault(str(run.path.resolve()), FileLock(run.lock, thread_local=False))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"{run.path} is in use by another process: wait for it, or name another run.") from error


def how_to_continue() -> str:
    """The command after this process was interrupted: ``--resume`` of the run that it holds, or the same one again."""
    flags = []
    for lock in _locks.values():
        run = RunDirectory(Path(lock.lock_file).parent)
        if lock.is_locked and run.has_checkpoint:
            return resume_command(run)
        if lock.is_locked and _has_content(run) and "--overwrite" not in sys.argv:
            flags = ["--overwrite"]
    return command_again(*flags)
