import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from transformers.integrations import INTEGRATION_TO_CALLBACK

from gtpo.arguments import MODEL_ALIASES, RunArguments
from gtpo.cli import read_yaml
from gtpo.errors import UsageError, nearest
from gtpo.memory import GIB, plan

MANIFEST = "files.json"


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there in its full size."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary name, then renamed."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def replace_folder(unfinished: Path, folder: Path) -> None:
    """Put a folder that is whole where another may stand, which is kept as ``.old`` until then."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(unfinished, folder)
    shutil.rmtree(old, ignore_errors=True)


PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "unsloth",
    "vllm",
    "bitsandbytes",
    "wandb",
)


ON_MAIN_PROCESS = int(os.environ.get("RANK", 0)) == 0


LOCK = "run.lock"


_BEFORE_STEP_1 = {LOCK, "config.yaml", "environment.json", "initial_entropy.json"}  # nothing in it was trained


_locks: dict[str, FileLock] = {}  # held until the process ends


def check_run(resolved: dict[str, Any], run: RunArguments, rows: int) -> str | None:
    """Refuse what cannot become a run, before a model is loaded; nothing is written.

    Args:
        resolved: Every setting of the run, flat; ``output_dir`` names the directory.
        run: Whether an existing directory is resumed or replaced, or nothing is run at all (``dry_run``).
        rows: Training rows.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        UsageError: If the directory exists and neither was asked for, is no run, or there is nothing to resume; or if
            ``report_to`` names an unknown reporter.
        SystemExit: After a dry run has printed the settings, and the plan as comments of the same YAML.
    """
    if run.dry_run:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = [(device.name, device.total_memory / GIB) for device in devices]
        sys.stdout.write(yaml.safe_dump(resolved, sort_keys=True) + plan(resolved, rows, gpus))
        raise SystemExit(0)
    reporters = resolved.get("report_to") or []
    for name in [reporters] if isinstance(reporters, str) else reporters:
        if name not in (known := {*INTEGRATION_TO_CALLBACK, "all", "none"}):
            raise UsageError(f"--report_to {name!r} is unknown{nearest(name, known)}: wandb, tensorboard, none, ...")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    completions = resolved["per_device_train_batch_size"] * resolved["gradient_accumulation_steps"] * processes
    if rows < (prompts := completions // resolved.get("num_generations", 1)):
        raise UsageError(f"{rows} training rows are too few for a step of {prompts} prompts: lower --prompts_per_step.")
    folder = Path(resolved["output_dir"])
    if ON_MAIN_PROCESS and (folder / LOCK).exists():
        _lock(folder)
    found = checkpoints(folder)
    if run.resume and run.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if run.resume:
        if not found:
            raise UsageError(
                f"{folder} holds no checkpoint to resume: name the run with --resume RUN, or start it anew."
            )
        _check_same_policy(folder, resolved)
        return str(found[-1])
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: --output_dir names the directory of the run.")
    if ON_MAIN_PROCESS and _holds_something(folder):  # the others find what the main one has made
        if not run.overwrite:
            raise UsageError(
                f"{folder} exists: --resume continues it, --overwrite replaces it, --run_name names another."
            )
        if not all((folder / name).is_file() for name in ("config.yaml", "environment.json")):
            raise UsageError(
                f"{folder} is no run (it lacks config.yaml or environment.json), so --overwrite leaves it alone: name "
                "another."
            )
    return None


def _holds_something(folder: Path) -> bool:
    """Whether there is more in a folder than a run leaves that failed before its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return not (names <= {LOCK} or {"config.yaml", "environment.json"} <= names <= _BEFORE_STEP_1)


def _check_same_policy(folder: Path, resolved: dict[str, Any]) -> None:
    stored = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else resolved
    for name in ("model", "lora_rank", "lora_target_modules"):
        old, new = (
            MODEL_ALIASES.get(str(value), value) for value in (stored.get(name, resolved[name]), resolved[name])
        )
        if old != new:
            raise UsageError(
                f"{folder} was trained with --{name} {stored[name]}, which a checkpoint cannot change to "
                f"{resolved[name]}: leave it out."
            )


def start_run(resolved: dict[str, Any], run: RunArguments) -> None:
    """Make the run directory, checked by :func:`check_run`, with ``config.yaml`` and ``environment.json``.

    Raises:
        UsageError: If another process uses it.
    """
    folder = Path(resolved["output_dir"])
    if ON_MAIN_PROCESS:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        for path in folder.iterdir():
            if not run.overwrite and (run.resume or path.name not in _BEFORE_STEP_1):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        write_atomically(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=True))
        write_atomically(folder / "environment.json", json.dumps(environment(), indent=2))


def _lock(folder: Path) -> None:
    lock = _locks.setdefault(str(folder.resolve()), FileLock(folder / LOCK, thread_local=False))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"{folder} is in use by another process: wait for it, or name another run.") from error


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; one that was cut short or damaged is left out with a word."""
    whole = []
    for path in Path(folder).glob("checkpoint-*"):
        if not path.name.removeprefix("checkpoint-").isdigit():
            continue
        if is_whole(path):
            whole.append(path)
        else:
            logger.warning("%s is not whole, so it is not used", path)
    return sorted(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def environment() -> dict[str, Any]:
    """Versions, git revision and hardware: what has to be known to repeat a run."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_revision": git_revision(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus,
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def git_revision() -> str | None:
    """The commit of this checkout, with ``-dirty`` where files differ from it; None outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a run, oldest first; a last line cut short by a kill is left out.

    An offline run of wandb (``RUN/wandb/offline-run-...``) is read beside it: the run's own file has the same names and
    values.

    Raises:
        UsageError: If the run has no metrics.
    """
    path = run_directory(run) / "metrics.jsonl"
    if not path.is_file():
        what = "holds no metrics.jsonl" if Path(run).is_dir() else "is no folder"
        raise UsageError(f"{run} {what}: name the directory of a training run.")
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not rows:
        raise UsageError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def run_directory(folder: str | Path) -> Path:
    """The run directory that holds an offline wandb run, or the folder itself."""
    folder = Path(folder)
    return folder.parent.parent if folder.parent.name == "wandb" else folder
