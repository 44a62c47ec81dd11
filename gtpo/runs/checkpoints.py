"""Checkpoints on disk: a manifest with a digest per file, the newest complete one, and which ones are kept."""

import hashlib
import json
import logging
from pathlib import Path

from gtpo.files import apply_umask, remove, write_atomically

logger = logging.getLogger(__name__)

MANIFEST = "files.json"
_NEEDED = ("model", "optim", "rng_state", "trainer_state")  # a part of the name of each file that a run resumes from


def write_manifest(checkpoint: Path) -> None:
    """List the files of a checkpoint with their SHA-256, once all are written."""
    apply_umask(checkpoint)
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {str(path.relative_to(checkpoint)): _sha256(path) for path in paths}
    write_atomically(checkpoint / MANIFEST, json.dumps(files, indent=1, sort_keys=True))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, against its manifest; None if it is complete."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).items()
        if missing := [part for part in _NEEDED if not any(part in name for name, _ in files)]:
            return f"{MANIFEST} lists no {missing[0]} file"
        for name, stored in files:
            if stored != _sha256(checkpoint / name):
                return f"{name} has changed since it was saved"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def sorted_checkpoints(run: Path) -> list[Path]:
    """The checkpoint directories of a run, oldest step first, complete or not."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 for another directory."""
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


def latest_complete(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; newer ones are skipped with a warning that names the damage."""
    for checkpoint in reversed(sorted_checkpoints(run)):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("%s is incomplete or damaged (%s) and is skipped", checkpoint, reason)
    return None


def steps_are_done(checkpoint: Path, max_steps: int) -> bool:
    """Whether a run has no step left after a complete checkpoint; ``max_steps`` is below 1 for whole epochs."""
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    return bool(state["global_step"] >= (max_steps if max_steps > 0 else state["max_steps"]))


def rotate(run: Path, limit: int) -> None:
    """Delete the checkpoints before the ``limit`` newest complete ones, and damaged ones among these.

    The age is the step of the name: file times are those of a copy, or of a clock that was set back.
    """
    kept = 0
    for checkpoint in reversed(sorted_checkpoints(run)):
        if kept < limit and damage(checkpoint) is None:
            kept += 1
        elif kept:  # nothing is deleted before a complete one is found
            delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: killed in between, it is incomplete and not resumed."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    remove(checkpoint)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
