"""The run directory: names of its files, lock, readers, and the checks before a run starts, resumes or is replaced."""

import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.errors import UsageError, nearest
from gtpo.files import read_yaml, write_atomically

logger = logging.getLogger(__name__)

ON_MAIN_PROCESS = int(os.environ.get("RANK", 0)) == 0
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
_locks: dict[str, FileLock] = {}  # held until the process ends


@dataclass(frozen=True)
class RunDirectory:
    """The files of one training run (docs/metrics.md, "The run directory").

    Attributes:
        path: ``output_dir`` of the run.
    """

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def config(self) -> Path:
        """Every setting, resolved."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, git revision, hardware."""
        return self.path / "environment.json"

    @property
    def initial_entropy(self) -> Path:
        return self.path / "initial_entropy.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def wandb_id(self) -> Path:
        return self.path / "wandb_id"

    @property
    def adapter(self) -> Path:
        """The final adapter."""
        return self.path / "adapter"

    @property
    def best(self) -> Path:
        """The adapter with the highest smoothed accuracy reward."""
        return self.path / "best"

    @property
    def merged(self) -> Path:
        """Base model and adapter as one standalone model."""
        return self.path / "merged"

    def checkpoint(self, step: int | str) -> Path:
        return self.path / f"checkpoint-{step}"

    def not_finite(self, step: int) -> Path:
        """Where the batch of a step with a non-finite loss or gradient is saved."""
        return self.path / f"not-finite-step-{step}"

    @property
    def is_finished(self) -> bool:
        """Whether the final adapter is saved."""
        return (self.adapter / "adapter_config.json").is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint lists its files; they are not checked."""
        return any(self.path.glob(f"checkpoint-*/{MANIFEST}"))

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first; an incomplete one is skipped with a warning."""
        complete = []
        for path in self.path.glob("checkpoint-*"):
            if not path.name.removeprefix("checkpoint-").isdigit():
                continue
            if is_complete(path):
                complete.append(path)
            else:
                logger.warning("%s is incomplete and is skipped", path)
        return sorted(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")))

    def completion_tables(self) -> list[Path]:
        """The logged completions, one parquet table per logged step, oldest first."""
        return sorted((self.path / "completions").glob("*.parquet"))

    def read_config(self) -> dict[str, Any]:
        """The settings as stored.

        Raises:
            UsageError: If they cannot be read.
        """
        return read_yaml(self.config)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, oldest first; a last line truncated by a kill is skipped.

        Raises:
            UsageError: If the run has no metrics.
        """
        if not self.metrics.is_file():
            what = "contains no metrics.jsonl" if self.path.is_dir() else "is not a directory"
            raise UsageError(f"{self.path} {what}: expected the directory of a training run.")
        rows = []
        for line in self.metrics.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if not rows:
            raise UsageError(f"{self.metrics} is empty: the run has not logged a step yet.")
        return rows


def run_of(directory: str | Path) -> RunDirectory:
    """The run in a directory, or the run that contains an offline wandb run (``RUN/wandb/offline-run-...``)."""
    directory = Path(directory)
    return RunDirectory(directory.parent.parent if directory.parent.name == "wandb" else directory)


def find_runs(places: Iterable[Path], *, finished: bool = False) -> list[RunDirectory]:
    """The runs below some directories, least recently written first; ``finished``: only those with a final adapter."""
    name = "adapter/adapter_config.json" if finished else "config.yaml"
    found = {path for place in places for path in place.rglob(name)}
    ordered = sorted(found, key=lambda path: path.stat().st_mtime)
    return [RunDirectory(path.parent.parent if finished else path.parent) for path in ordered]


# Checkpoints

MANIFEST = "files.json"


def write_manifest(checkpoint: Path) -> None:
    """List the files of a checkpoint with their sizes, once all are written."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    write_atomically(checkpoint / MANIFEST, json.dumps(sizes, indent=1))


def is_complete(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there in its full size."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


# Start of a run


def check_run(settings: Settings, rows: int) -> str | None:
    """Check that the run can start, before a model is loaded; nothing is written.

    Args:
        settings: All settings; ``output_dir`` names the directory.
        rows: Training rows.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        UsageError: If the directory exists and neither --resume nor --overwrite is given, is not a run or has no
            checkpoint; if ``report_to`` is unknown; or if there are fewer rows than prompts in a step.
    """
    _check_reporters(settings.trainer.report_to)
    prompts = settings.completions_per_step * int(os.environ.get("WORLD_SIZE", 1)) // settings.group_size
    if rows < prompts:
        raise UsageError(f"{rows} training rows are too few for a step of {prompts} prompts: lower --prompts_per_step.")
    run, start = RunDirectory(settings.output_dir), settings.run
    if ON_MAIN_PROCESS and run.lock.exists():
        _lock(run)
    checkpoints = run.checkpoints()
    if start.resume and start.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if start.resume:
        if not checkpoints:
            raise UsageError(f"{run.path} has no checkpoint: name the run with --resume RUN, or start it again.")
        _check_same_policy(run, settings)
        return str(checkpoints[-1])
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"--output_dir: {run.path} is a file, expected a directory.")
    if ON_MAIN_PROCESS and _has_content(run):  # the other processes find what the main one has created
        if not start.overwrite:
            raise UsageError(
                f"{run.path} exists: --resume continues it, --overwrite replaces it, --run_name names another."
            )
        if not (run.config.is_file() and run.environment.is_file()):
            raise UsageError(
                f"{run.path} is not a run (it lacks config.yaml or environment.json), so --overwrite does not delete "
                "it: name another directory."
            )
    return None


def start_run(settings: Settings) -> None:
    """Create the run directory, checked by :func:`check_run`, with ``config.yaml`` and ``environment.json``.

    Raises:
        UsageError: If another process uses it.
    """
    if not ON_MAIN_PROCESS:
        return
    run = RunDirectory(settings.output_dir)
    run.path.mkdir(parents=True, exist_ok=True)
    _lock(run)
    for path in run.path.iterdir():
        if not settings.run.overwrite and (settings.run.resume or path.name not in _before_step_1(run)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != run.lock:
            path.unlink()
    write_atomically(run.config, yaml.safe_dump(settings.to_dict(), sort_keys=True))
    write_atomically(run.environment, json.dumps(environment(), indent=2))


def _before_step_1(run: RunDirectory) -> set[str]:
    """The files of a run that failed before its first step: nothing in them was trained."""
    return {path.name for path in (run.lock, run.config, run.environment, run.initial_entropy)}


def _has_content(run: RunDirectory) -> bool:
    """Whether a directory contains more than a run leaves that failed before its first step."""
    names = {path.name for path in run.path.iterdir()} if run.path.is_dir() else set()
    started = {run.config.name, run.environment.name}
    return not (names <= {run.lock.name} or started <= names <= _before_step_1(run))


def _check_reporters(reporters: Sequence[str] | str) -> None:
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    known = {*INTEGRATION_TO_CALLBACK, "all", "none"}
    for name in [reporters] if isinstance(reporters, str) else reporters or []:
        if name not in known:
            raise UsageError(f"--report_to {name!r} is unknown{nearest(name, known)}: wandb, tensorboard, none, ...")


def _check_same_policy(run: RunDirectory, settings: Settings) -> None:
    stored = run.read_config() if run.config.is_file() else {}
    for name in ("model", "lora_rank", "lora_target_modules"):
        new = getattr(settings.model, name)
        if name in stored and MODEL_ALIASES.get(str(stored[name]), stored[name]) != MODEL_ALIASES.get(str(new), new):
            raise UsageError(
                f"{run.path} was trained with --{name} {stored[name]}; a checkpoint cannot be resumed with {new}: "
                f"remove --{name}."
            )


def _lock(run: RunDirectory) -> None:
    lock = _locks.setdefault(str(run.path.resolve()), FileLock(run.lock, thread_local=False))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"{run.path} is in use by another process: wait for it, or name another run.") from error


# Provenance


def environment() -> dict[str, Any]:
    """Versions, git revision and hardware."""
    import torch

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
