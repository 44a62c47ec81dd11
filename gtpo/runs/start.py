"""The start of a run: checks before a model is loaded, the lock, the first files, resume and replace."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gtpo.arguments import Settings, Values, hub_name, name_of
from gtpo.errors import UsageError, first_line
from gtpo.files import remove, write_atomically
from gtpo.processes import is_main_process
from gtpo.runs.directory import (
    MANIFEST,
    MAY_CHANGE,
    RunDirectory,
    check_base,
    delete,
    latest_complete,
    sorted_checkpoints,
    step_of,
    steps_are_done,
)
from gtpo.runs.provenance import code_of, made_from, prompt_keys, provenance

logger = logging.getLogger(__name__)

_NOT_OF_TRAINING = {*MAY_CHANGE["place"], *MAY_CHANGE["remote"]}  # may differ when a finished run is saved again

_locks: dict[str, FileLock] = {}  # held until the process ends


def check_run(settings: Settings, rows: Any, held_out: Any = None) -> str | None:
    """Check that the run can start, before a model is loaded and anything written; the checkpoint to resume from.

    ``rows`` and ``held_out``: sequences of training and held-out rows.
    """
    completions = settings.completions_per_step * int(os.environ.get("WORLD_SIZE", 1))
    prompts = completions // settings.group_size
    refuse_few_rows(len(rows), prompts)
    settings.made_from |= made_from(settings, rows, held_out)
    settings.prompt_keys = _trained_prompts(settings, rows)
    _check_reporters(settings.trainer.report_to)
    run = RunDirectory(settings.output_dir)
    start = settings.run
    check_directory(run.path, bool(start.resume), start.overwrite)
    if start.resume:
        checkpoint = latest_complete(run.path)
        if checkpoint is None:
            raise UsageError(f"{run.path} has no complete checkpoint: start it without --resume, or --resume another.")
        run.read_best()  # raises
        check_base(checkpoint)
        _check_changes(run, settings, checkpoint, completions)
        return str(checkpoint)
    return None


def _check_reporters(names: list[str]) -> None:
    """UsageError for one that Transformers does not know, or whose package is missing."""
    from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

    installed = [*get_available_reporting_integrations(), "flyte"]  # which is not looked for
    for name in names:
        try:
            found = get_reporting_integration_callbacks(name)  # none of "none"
        except ValueError as error:
            raise UsageError(f"--report_to {name}: {first_line(error)}; or set --report_to none.") from error
        if found and name not in installed:
            raise UsageError(f"--report_to {name}: its package is not installed: install it, or set --report_to none.")


def refuse_few_rows(rows: int, prompts: int) -> None:
    """A UsageError for fewer training rows than prompts of a step."""
    if rows < prompts:
        raise UsageError(f"{rows} training rows are too few for a step of {prompts} prompts: add --prompts_per_step 1.")


def check_directory(path: str | Path, resume: bool, overwrite: bool) -> None:
    """Lock a run that exists; refuse a directory of another program, and a new run where there is one."""
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if not is_main_process():  # the other processes find what the main one has created
        return
    run = RunDirectory(path)
    if run.lock.exists():
        _lock(run)
    if resume or not run.has_content:
        return
    if not run.is_ours:
        raise UsageError(f"{run.path} exists and is not a run: nothing is written to it or deleted; name another.")
    if not overwrite:
        raise UsageError(f"{run.path} exists: --resume continues, --overwrite replaces it, or change --run_name.")


def _trained_prompts(settings: Settings, rows: Any) -> bytes:
    """The content of prompts.bin: of the training rows, and of the run whose adapter the training starts from."""
    keys = {*prompt_keys(row["prompt"] for row in rows)}
    if settings.model.initial_adapter:
        keys |= RunDirectory(Path(settings.model.initial_adapter).parent).read_prompts()
    return b"".join(sorted(keys))


def start_run(settings: Settings) -> None:
    """Create the run directory, checked by :func:`check_run`, with ``config.yaml`` and ``environment.json``.

    ``run.lock`` is written first and stays: a directory that has it is a run, however early or late it was killed.
    """
    if not is_main_process():
        return
    run = RunDirectory(settings.output_dir)
    run.path.mkdir(parents=True, exist_ok=True)
    _lock(run)
    if settings.run.resume:
        _delete_unfinished(run)
    else:
        _clear(run)
    write_atomically(run.config, yaml.safe_dump(settings.to_dict(), sort_keys=True))
    write_atomically(run.prompts, lambda unfinished: unfinished.write_bytes(settings.prompt_keys))
    write_atomically(run.environment, json.dumps(provenance() | {"made_from": settings.made_from}, indent=2))


def _delete_unfinished(run: RunDirectory) -> None:
    """Delete a checkpoint that a kill left; restore best/ if it was being replaced."""
    if not run.best.exists() and (old := run.path / "best.old").is_dir():
        old.rename(run.best)
    for checkpoint in sorted_checkpoints(run.path):
        if not (checkpoint / MANIFEST).is_file():
            delete(checkpoint)


def _clear(run: RunDirectory) -> None:
    """Delete everything but the lock, by name, so checkpoints before their metrics; last what they were made with."""
    last = [run.config, run.environment]
    for path in [*sorted({*run.path.iterdir()} - {run.lock, *last}), *last]:
        remove(path)


def _check_changes(run: RunDirectory, settings: Settings, checkpoint: Path, completions: int) -> None:
    """Refuse to resume with settings, rows or code that the run cannot change; log what changes.

    Of other held-out rows some may have been trained on. ``completions``: of a step, in all processes.
    """
    stored: Values = {"eval_rows": None, "eval_dataset": None} | run.read_config()  # another program has no settings
    before = run.read_environment().get("made_from", {})  # of an earlier revision nothing
    changed = _changed(stored, settings)
    allowed = set().union(*MAY_CHANGE.values())
    for name, (old, new) in changed.items():
        if name not in allowed:
            raise UsageError(
                f"{run.path} was started with --{name} {old!s:.80}, and cannot be resumed with {new!s:.80}: remove "
                f"--{name}, train another run with --run_name, or start one from this adapter: --model {checkpoint}."
            )
    made = ["rows", "held_out"] if stored["eval_rows"] or stored["eval_dataset"] else ["rows"]
    is_same = all(before.get(name) == settings.made_from.get(name) for name in made)
    of_rows = [f", remove --{name}" for name in changed if name in ("seed", *MAY_CHANGE["rows"])]
    if not is_same and (before or of_rows):
        raise UsageError(
            f"the training or held-out rows are not those that {run.path} was started with: restore the data"
            f"{''.join(of_rows)}, or train another run with --run_name."
        )
    _check_steps(run, stored, settings, checkpoint, completions)
    texts = [f"--{name} {new} (before: {old})" for name, (old, new) in changed.items() if name not in _NOT_OF_TRAINING]
    if steps_are_done(checkpoint, settings.trainer.max_steps):
        if texts:
            raise UsageError(
                f"{run.path} is finished, and {', '.join(texts)} would have no effect: remove it, raise --max_steps, "
                "or train another run with --run_name."
            )
        return
    texts += _changed_code(run, settings, before)
    if texts:
        logger.warning("%s is resumed with %s", run.path, ", ".join(texts))


def _check_steps(run: RunDirectory, stored: Values, settings: Settings, checkpoint: Path, completions: int) -> None:
    """Refuse to resume with steps of another size, or with fewer than the checkpoint has."""
    batch = stored.get("per_device_train_batch_size", 0)
    trained = batch * stored.get("gradient_accumulation_steps", 0) * run.read_environment().get("world_size", 1)
    if trained and completions != trained:
        raise UsageError(
            f"a step of {run.path} has {trained} completions, and {completions} with these settings and processes: "
            "change --gradient_accumulation_steps, or train another run with --run_name."
        )
    steps = settings.trainer.max_steps
    if 0 < steps < step_of(checkpoint):
        raise UsageError(
            f"--max_steps {steps} is before step {step_of(checkpoint)} of {checkpoint}: raise it, or train another run "
            "with --run_name."
        )


def _changed_code(run: RunDirectory, settings: Settings, before: Values) -> list[str]:
    """The files of rewards that have changed, where ``--changed_reward`` allows it; refuses those of an objective."""
    found = []
    of_objective = code_of(settings.reward.objective or "") if settings.reward else {}
    for name in sorted(before.keys() & settings.made_from.keys() - {"rows", "held_out"}):
        if settings.made_from[name] == before[name]:
            continue
        if name in of_objective or not settings.reward.changed_reward:
            go_on = "" if name in of_objective else "add --changed_reward true to go on with this one, "
            raise UsageError(
                f"{run.path} was started with another {name}: restore the file, {go_on}or train another run with "
                "--run_name."
            )
        found.append(f"another {name}")
    return found


def _changed(stored: Values, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Before and now of the settings that are not as stored; a run of an earlier revision lacks some of them."""
    known = {name_of(name): value for name, value in stored.items()} | stored
    changed = {}
    for name, new in settings.to_dict().items():
        old = known.get(name, new)
        if old != new and hub_name(str(old)) != hub_name(str(new)):
            changed[name] = old, new
    return changed


def _lock(run: RunDirectory) -> None:
    lock = _locks.setdefault(str(run.path.resolve()), FileLock(run.lock, thread_local=False))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"{run.path} is in use by another process: wait for it, or name another run.") from error


def held_run() -> RunDirectory | None:
    """The run that this process holds, if it has begun one."""
    for lock in _locks.values():
        if lock.is_locked:
            return RunDirectory(Path(lock.lock_file).parent)
    return None
