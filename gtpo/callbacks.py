"""What a run leaves behind: its directory, ``metrics.jsonl``, wandb, and the progress bar on the screen.

The same names and values go to ``metrics.jsonl`` (a line per logged step, written as it happens) and to wandb.
"""

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from peft import get_peft_model_state_dict
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK, WandbCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from config import MODEL_ALIASES, RunArguments, UsageError, nearest, read_yaml
from faults import (
    StopOnNonFiniteGradient,
    StopOnSignal,
    WholeCheckpoints,
    in_one_piece,
    is_whole,
    replace_folder,
    write_atomically,
)
from memory import GIB, plan

logger = logging.getLogger(__name__)

BEST_WINDOW = 100  # steps over which the accuracy reward is smoothed

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
WANDB_STEPS = 1000  # of wandb's own count in a step of ours: TRL logs tables and timings in between
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


def track(trainer: Any, resolved: dict[str, Any], title: str) -> None:
    """Put our callbacks on a trainer: progress bar, metrics.jsonl and wandb, best adapter, care for faults."""
    folder = Path(resolved["output_dir"])
    if trainer.args.device.type == "cpu":  # of several processes it is cpu:0, and no checkpoint can be loaded to that
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
    ProgressBar.attach(trainer, title)
    trainer.remove_callback(WandbCallback)  # it renames the metrics; MetricsWriter keeps the names of metrics.jsonl
    wandb = "wandb" in trainer.args.report_to and ON_MAIN_PROCESS
    trainer.add_callback(MetricsWriter(folder, start_wandb(folder, resolved, title) if wandb else None))
    trainer.add_callback(BestAdapter(folder, trainer.processing_class))
    trainer.add_callback(WholeCheckpoints(trainer))
    trainer.add_callback(StopOnNonFiniteGradient(trainer))
    trainer.add_callback(StopOnSignal())  # last: it ends the process when the others are done


