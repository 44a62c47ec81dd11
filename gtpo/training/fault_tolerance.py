"""Fault-tolerance callbacks for any trainer of Transformers: signals, non-finite values, complete checkpoints.

The processes of a run see a fault at different times, so they agree before they act on it.
"""

import json
import logging
import math
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from gtpo.errors import RunError
from gtpo.files import apply_umask
from gtpo.processes import any_process
from gtpo.runs.checkpoints import rotate, write_manifest
from gtpo.runs.directory import RunDirectory, resume_command

logger = logging.getLogger(__name__)


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
            if state.is_world_process_zero:
                how = resume_command(RunDirectory(args.output_dir))
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

    def _check(self, what: str, tensors: dict[str, Tensor], args: Any) -> None:
        # one transfer to the host for all tensors; of a sharded one each process checks its part
        parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
        flags = [part.isfinite().all() for part in parts]
        if any_process(bool(flags) and not bool(torch.stack(flags).all()), args.device):
            name = next((n for n, flag in zip(tensors, flags, strict=True) if not flag), "on another process")
            batches = getattr(self.trainer, "_buffered_inputs", None) or []
            raise non_finite_error(f"{what} ({name})", self.trainer, batches)


def non_finite_error(
    what: str,
    trainer: Any,
    batches: Sequence[dict[str, Any]] = (),
    rows: Sequence[dict[str, Any]] = (),
    mend: str = "a lower --learning_rate, --max_grad_norm or --temperature",
) -> RunError:
    """The error for a non-finite value, after what is known of the step is saved in the run directory.

    ``batches``: the micro-batches of the step, as TRL's trainer stores them. ``rows``: prompts, completions and rewards
    of a step that has no batch yet. ``mend``: what to change before the run continues.
    """
    step, run = trainer.state.global_step + 1, RunDirectory(trainer.args.output_dir)
    saved = ""
    if batches or rows:  # SFT has neither
        directory, rank = run.non_finite_dump(step), trainer.accelerator.process_index
        directory.mkdir(parents=True, exist_ok=True)
        saved = f"; its batch is saved in {directory}"
    if rows:
        (directory / f"rows-{rank}.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    if batches:
        tensors = {f"{i}.{k}": v for i, batch in enumerate(batches) for k, v in batch.items() if isinstance(v, Tensor)}
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        save_file(copies, directory / f"batch-{rank}.safetensors")  # <index of the micro-batch>.<name>
        texts = [trainer.processing_class.batch_decode(batch["completion_ids"]) for batch in batches]
        (directory / f"completions-{rank}.json").write_text(
            json.dumps(texts, indent=1, ensure_ascii=False), encoding="utf-8"
        )
        apply_umask(directory)
    again = f"Start again with --overwrite and {mend}."
    if run.has_checkpoint:
        again = f"Continue from the last checkpoint with `{resume_command(run)}` and {mend}, or start again."
    return RunError(f"{what} is not finite in step {step}: the run stops, no checkpoint contains it{saved}. {again}")


def check_rewards(trainer: Any, rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
    """Raise RunError for rewards that are not finite, or a batch without a reward; every process has to call it.

    ``rewards`` is what TRL has made of the rewards of all processes, shape (B, number of functions); prompts and
    completions are of this process.
    """
    names = trainer.reward_func_names
    returned = [  # TRL reads NaN as None: no reward for this completion
        getattr(function, "returned", rewards[:, column].tolist())  # a reward model has no None
        for column, function in enumerate(trainer.reward_funcs)
    ]
    flat = ((name, float(v)) for name, values in zip(names, returned, strict=True) for v in values if v is not None)
    wrong = next((f"the reward {name} = {value}" for name, value in flat if not math.isfinite(value)), None)
    wrong = next(filter(None, gather_object([wrong])), None)
    if wrong is None and not (rewards * trainer.reward_weights.to(rewards.device)).nansum(1).square().sum().isfinite():
        wrong = f"the advantage for a reward of {rewards.nan_to_num().abs().max():.3g}"  # the group's std overflows
    if wrong is not None:
        columns = ["prompt", "completion", *names]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(prompts, completions, *returned, strict=False)]
        raise non_finite_error(wrong, trainer, rows=rows, mend="a reward function that returns numbers, or None")
    if rewards.isnan().all():
        raise RunError(
            f"{' and '.join(names)} returned None for all {len(rewards)} completions of step "
            f"{trainer.state.global_step + 1}, so none has a reward: return a number where the reward applies."
        )


class CompleteCheckpoints(TrainerCallback):
    """Write the manifest of a checkpoint when all its files are written; a checkpoint without one is not resumed.

    Only then ``save_total_limit`` deletes older ones: Transformers' trainer does so earlier, and by file times. Add it
    after the callbacks that write into a checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.limit: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.limit, args.save_total_limit = args.save_total_limit, None
        if not state.global_step:
            return
        state.compute_steps(args, state.max_steps)  # Transformers keeps logging, eval and save steps of the checkpoint
        # TRL's SFTTrainer restarts the count at zero.
        counts = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
        self.trainer._total_train_tokens = int(counts[-1]) if counts else 0
        if hasattr(self.trainer, "_buffered_inputs"):  # TRL generates again where several steps share completions
            self.trainer._step = state.global_step * args.gradient_accumulation_steps

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each process writes its random state
        if state.is_world_process_zero:
            checkpoint = RunDirectory(args.output_dir).checkpoint(state.global_step)
            (checkpoint / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
            write_manifest(checkpoint)
            if self.limit:
                rotate(checkpoint.parent, self.limit)

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        args.save_total_limit = self.limit
