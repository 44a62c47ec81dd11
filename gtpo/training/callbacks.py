"""Callbacks of a training run: metrics.jsonl and wandb, the best adapter, an alarm, and fault tolerance.

``metrics.jsonl`` (one line per logged step, written immediately) and wandb get the same names and values. The processes
of a run see a fault (a signal, a value that is not finite) at different times, so they agree before they act on it.
"""

import json
import logging
import math
import random
import signal
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from gtpo.arguments import Values
from gtpo.errors import RunError
from gtpo.files import apply_umask, open_regular, remove, replace_directory, write_atomically
from gtpo.processes import any_process, gather_full_parameter, is_main_process
from gtpo.runs.directory import (
    MANIFEST,
    RunDirectory,
    damage,
    how_to_continue,
    is_held_out,
    rotate,
    write_manifest,
)

logger = logging.getLogger(__name__)

CHANGED = ("--changed_reward", "true")  # flags of a run that goes on after its reward was corrected

BEST_WINDOW = 100  # steps of the mean that selects best/; an eighth of a run of less than 800
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


class BestAdapter(TrainerCallback):
    """Save the best adapter, or model, in ``best/``.

    With held-out rows: that of the best evaluation by ``held_out_metric``, the first of equal ones. Without: that of
    the highest accuracy, as the paper evaluates GRPO (Section 6.1), or reward if no accuracy is logged: a mean over the
    last ``BEST_WINDOW`` steps, or an eighth of the run if that is shorter, from the first full window on.

    A new best is copied to host memory and written with the next checkpoint, or at the end.
    """

    def __init__(self, run: RunDirectory, tokenizer: Any, held_out_metric: str | None = None) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.held_out_metric = held_out_metric and f"eval_{held_out_metric.removeprefix('eval_')}"
        self.recent: deque[Any] = deque(maxlen=BEST_WINDOW)  # (step, score) of logged lines
        self.best: Values = {}  # the metric, and its step
        self.weights: Values | None = None  # of a best adapter that is not on disk yet, by name

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if not state.global_step:
            return
        for logs in state.log_history:
            self._add(logs, logs["step"])
        best = self.run.best
        if (best / MANIFEST).is_file() and (reason := damage(best)):
            logger.warning("%s is damaged (%s): a later adapter replaces it", best, reason)
            return
        stored = self.run.read_best()
        if stored.get("step", math.inf) <= state.global_step and (self.held_out_metric or "accuracy") in stored:
            self.best = stored

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        value = metrics.get(self.held_out_metric)  # Transformers refuses a metric that does not exist
        if value is not None:
            self._offer(self.held_out_metric, value, state, model, bool(args.greater_is_better))

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        has_score = self._add(logs or {}, state.global_step)
        window = min(BEST_WINDOW, max(1, state.max_steps // 8))
        first = state.global_step - window  # the window begins after this step
        if self.held_out_metric or not has_score or first < 0:
            return
        scores = [score for step, score in self.recent if step > first]
        self._offer("accuracy", sum(scores) / len(scores), state, model)

    def _add(self, logs: Values, step: int) -> bool:
        """Keep the score of a logged line; whether it has one: a mean over the steps since the line before."""
        score = logs.get("accuracy", logs.get("reward"))
        if score is not None:
            self.recent.append((step, score))
        return score is not None

    def _offer(self, name: Any, value: float, state: Any, model: Any, greater_is_better: bool = True) -> None:
        """Keep the adapter if it is the best one so far; every process has to call it."""
        best = self.best.get(name, -math.inf if greater_is_better else math.inf)
        if not (value > best if greater_is_better else value < best):  # NaN is not better
            return
        self.best = {name: value, "step": state.global_step}
        if isinstance(model, PeftModel):
            trained = get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" asks the Hub each time
        else:
            trained = model.state_dict()
        with torch.no_grad():
            full = {name: gather_full_parameter(weight) for name, weight in trained.items()}
        if is_main_process():
            self.weights = {name: weight.detach().cpu().clone() for name, weight in full.items()}

    def on_save(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.weights is None:
            return
        unfinished = self.run.path / "best.tmp"
        remove(unfinished)
        options: Values = {}
        if isinstance(model, PeftModel):
            options = {"selected_adapters": ["default"], "save_embedding_layers": False}  # not KL's "ref"
        model.save_pretrained(unfinished, state_dict=self.weights, **options)
        self.tokenizer.save_pretrained(unfinished)
        (unfinished / "best.json").write_text(json.dumps(self.best), encoding="utf-8")
        write_manifest(unfinished)
        replace_directory(unfinished, self.run.best)
        self.weights = None

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.on_save(args, state, control, **kwargs)


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


@dataclass(eq=False)
class CollapseAlarm(TrainerCallback):
    """Warn and write a checkpoint when accuracy has fallen and the gradient norm is high, early in a run.

    Both are means over the last ``window`` steps. The alarm rings once, when the accuracy is at least ``drop`` points
    below its own highest mean and the gradient norm is at least ``grad_norm``, within the first ``first_steps`` steps.

    The defaults were measured on 389 runs of one model of a million parameters, 59 of which ended 20 points of accuracy
    below their best (``results/collapse``, ``headroom``, ``gentle``): thresholds were chosen on odd seeds. On even ones
    the alarm rings in 25 of 27 runs that are lost, a median of 79 steps before they are 20 points down, and in 13 of
    154 that are not. Watching the whole run instead finds 27 of 27, with 92 of 154 false alarms. Of 320 later
    runs, none of them lost (``results/missing_tags``), it rings in 20 of 80 of Dr. GRPO, whose gradients are larger,
    and in none of the others. Where longer answers are rewarded and all 80 are lost (``results/entropy_parts``), it
    rings in 39 of 40 without GTPO's filter, a median of 20 steps before, and in 1 of 40 with it: the filter drops most
    completions there, and the gradient is small. The mean entropy is no alarm: of 51 runs that lost accuracy 6 ever had
    a mean above ln 2.

    Args:
        metric: Logged name of the accuracy. For a plain TRL run ``rewards/NAME/mean`` of a reward for right answers.
        maximum: Value of the metric where every answer is right: 100 for our ``accuracy``, which is in percent.
        window: Steps of the means.
        drop: Fall of the accuracy, in points of 100.
        grad_norm: Gradient norm before clipping.
        first_steps: Steps that are watched; None watches all.
        stop: Also end the training.
    """

    metric: str = "accuracy"
    maximum: float = 100.0
    window: int = 25
    drop: float = 9.0
    grad_norm: float = 0.25
    first_steps: int | None = 100
    stop: bool = False

    def __post_init__(self) -> None:
        self.rang_at: int | None = None
        self._lines: deque[Any] = deque()  # (step, accuracy in points of 100, gradient norm)
        self._highest = -math.inf

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        for line in state.log_history:  # of a resumed run
            if self.metric in line and "grad_norm" in line:
                self._fall_and_norm(line["step"], line)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        is_watched = self.first_steps is None or state.global_step <= self.first_steps
        if self.rang_at is not None or not is_watched or "grad_norm" not in (logs or ()):
            return
        if self.metric not in logs:
            rewards = [name for name in logs if name.startswith("rewards/") and name.endswith("/mean")]
            if not rewards:  # the step trains again on completions of an earlier one: num_iterations
                return
            raise ValueError(f"CollapseAlarm: no metric {self.metric!r} is logged; rewards here: {', '.join(rewards)}")
        fall, norm = self._fall_and_norm(state.global_step, logs)
        if fall < self.drop or norm < self.grad_norm:
            return
        self.rang_at = state.global_step
        control.should_save = True
        control.should_training_stop = control.should_training_stop or self.stop
        if is_main_process():
            logger.warning(
                "step %d: %s is %.0f points below its best and the gradient norm is %.2f (means of %d steps): the run "
                "may be losing what it learned. A checkpoint is written%s; a lower learning rate, or Adam's betas of "
                "0.9 and 0.95, help.",
                state.global_step,
                self.metric,
                fall,
                norm,
                self.window,
                ", and training ends" if self.stop else "",
            )

    def _fall_and_norm(self, step: int, line: Values) -> tuple[float, float]:
        """Points below the highest trailing mean, and the trailing mean of the gradient norm; 0 before a full window.

        A logged line stands for the steps since the line before it.
        """
        points = 100.0 * line[self.metric] / self.maximum
        self._lines.append((step, points, line["grad_norm"]))
        while self._lines[0][0] <= step - self.window:
            self._lines.popleft()
        if step < self.window:
            return 0.0, 0.0
        _, accuracies, norms = zip(*self._lines, strict=True)
        accuracy = fmean(accuracies)
        self._highest = max(self._highest, accuracy)
        return self._highest - accuracy, fmean(norms)


# Fault tolerance, for any trainer of Transformers


class StopOnSignal(TrainerCallback):
    """On Ctrl-C, SIGTERM, SIGHUP or SIGUSR2 finish the step, write a checkpoint, exit with 128 plus its number.

    SIGHUP stays ignored where it is, as under nohup. SIGUSR2 is Slurm's, before preemption or the time limit (SIGUSR1
    is NCCL's): it may be sent twice, and never exits immediately; another second signal does. Add it last.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if threading.current_thread() is threading.main_thread():  # only the main thread receives signals
            numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self.before = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: Any) -> None:
        if self.received is None:
            logger.warning("\nfinishing this step and writing a checkpoint; press Ctrl-C again to exit immediately")
            self.received = number
        if number != signal.SIGUSR2:
            self.restore(keep=(signal.SIGUSR2,))

    def restore(self, keep: Sequence[int] = ()) -> None:
        """Hand the signals, except some, back to the handlers they had before training."""
        for number in self.before.keys() - set(keep):
            signal.signal(number, self.before.pop(number))

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if any_process(self.received is not None, args.device):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.restore()
        if state.global_step < state.max_steps and any_process(self.received is not None, args.device):
            if is_main_process():
                how = how_to_continue(RunDirectory(args.output_dir))
                logger.warning("stopped after step %d; continue with: %s", state.global_step, how)
            raise SystemExit(128 + (self.received or signal.SIGTERM))


class StopOnNonFinite(TrainerCallback):
    """Stop the run before the optimizer applies a non-finite gradient, or anything saves weights that are not finite.

    With fp16 such gradients are part of loss scaling: Accelerate skips the step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if not args.fp16:
            gradients = {n: weight.grad for n, weight in model.named_parameters() if weight.grad is not None}
            self._check("the gradient", gradients, args)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        trained = {n: weight.detach() for n, weight in model.named_parameters() if weight.requires_grad}
        self._check("the updated weight", trained, args)

    def _check(self, what: str, tensors: Values, args: Any) -> None:
        flags = []
        for tensor in tensors.values():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # each process checks its part
            flags.append(part.isfinite().all())
        finite = torch.stack(flags).tolist() if flags else []  # one transfer to the host
        failed = [name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite]
        if not any_process(bool(failed), args.device):
            return
        name = failed[0] if failed else "on another process"
        batches = getattr(self.trainer, "_buffered_inputs", None) or []  # SFT has none
        raise non_finite_error(f"{what} ({name})", self.trainer, batches)


def non_finite_error(
    what: str,
    trainer: Any,
    batches: Sequence[Values] = (),
    rows: Sequence[Values] = (),
    mend: str = "a lower --learning_rate, --max_grad_norm or --temperature",
) -> RunError:
    """The error for a non-finite value, after what is known of the step is saved in the run directory.

    ``batches``: the micro-batches of the step, as TRL's trainer stores them. ``rows``: prompts, completions and rewards
    of a step that has no batch yet. ``mend``: what to change before the run continues.
    """
    step = trainer.state.global_step + 1
    run = RunDirectory(trainer.args.output_dir)
    stops = "the run stops, no checkpoint contains it"
    if batches or rows:  # SFT has neither
        stops += f"; its batch is saved in {save_failed_step(trainer, batches, rows)}"
    if not run.config.exists():
        mend = mend.replace("--", "")
    then = how_to_continue(run, *(CHANGED if rows else ()))
    return RunError(f"{what} is not finite in step {step}: {stops}. Use {mend}, then {then}")


def save_failed_step(trainer: Any, batches: Sequence[Values], rows: Sequence[Values]) -> Path:
    """Write what is known of the current step to ``not-finite-step-N/`` of the run, a file of each process."""
    directory = Path(trainer.args.output_dir) / f"not-finite-step-{trainer.state.global_step + 1}"
    directory.mkdir(exist_ok=True)
    rank = trainer.accelerator.process_index
    if rows:
        _write_json(directory / f"rows-{rank}.json", rows)
    if batches:
        texts = []
        copies = {}
        for i, batch in enumerate(batches):
            texts.append(trainer.processing_class.batch_decode(batch["completion_ids"]))
            for name, value in batch.items():
                if isinstance(value, Tensor):
                    copies[f"{i}.{name}"] = value.detach().cpu().clone()
        _write_json(directory / f"completions-{rank}.json", texts)
        save_file(copies, directory / f"batch-{rank}.safetensors")  # <index of the micro-batch>.<name>
        apply_umask(directory)
    return directory


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def save_finished_step(trainer: Any) -> str:
    """Write a checkpoint of the last finished step of a run that stops within one; how the run continues."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, CompleteCheckpoints):
            callback.save_finished_step()
    return how_to_continue(RunDirectory(trainer.args.output_dir), *CHANGED)


def check_rewards(trainer: Any, rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
    """RunError, with the last finished step saved, if rewards cannot be used.

    Every process has to call it. The error is for what a reward function has raised, a value that is not finite, and a
    batch without a reward. ``rewards`` is what TRL has made of the rewards of all processes, shape (B, number of
    functions), with NaN for None; prompts and completions are of this process.
    """
    names = trainer.reward_func_names
    failures = []
    returned = []
    wrong = []
    for name, function, column in zip(names, trainer.reward_funcs, rewards.T, strict=True):
        failure = getattr(function, "failure", None)
        if failure is not None:
            failures.append(failure)
        values = getattr(function, "returned", column.tolist())  # a reward model has no None
        returned.append(values)
        for value in values:
            if value is not None and not math.isfinite(value):
                wrong.append(f"the reward {name} = {float(value)}")
    for message in gather_object([str(failure).rstrip(".") for failure in failures]):
        cause = failures[0].__cause__ if failures else None
        raise RunError(f"{message}; correct it, then {save_finished_step(trainer)}.") from cause
    wrong = gather_object(wrong[:1])
    sums = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
    if not wrong and not sums.square().sum().isfinite():  # the group's std overflows
        wrong = [f"the advantage for a reward of {rewards.nan_to_num().abs().max():.3g}"]
    if wrong:
        save_finished_step(trainer)
        columns = "prompt", "completion", *names
        rows = [dict(zip(columns, row, strict=True)) for row in zip(prompts, completions, *returned, strict=False)]
        raise non_finite_error(wrong[0], trainer, rows=rows, mend="a reward function that returns numbers, or None")
    if rewards.isnan().all():
        raise RunError(
            f"{' and '.join(names)} returned None for all {len(rewards)} completions of step "
            f"{trainer.state.global_step + 1}, so none has a reward: return a number where it applies, then "
            f"{save_finished_step(trainer)}."
        )


class CompleteCheckpoints(TrainerCallback):
    """Write the manifest of a checkpoint when all its files are written; a checkpoint without one is not resumed.

    Only then ``save_total_limit`` deletes older ones: Transformers' trainer does so earlier, and by file times. Add it
    after the callbacks that write into a checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.limit: int | None = None
        self.random: list[Any] = []  # how each random state of the end of the last step is restored

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.random = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
            partial(torch.set_rng_state, torch.get_rng_state()),
        ]
        if torch.cuda.is_initialized():
            self.random.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def save_finished_step(self) -> None:
        """Write the checkpoint of the last step, as if it had been its turn; within the next one."""
        trainer = self.trainer
        run = RunDirectory(trainer.args.output_dir)
        if not self.random or damage(run.checkpoint(trainer.state.global_step)) is None:
            return
        for restore in self.random:
            restore()
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.limit = args.save_total_limit
        args.save_total_limit = None
        if not state.global_step:
            return
        if is_main_process():
            RunDirectory(args.output_dir).set_aside(state.global_step)  # what is there is not that of the next step
        state.compute_steps(args, state.max_steps)  # Transformers keeps logging, eval and save steps of the checkpoint
        # TRL's SFTTrainer restarts the count at zero.
        counts = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
        self.trainer._total_train_tokens = int(counts[-1]) if counts else 0

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each process writes its random state
        if is_main_process():
            checkpoint = RunDirectory(args.output_dir).checkpoint(state.global_step)
            (checkpoint / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
            write_manifest(checkpoint)
            if self.limit:
                rotate(checkpoint.parent, self.limit)

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        args.save_total_limit = self.limit