def train(trainer: Any, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; that of the last step is loaded and left, as Transformers would not."""
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        last = trainer.args.max_steps if trainer.args.max_steps > 0 else state["max_steps"]
        if state["global_step"] >= last:
            trainer._load_from_checkpoint(checkpoint)
            return
    trainer.train(resume_from_checkpoint=checkpoint)


def start_wandb(folder: Path, resolved: dict[str, Any], method: str) -> Any:
    """A wandb run, the same one when a run is resumed; offline where there is no login or no answer.

    It never asks and never hangs. Runs whose names differ in a last -s1, -s2, ... are one group, so that a panel
    grouped by it shows mean and spread.
    """
    import wandb

    mode = os.environ.get("WANDB_MODE")
    identity = folder / "wandb_id"
    if not identity.is_file():
        write_atomically(identity, uuid.uuid4().hex[:8])
    options = {
        "project": os.environ.get("WANDB_PROJECT", "gtpo"),
        "name": folder.name,
        "id": identity.read_text(),
        "resume": "allow",
        "group": re.sub(r"-s(eed)?\d+$", "", folder.name),
        "tags": [method, Path(resolved["model"]).name, resolved["dataset"], f"seed {resolved['seed']}"],
        "config": {"method": method} | resolved,
        "dir": str(folder),
        "settings": wandb.Settings(
            silent=True,
            finish_timeout=60,
            finish_timeout_raises=False,
            x_disable_meta=True,  # it would hold the command line, and a token on it; environment.json has the rest
        ),
    }
    run, reason = None, "not logged in"
    try:
        if mode is not None or wandb.login(prompt=False):
            run = wandb.init(mode=mode, **options)
    except wandb.Error as error:
        reason = str(error).rstrip(".")
        options["id"] = uuid.uuid4().hex[:8]  # the run that did not start still holds the other
        write_atomically(identity, str(options["id"]))
    if run is None:
        how_to_sync = f"`wandb sync {folder / 'wandb'}/offline-run-*` uploads it"
        logger.warning("wandb: %s, so this run is kept offline; %s.", reason, how_to_sync)
        run = wandb.init(mode="offline", **options)
    # TRL logs its completions and timings in between, which moves wandb's own step on: ours is the training step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


class MetricsWriter(TrainerCallback):
    """Append each logged step to ``metrics.jsonl`` and to wandb, under the same names."""

    def __init__(self, folder: Path, wandb_run: Any = None) -> None:
        self.path = folder / "metrics.jsonl"
        self.wandb_run = wandb_run

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        # A resumed run goes back to its checkpoint: the steps after it are made again.
        if state.is_world_process_zero and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if _step(line) <= state.global_step]
            write_atomically(self.path, "".join(line + "\n" for line in lines))

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:  # the last call sums the run up
            return
        metrics = dict(logs)
        if metrics.get("step_time") and "completion_length" in metrics:
            completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            metrics["tokens_per_second"] = metrics["completion_length"] * completions / metrics["step_time"]
        line = {"step": state.global_step} | metrics
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb_run is not None:
            try:  # steps that a resumed run makes again are behind wandb's count, which leaves them out
                self.wandb_run.log(line, step=state.global_step * WANDB_STEPS, commit=True)
            except Exception as error:  # its service process is gone: the run matters more
                logger.warning("wandb: %s; the run goes on without it, metrics.jsonl has all", error)
                self.wandb_run = None
                args.report_to = [name for name in args.report_to if name != "wandb"]  # TRL logs to it too

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.wandb_run is not None:
            self.wandb_run.finish()


class BestAdapter(TrainerCallback):
    """Keep the adapter of the highest accuracy reward in ``best/``: the paper evaluates GRPO there (Section 6.1).

    The accuracy (the reward, where another takes its place) is the mean over the last ``BEST_WINDOW`` steps, and counts
    from a full window on (of all steps in a shorter run). A new best is copied to memory when it comes and written with
    the next checkpoint, or at the end.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder / "best"
        self.tokenizer = tokenizer
        self.recent: deque[float] = deque(maxlen=BEST_WINDOW)
        self.best: dict[str, float] = {"accuracy": -1.0, "step": 0}
        self.weights: dict[str, torch.Tensor] | None = None  # of a best that is not on disk yet

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        metrics = self.folder.parent / "metrics.jsonl"
        if state.global_step and metrics.exists():  # resumed; MetricsWriter has dropped the later steps
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            self.recent.extend(_score(row) for row in rows if _score(row) is not None)
        if state.global_step and (self.folder / "best.json").exists():
            stored = json.loads((self.folder / "best.json").read_text())
            self.best = stored if stored["step"] <= state.global_step else self.best

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if not logs or (score := _score(logs)) is None:
            return
        self.recent.append(score)
        accuracy = sum(self.recent) / len(self.recent)
        if len(self.recent) < min(BEST_WINDOW, state.max_steps) or accuracy <= self.best["accuracy"]:
            return
        self.best = {"accuracy": accuracy, "step": state.global_step}
        with torch.no_grad():
            whole = {name: in_one_piece(weight) for name, weight in get_peft_model_state_dict(model).items()}
        if state.is_world_process_zero:
            self.weights = {name: weight.detach().cpu().clone() for name, weight in whole.items()}

    def on_save(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.weights is None:
            return
        unfinished = self.folder.with_name("best.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished, state_dict=self.weights)
        self.tokenizer.save_pretrained(unfinished)
        (unfinished / "best.json").write_text(json.dumps(self.best))
        replace_folder(unfinished, self.folder)
        self.weights = None

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.on_save(args, state, control, **kwargs)


def _score(metrics: dict[str, Any]) -> Any:
    """What ``best/`` is chosen by; None on a line that has neither."""
    return metrics.get("accuracy", metrics.get("reward"))


def _step(line: str) -> float:
    """The step of a metrics line; a line that a kill cut short counts as never written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class ProgressBar(ProgressCallback):
    """Transformers' progress bar with the newest metrics at its end, where the default prints a line for each step."""

    shown = {"accuracy": "{:.0f}%", "formatting": "{:.0f}%", "entropy": "{:.2f}", "reward": "{:.2f}", "loss": "{:.3f}"}

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    @classmethod
    def attach(cls, trainer: Any, title: str) -> None:
        """Put this bar on ``trainer`` in place of the default callbacks."""
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # in a notebook a table that grows by a row a step
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls(title))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is not None:
            shown = {key: form.format(logs[key]) for key, form in self.shown.items() if logs and key in logs}
            if "accuracy" in shown:
                shown.pop("reward", None)
            if shown:  # the last log sums up the run, without them
                self.training_bar.set_postfix(shown)
