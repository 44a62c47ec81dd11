"""The training loop of a run: its callbacks, start or resume, and what is left behind."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import WandbCallback

from gtpo.arguments import Settings
from gtpo.processes import IS_MAIN_PROCESS
from gtpo.reports.html import write_report
from gtpo.reports.summary import RunMessages, log_summary
from gtpo.reports.wandb import start_wandb
from gtpo.runs.checkpoints import rotate, steps_are_done
from gtpo.runs.directory import RunDirectory
from gtpo.runs.progress import ProgressBar
from gtpo.runs.script import training_begins
from gtpo.training.callbacks import BestAdapter, CompleteCheckpoints, MetricsWriter, StopOnNonFinite, StopOnSignal
from gtpo.training.export import save_adapter

logger = logging.getLogger(__name__)


def run(trainer: Any, settings: Settings, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; save the adapter, write the report, and say how the run ended."""
    attach_callbacks(trainer, settings)
    training_begins()
    train(trainer, checkpoint)
    save_adapter(trainer, settings)
    if not IS_MAIN_PROCESS:
        return
    for finish in (lambda: write_report(settings.output_dir), lambda: log_summary(trainer, settings)):
        try:
            finish()
        except Exception as error:
            logger.warning("%s: %s; the run is complete", type(error).__name__, error)


def attach_callbacks(trainer: Any, settings: Settings) -> None:
    """Add our callbacks to a trainer: messages, bar, metrics.jsonl and wandb, best adapter, fault tolerance."""
    run = RunDirectory(settings.output_dir)
    trainer.tags = settings.prompt.format_tags
    trainer.add_callback(RunMessages(settings, len(trainer.train_dataset)))
    ProgressBar.attach(trainer, settings.method.upper())
    trainer.remove_callback(WandbCallback)  # it renames the metrics; MetricsWriter keeps the names of metrics.jsonl
    wandb = "wandb" in trainer.args.report_to and IS_MAIN_PROCESS
    trainer.add_callback(MetricsWriter(run, start_wandb(settings) if wandb else None))
    held_out_metric = trainer.args.metric_for_best_model if trainer.eval_dataset is not None else None
    trainer.add_callback(BestAdapter(run, trainer.processing_class, held_out_metric))
    trainer.add_callback(CompleteCheckpoints(trainer))
    trainer.add_callback(StopOnNonFinite(trainer))
    trainer.add_callback(StopOnSignal())  # last: it ends the process after the others


def train(trainer: Any, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; a checkpoint of the last step is loaded and not trained further."""
    if trainer.args.device.type == "cpu":  # with several processes it is cpu:0, to which no checkpoint can be loaded
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
    if checkpoint is not None and steps_are_done(Path(checkpoint), trainer.args.max_steps):
        if IS_MAIN_PROCESS:
            logger.warning(
                "%s is finished: its adapter and report are written again; a larger --max_steps trains further",
                trainer.args.output_dir,
            )
            if trainer.args.save_total_limit:  # a kill may have come before it
                rotate(Path(trainer.args.output_dir), trainer.args.save_total_limit)
        trainer._load_from_checkpoint(checkpoint)
        return
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:  # a notebook goes on after an error
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StopOnSignal):
                callback.restore()
