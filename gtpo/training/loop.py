"""A run of a train script: rows, policy and trainer, its callbacks, training, the saved adapter, the report."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerState
from transformers.integrations import WandbCallback

from gtpo.arguments import Settings, Values
from gtpo.data.load import load_rows, prepare_prompts, to_demonstrations
from gtpo.data.tokenizer import assistant_prefill, check_answer_is_kept
from gtpo.errors import RunError
from gtpo.grading.user_functions import CheckedReward, load_rewards, with_prefill
from gtpo.models.load import load_policy
from gtpo.models.plan import dry_run
from gtpo.models.preflight import check_machine
from gtpo.processes import is_main_process, training_begins
from gtpo.reports.html import write_report
from gtpo.reports.progress import ProgressBar
from gtpo.reports.summary import RunMessages, log_summary
from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory, how_to_continue, steps_are_done
from gtpo.runs.start import check_run, start_run
from gtpo.training.best_adapter import BestAdapter
from gtpo.training.export import save_adapter
from gtpo.training.faults import CompleteCheckpoints, StopOnNonFinite, StopOnSignal, run_of
from gtpo.training.metrics_writer import MetricsWriter, UnloggedMetrics, restore_metrics
from gtpo.training.precision import keep_adapter_in_float32
from gtpo.training.refusals import check_embeddings, check_unused

logger = logging.getLogger(__name__)


class RunData(NamedTuple):
    """What a run reads before a model is loaded."""

    rows: Any  # of training: conversations, or demonstrations for SFT
    held_out: Any  # None without
    rewards: list[CheckedReward] | None  # None for SFT
    checkpoint: str | None  # from which the run is resumed

    def fitting(self, tokenizer: Any, settings: Settings) -> tuple[Any, Any]:
        """The training and held-out rows that fit, after one look at the first ones; UsageError if they cannot score.

        For SFT also for a chat template that leaves the answer out.
        """
        if self.rewards is None:
            first = self.rows[0]
            check_answer_is_kept(tokenizer, first["prompt"] + first["completion"], settings.prompt)
        return prepare_prompts(self.rows, self.held_out, tokenizer, settings)


def read_data(kind: Any, settings: Settings, rewards_in: Any = None) -> RunData:
    """Read and check what a run needs but its model; nothing is written. Arguments as of :func:`train_policy`."""
    if rewards_in:
        kind.check_settings(settings.trainer)
    else:
        check_unused(settings.trainer, "sft")
    rows, held_out = load_rows(settings)
    rewards = None
    if rewards_in:
        columns = (held_out or rows).column_names
        rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), columns)
    else:
        rows = to_demonstrations(rows, settings.prompt.template_kwargs)
        held_out = held_out and to_demonstrations(held_out, settings.prompt.template_kwargs)
    return RunData(rows, held_out, rewards, check_run(settings, rows, held_out))


def train_policy(
    kind: Any, settings: Settings, backend: str, rewards_in: Any = None, own: Values | None = None
) -> None:
    """What a train script does once it has its settings; ``--dry_run`` prints the plan and loads no model.

    Args:
        kind: The trainer class.
        settings: Those of the command line.
        backend: transformers or unsloth, which is imported.
        rewards_in: ``rewards.rewards_in``. Without it the rows are demonstrations, for TRL's SFTTrainer.
        own: Arguments of ``kind`` that TRL's class does not have.
    """
    options = dict(own or {})
    check_machine(settings, backend)
    data = read_data(kind, settings, rewards_in)
    if settings.run.dry_run:
        sys.stdout.write(dry_run(settings, data.rows))
        return
    policy, tokenizer = load_policy(settings, backend, data.checkpoint)
    if data.rewards is not None:
        options["reward_funcs"] = with_prefill(data.rewards, assistant_prefill(tokenizer, settings.prompt))
    rows, held_out = data.fitting(tokenizer, settings)
    start_run(settings)
    prompts = {"train_dataset": rows, "eval_dataset": held_out}
    trainer = kind(policy, args=settings.trainer, processing_class=tokenizer, **prompts, **options)
    keep_adapter_in_float32(trainer.model)
    run(trainer, settings, data.checkpoint)


def run(trainer: Any, settings: Settings, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; save the adapter, write the report, and say how the run ended."""
    directory = RunDirectory(settings.output_dir)
    attach_callbacks(trainer, settings, directory)
    train(trainer, checkpoint)
    training_begins()  # also where the run was finished before
    save_adapter(trainer, settings, directory)
    if is_main_process():
        for finish in (partial(write_report, directory.path), partial(log_summary, settings, directory)):
            try:
                finish()
            except Exception as error:
                logger.warning("%s: %s; the run is complete", type(error).__name__, error)


def attach_callbacks(trainer: Any, settings: Settings, run: RunDirectory) -> None:
    """Add our callbacks to a trainer: messages, bar, metrics.jsonl and wandb, best adapter, fault tolerance."""
    check_embeddings(trainer.model)  # SFT too
    trainer.add_callback(RunMessages(settings, len(trainer.train_dataset)))  # above the bar
    ProgressBar.attach(trainer)
    trainer.remove_callback(WandbCallback)  # it renames the metrics; MetricsWriter keeps the names of metrics.jsonl
    wandb = "wandb" in trainer.args.report_to and is_main_process()
    held_out_metric = trainer.args.metric_for_best_model if trainer.eval_dataset is not None else None
    for callback in (
        MetricsWriter(run, start_wandb(settings, run) if wandb else None),
        BestAdapter(run, trainer.processing_class, held_out_metric),
        UnloggedMetrics(trainer, run),
        CompleteCheckpoints(trainer, run),
        StopOnNonFinite(trainer),
        StopOnSignal(trainer, run),  # last: it ends the process after the others
    ):
        trainer.add_callback(callback)


def train(trainer: Any, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; a checkpoint of the last step is loaded and not trained further.

    RunError if the memory does not suffice.
    """
    if trainer.args.device.type == "cpu":  # with several processes it is cpu:0, to which no checkpoint can be loaded
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
    if checkpoint is not None and steps_are_done(Path(checkpoint), trainer.args.max_steps):
        trainer._load_from_checkpoint(checkpoint)
        if is_main_process():
            logger.warning("%s is finished, and saved again: --max_steps trains further", trainer.args.output_dir)
            state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
            restore_metrics(run_of(trainer), state, trainer.args)
        return
    # of a share, such as --eval_steps 0.1, and the steps that it stands for
    of_transformers = logging.getLogger("transformers.trainer_utils")
    of_transformers.addFilter(lambda record: "arguments do not match" not in record.getMessage())
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except torch.OutOfMemoryError as error:
        args = trainer.args
        again = how_to_continue(run_of(trainer))
        raise RunError(
            f"out of memory in step {trainer.state.global_step + 1}: lower --per_device_train_batch_size (now "
            f"{args.per_device_train_batch_size}) and raise --gradient_accumulation_steps (now "
            f"{args.gradient_accumulation_steps}) by the same factor, then {again}."
        ) from error
    finally:  # a notebook goes on after an error
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StopOnSignal):
                callback.restore()
