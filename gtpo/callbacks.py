"""What a run leaves behind: its directory, ``metrics.jsonl``, wandb, and the progress bar on the screen.

The same names and values go to ``metrics.jsonl`` (a line per logged step, written as it happens) and to wandb.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import WandbCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from gtpo.distributed import in_one_piece
from gtpo.fault_tolerance import StopOnNonFiniteGradient, StopOnSignal, WholeCheckpoints
from gtpo.runs import ON_MAIN_PROCESS, replace_folder, write_atomically

logger = logging.getLogger(__name__)

BEST_WINDOW = 100  # steps over which the accuracy reward is smoothed

WANDB_STEPS = 1000  # of wandb's own count in a step of ours: TRL logs tables and timings in between


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
