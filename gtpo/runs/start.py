"""The start of a run: checks before a model is loaded, the lock, the first files, resume and replace."""

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gtpo.arguments import Settings, Values, hub_name, name_of
from gtpo.errors import UsageError, first_line
from gtpo.files import remove, write_atomically
from gtpo.processes import is_main_process, world_size
from gtpo.runs.directory import (
    MANIFEST,
    MAY_CHANGE,
    ROWS,
    RunDirectory,
    completions_of_generation,
    completions_of_step,
    delete,
    latest_complete,
    run_around,
    sorted_checkpoints,
    steps_are_done,
)
from gtpo.runs.provenance import code_of, made_from, prompt_keys, provenance

logger = logging.getLogger(__name__)

_STEP = "completions of a step"
_GENERATION = "completions of a generation"
_NOT_OF_TRAINING = {*MAY_CHANGE["place"], *MAY_CHANGE["remote"]}  # may differ when a finished run is saved again

_locks: dict[str, FileLock] = {}  # held until the process ends


def check_run(settings: Settings, rows: Any, held_out: Any = None) -> str | None:
    """Check that the run can start, before a model is loaded and anything written; the checkpoint to resume from.

    ``rows`` and ``held_out``: sequences of training and held-out rows. A dry run takes no lock; rows that it has not
    asked the Hub for are empty, and count as those of the run.
    """
    completions = settings.completions_per_step * world_size()
    prompts = completions // settings.group_size
    run = RunDirectory(settings.output_dir)
    start = settings.run
    if len(rows) or not start.dry_run:
        refuse_few_rows(len(rows), prompts)
    settings.made_from |= made_from(settings, rows, held_out)
    if start.dry_run and not (len(rows) and rows[0]["prompt"]):
        stored = run.read_environment().get("made_from", {})
        settings.made_from |= {name: stored[name] for name in ROWS & stored.keys()}
    settings.prompt_keys = _trained_prompts(settings, rows)
    _check_reporters(settings.trainer.report_to, plan=start.dry_run)
    check_directory(run.path, bool(start.resume), start.overwrite, lock=not start.dry_run)
    if start.resume:
        checkpoint = latest_complete(run.path)
        if checkpoint is None:
            raise UsageError(f"{run.path} has no complete checkpoint: start it without --resume, or --resume another.")
        run.read_best()  # raises
        settings.source.check_base(checkpoint)
        _check_sharding(checkpoint, settings)
        _check_changes(run, settings, checkpoint, completions)
        return str(checkpoint)
    return None


def _check_reporters(names: list[str], plan: bool = False) -> None:
    """UsageError for one that Transformers does not know, or whose package is missing, which a plan does not need."""
    from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

    installed = [*get_available_reporting_integrations(), "flyte"]  # which is not looked for
    for name in names:
        try:
            found = get_reporting_integration_callbacks(name)  # none of "none"
        except ValueError as error:
            raise UsageError(f"--report_to {name}: {first_line(error)}; or set --report_to none.") from error
        if found and name not in installed and not plan:
            raise UsageError(f"--report_to {name}: its package is not installed: install it, or set --report_to none.")


def refuse_few_rows(rows: int, prompts: int) -> None:
    """A UsageError for fewer training rows than prompts of a step."""
    if rows < prompts:
        raise UsageError(f"{rows} training rows are too few for a step of {prompts} prompts: add --prompts_per_step 1.")


def check_directory(path: str | Path, resume: bool, overwrite: bool, lock: bool = True) -> None:
    """Lock a run that exists, if asked to; refuse a directory of another program, and a new run where there is one."""
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if not is_main_process():  # the other processes find what the main one has created
        return
    run = RunDirectory(path)
    if lock and run.lock.exists():
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
        keys |= run_around(settings.model.initial_adapter).read_prompts()
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


