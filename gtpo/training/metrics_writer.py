"""``metrics.jsonl`` (one line per logged step, written immediately) and wandb: the same names and values."""

import json
import logging
import math
from typing import Any

from transformers import TrainerCallback

from gtpo.arguments import Values
from gtpo.files import open_regular, read_regular, write_atomically
from gtpo.processes import is_main_process
from gtpo.runs.directory import RunDirectory, is_held_out

logger = logging.getLogger(__name__)

UNLOGGED = "unlogged.json"  # in a checkpoint
WANDB_STEPS = 1_000_000  # wandb steps per training step: TRL logs tables and the time of each call in between


class MetricsWriter(TrainerCallback):
    """Append each logged step and each evaluation to ``metrics.jsonl`` and to wandb, under the same names."""

    def __init__(self, run: RunDirectory, wandb_run: Any = None) -> None:
        self.run = run
        self.wandb_run = wandb_run

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if state.global_step:
            args.eval_on_start = False  # its line is there
        if is_main_process():
            restore_metrics(self.run, state, args)

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if state.global_step >= state.max_steps:  # also where --logging_steps does not divide it
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not is_main_process() or not logs or "train_loss" in logs:  # the summary, the last call
            return
        line = _line(logs, state.global_step, args)
        with open_regular(self.run.metrics, encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb_run is not None:
            try:  # steps that a resumed run repeats are behind wandb's step and ignored by it
                half = WANDB_STEPS // 2 if is_held_out(line) else 0  # after the step's line
                self.wandb_run.log(line, step=state.global_step * WANDB_STEPS + half, commit=True)
            except Exception as error:  # its service process died; training continues
                logger.warning("wandb: %s; training continues without it, metrics.jsonl is complete", error)
                self.wandb_run = None
                args.report_to = [name for name in args.report_to if name != "wandb"]  # TRL logs to it too

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.wandb_run is not None:
            self.wandb_run.finish()


class UnloggedMetrics(TrainerCallback):
    """A checkpoint between two lines keeps what the next line is a mean of; best/ follows these lines.

    Private attributes of the trainers: ``_metrics`` and ``_tokens`` (values since the last line), ``_tr_loss`` and
    ``_globalstep_last_logged`` (the sum of the losses since that step). Add it before CompleteCheckpoints.
    """

    def __init__(self, trainer: Any, run: RunDirectory) -> None:
        self.trainer = trainer
        self.run = run

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        trainer = self.trainer
        since = trainer._globalstep_last_logged
        loss = trainer.accelerator.gather(trainer._tr_loss.detach()).mean().item()  # every process calls it
        if since < state.global_step and is_main_process():
            found = {"since": since, "loss": loss, "metrics": trainer._metrics["train"], "tokens": self._tokens}
            write_atomically(self.run.checkpoint(state.global_step) / UNLOGGED, json.dumps(found))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        file = self.run.checkpoint(state.global_step) / UNLOGGED
        if not (state.global_step and file.is_file()):
            return
        found = json.loads(read_regular(file))
        trainer = self.trainer
        trainer._globalstep_last_logged = found["since"]
        trainer._tr_loss = trainer._tr_loss + found["loss"]
        for name, values in found["metrics"].items():
            trainer._metrics["train"][name][:0] = values
        self._tokens[:0] = found["tokens"]

    @property
    def _tokens(self) -> list[int]:
        """Those of the micro-batches of SFT."""
        counts = getattr(self.trainer, "_tokens", None)
        return [] if counts is None else counts["train"]


def _line(logs: Values, step: int, args: Any) -> Values:
    """The line of what the trainer logs at a step."""
    # JSON has neither NaN nor infinity; fp16 skips steps with an infinite norm
    known = {name: value for name, value in logs.items() if not isinstance(value, float) or math.isfinite(value)}
    line = {"step": step} | known
    if line.get("step_time") and "completion_length" in line:
        completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        line["tokens_per_second"] = line["completion_length"] * completions / line["step_time"]
    return line


def restore_metrics(run: RunDirectory, state: Any, args: Any) -> None:
    """Write ``metrics.jsonl`` from the lines of a checkpoint: a resumed run logs later ones again."""
    text = ""
    for logs in state.log_history:
        text += json.dumps(_line(logs, logs["step"], args)) + "\n"
    if text or run.metrics.exists():
        write_atomically(run.metrics, text)
