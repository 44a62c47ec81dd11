"""What stops a run (a signal, a value that is not finite, rewards that cannot be used), and complete checkpoints.

The processes of a run see a fault at different times, so they agree before they act on it.
"""

import json
import logging
import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from gtpo.arguments import Values
from gtpo.errors import RunError
from gtpo.files import apply_umask
from gtpo.processes import any_process, is_main_process
from gtpo.runs.directory import RunDirectory, damage, how_to_continue, rotate, write_manifest

logger = logging.getLogger(__name__)

CHANGED = ("--changed_reward", "true")  # flags of a run that goes on after its reward was corrected


class StopOnSignal(TrainerCallback):
    """On Ctrl-C, SIGTERM, SIGHUP or SIGUSR2 finish the step, write a checkpoint, exit with 128 plus its number.

    With several updates on one generation it finishes the last of them (``gtpo/training/generations.py``).
    SIGHUP stays ignored where it is, as under nohup. SIGUSR2 is Slurm's, before preemption or the time limit (SIGUSR1
    is NCCL's): it may be sent twice, and never exits immediately; another second signal does. Add it last.
    """

    def __init__(self, trainer: Any, run: RunDirectory) -> None:
        self.trainer = trainer
        self.run = run
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
        is_used_up = getattr(self.trainer, "generation_is_used_up", True)  # SFT has no generations
        if any_process(self.received is not None, args.device) and is_used_up:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.restore()
        if state.global_step < state.max_steps and any_process(self.received is not None, args.device):
            if is_main_process():
                how = how_to_continue(self.run)
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
        recorder = getattr(self.trainer, "recorder", None)  # SFT has none
        batches = recorder.inputs if recorder else []
        raise non_finite_error(f"{what} ({name})", self.trainer, batches)


def run_of(trainer: Any) -> RunDirectory:
    """The run of a trainer; that of a library user lacks the files of a script."""
    return RunDirectory(trainer.args.output_dir)


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
    run = run_of(trainer)
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


def check_rewards(trainer: Any, rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
    """RunError, with the last finished step saved, if rewards cannot be used.

    Every process has to call it. The error is for what a reward function has raised, a value that is not finite, and a
    batch without a reward. ``rewards`` is what TRL has made of the rewards of all processes, shape (B, number of
    functions), with NaN for None; prompts and completions are of this process.
    """
    functions = trainer.reward_funcs
    raise_together(trainer, [each.failure for each in functions if getattr(each, "failure", None)])
    names = trainer.reward_func_names
    returned = []  # by function, of this process; a reward model has no None
    for function, column in zip(functions, rewards.T, strict=True):
        returned.append(getattr(function, "returned", column.tolist()))
    wrong = gather_object(_first_not_finite(names, returned)) or _overflow(trainer, rewards)
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


def raise_together(trainer: Any, errors: Sequence[RunError]) -> None:
    """Raise the first error of a user's function on all processes, with the last finished step saved.

    Every process has to call it, with its own errors or none.
    """
    messages = gather_object([str(error).rstrip(".") for error in errors])
    if messages:
        cause = errors[0].__cause__ if errors else None
        raise RunError(f"{messages[0]}; correct it, then {save_finished_step(trainer)}.") from cause


def _first_not_finite(names: Sequence[str], returned: Sequence[Sequence[float | None]]) -> list[str]:
    """The first value of the functions that is NaN or infinite, as text; empty without one."""
    for name, values in zip(names, returned, strict=True):
        for value in values:
            if value is not None and not math.isfinite(value):
                return [f"the reward {name} = {float(value)}"]
    return []


def _overflow(trainer: Any, rewards: Tensor) -> list[str]:
    """A reward for which the std of a group overflows, as text; empty without one."""
    sums = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)  # (B,)
    if sums.square().sum().isfinite():
        return []
    return [f"the advantage for a reward of {rewards.nan_to_num().abs().max():.3g}"]


def save_finished_step(trainer: Any) -> str:
    """Write the checkpoint of the last finished step, with the random numbers of the next one; how to continue."""
    run = run_of(trainer)
    step = trainer.state.global_step
    if run.is_ours and step and damage(run.checkpoint(step), contents=False) is not None:
        trainer.recorder.drop_unfinished()
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    return how_to_continue(run, *CHANGED)


class CompleteCheckpoints(TrainerCallback):
    """Write the manifest of a checkpoint when all its files are written; a checkpoint without one is not resumed.

    Only then ``save_total_limit`` deletes older ones: Transformers' trainer does so earlier, and by file times. Add it
    after the callbacks that write into a checkpoint.
    """

    def __init__(self, trainer: Any, run: RunDirectory) -> None:
        self.trainer = trainer
        self.run = run
        self.limit: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.limit = args.save_total_limit
        args.save_total_limit = None
        if not state.global_step:
            return
        if is_main_process():
            self.run.set_aside(state.global_step)  # what is there is not that of the next step
        state.compute_steps(args, state.max_steps)  # Transformers keeps logging, eval and save steps of the checkpoint
        # TRL's SFTTrainer restarts the count at zero.
        counts = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
        self.trainer._total_train_tokens = int(counts[-1]) if counts else 0

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each process writes its random state
        if is_main_process():
            checkpoint = self.run.checkpoint(state.global_step)
            (checkpoint / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
            write_manifest(checkpoint)
            if self.limit:
                rotate(checkpoint.parent, self.limit)

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        args.save_total_limit = self.limit