def _check_sharding(checkpoint: Path, settings: Settings) -> None:
    """Refuse a checkpoint that FSDP or DeepSpeed has written where this run is not started with it, and the reverse."""
    wrote = "FSDP" if [*checkpoint.glob("pytorch_model_fsdp*")] else ""
    wrote = "DeepSpeed" if [*checkpoint.glob("global_step*")] else wrote
    starts = {name: os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() for name in ("FSDP", "DeepSpeed")}
    now = next((name for name, value in starts.items() if value == "true"), "")
    now = "DeepSpeed" if settings.trainer.deepspeed else now
    if wrote != now:
        raise UsageError(
            f"{checkpoint} was written {f'with {wrote}' if wrote else 'without FSDP and DeepSpeed'}, and this run is "
            f"started {f'with {now}' if now else 'without'}: --resume it with the file of configs/accelerate that it "
            f"was started with, or start another run from its adapter: --model {checkpoint}."
        )


def _check_changes(run: RunDirectory, settings: Settings, checkpoint: Path, completions: int) -> None:
    """Refuse to resume with settings, rows or code that the run cannot change; log what changes.

    ``completions``: of a step, in all processes.
    """
    hashes: Values = run.read_environment().get("made_from", {})
    changed = _changes(run, settings, completions, hashes)
    allowed = _may_change(changed, hashes)
    of_rewards = _rewards_in(hashes, settings)
    if settings.reward and settings.reward.changed_reward:
        allowed |= of_rewards
    refused = [text for name, text in changed.items() if name not in allowed]
    if refused:
        go_on = " or add --changed_reward true" if of_rewards & changed.keys() - allowed else ""
        raise UsageError(
            f"{run.path} cannot be resumed with {', '.join(refused)}: undo it{go_on}, train another run with "
            f"--run_name, or start one from this adapter: --model {checkpoint}."
        )
    texts = ", ".join(text for name, text in changed.items() if name not in _NOT_OF_TRAINING)
    if texts and steps_are_done(checkpoint, settings.trainer.max_steps):
        raise UsageError(
            f"{run.path} is finished, and {texts} would have no effect: remove it, raise --max_steps, or train another "
            "run with --run_name."
        )
    if texts:
        logger.warning("%s is resumed with %s", run.path, texts)


def _changes(run: RunDirectory, settings: Settings, completions: int, hashes: Values) -> dict[str, str]:
    """What is not as in the stored run -> a text with both values: settings, hashes of rows and code, and two sizes.

    A run of an earlier revision lacks some settings, which count as unchanged.
    """
    stored = run.read_config()
    of_step = completions_of_step(stored, run.read_environment()) or completions
    before = {name_of(name): value for name, value in stored.items()} | stored | hashes
    before |= {_STEP: of_step, _GENERATION: completions_of_generation(stored, of_step)}
    now = settings.to_dict() | dict.fromkeys(hashes) | settings.made_from
    now |= {_STEP: completions, _GENERATION: completions_of_generation(settings.given, completions)}
    changed = {}
    for name, new in now.items():
        old = before.get(name, new)
        if old == new or hub_name(str(old)) == hub_name(str(new)):
            continue
        if name in hashes:
            changed[name] = f"changed {name}"
        else:
            what = f"--{name}" if name in stored else name
            changed[name] = f"{what} {new!s:.80} (before: {old!s:.80})"
    return changed


def _may_change(changed: Collection[str], hashes: Values) -> set[str]:
    """The settings that a resume may change, by what else has changed.

    Without hashes of its rows, or with other rows, what chooses them may not.
    """
    allowed = set().union(*MAY_CHANGE.values())
    if _GENERATION not in changed:
        allowed.add("steps_per_generation")  # it counts micro-batches, which may have another size
    if not hashes or ROWS.intersection(changed):
        allowed -= {"seed", *MAY_CHANGE["rows"]}
    return allowed


def _rewards_in(hashes: Values, settings: Settings) -> set[str]:
    """The names of the hashes that are of code of the rewards."""
    if not settings.reward:
        return set()
    return hashes.keys() - {*ROWS, *code_of(settings.reward.objective or "")}


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
