"""What can befall a run, and what is kept of it: signals, numbers that are not finite, half-written checkpoints.

Callbacks for any trainer of Transformers; ``tracking.track`` puts them on. Each process of a run sees a fault at its
own time, so the processes agree before they act on it.
"""

import json
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from gtpo.distributed import on_any_process
from gtpo.errors import RunError
from gtpo.runs import MANIFEST, write_atomically

logger = logging.getLogger(__name__)


class StopOnSignal(TrainerCallback):
    """Ctrl-C and SIGTERM: the step is finished, a checkpoint written, and the script exits with 130 or 143.

    A second signal leaves at once. To be added last: it ends the process when the other callbacks are done.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if threading.current_thread() is threading.main_thread():  # others cannot be told of signals
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()
        logger.warning("\nfinishing this step and writing a checkpoint; once more leaves at once")

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if on_any_process(self.received is not None, args.device):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self._restore()
        if state.global_step < state.max_steps and on_any_process(self.received is not None, args.device):
            if state.is_world_process_zero:
                logger.warning("stopped after step %d: --resume %s goes on", state.global_step, args.output_dir)
            raise SystemExit(128 + (self.received or signal.SIGTERM))


class StopOnNonFiniteGradient(TrainerCallback):
    """Ends the run before the optimizer takes a gradient that is not finite.

    With fp16 such gradients are part of the loss scale's search, and the step is skipped by Accelerate.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if args.fp16:
            return
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all() if gradients else True
        if on_any_process(not bool(finite), args.device):
            batches = getattr(self.trainer, "_buffered_inputs", None) or []
            raise not_finite("the gradient", self.trainer, batches)


def not_finite(what: str, trainer: Any, batches: list[dict[str, Any]]) -> RunError:
    """The error for a number that is not finite, after its batches and their texts have been put into the run.

    Args:
        what: What is not finite.
        trainer: Whose step it is.
        batches: The micro-batches of the step, as TRL's trainer holds them.
    """
    step = trainer.state.global_step + 1
    way_out = (
        f"--resume {trainer.args.output_dir} goes on from the last checkpoint, at its learning rate: lower "
        "--max_grad_norm or --temperature with it, or start anew with a lower --learning_rate."
    )
    if not batches:  # SFT
        return RunError(f"{what} of step {step} is not finite, so the run stops before it is learned from. {way_out}")
    folder = Path(trainer.args.output_dir) / f"not-finite-step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    rank = trainer.accelerator.process_index
    _save_batches(batches, folder / f"batch-{rank}.safetensors")
    texts = [trainer.processing_class.batch_decode(batch["completion_ids"]) for batch in batches]
    (folder / f"completions-{rank}.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False))
    return RunError(
        f"{what} of step {step} is not finite, so the run stops before it is learned from; the batch and its "
        f"completions lie in {folder}. {way_out}"
    )


def _save_batches(batches: list[dict[str, Any]], file: Path) -> None:
    """The tensors of micro-batches, each under its batch's index and its own name."""
    tensors = {f"{i}.{k}": v for i, batch in enumerate(batches) for k, v in batch.items() if isinstance(v, Tensor)}
    save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)


class WholeCheckpoints(TrainerCallback):
    """Lists the files of a checkpoint when all are written; :func:`is_whole` believes no other checkpoint.

    Keeps what TRL's trainer would forget: completions that several optimizer steps learn from (``num_iterations`` or
    ``steps_per_generation``), where a checkpoint falls between two of these steps. To be added after the callbacks that
    write into a checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if not state.global_step:
            return
        # TRL's SFTTrainer counts from zero again.
        counts = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
        self.trainer._total_train_tokens = int(counts[-1]) if counts else 0
        if not hasattr(self.trainer, "_buffered_inputs"):
            return
        self.trainer._step = state.global_step * args.gradient_accumulation_steps
        file = self._file(args, state)
        if file.is_file():
            for name, column in json.loads(file.with_suffix(".json").read_text()).items():  # TRL's table of completions
                kept = self.trainer._logs[name]
                for key, values in column.items() if isinstance(column, dict) else [(None, column)]:
                    (kept if key is None else kept[key]).extend(values)
            batches: list[dict[str, Tensor]] = [{} for _ in range(args.steps_per_generation)]
            for name, tensor in load_file(file, device=str(args.device)).items():
                index, _, key = name.partition(".")
                batches[int(index)][key] = tensor
            self.trainer._buffered_inputs = batches

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        buffer = getattr(self.trainer, "_buffered_inputs", None)
        if buffer and self.trainer._step % (args.steps_per_generation * args.num_iterations):
            _save_batches(buffer, self._file(args, state))
            table = {
                name: {key: list(values) for key, values in column.items()}
                if isinstance(column, dict)
                else list(column)
                for name, column in self.trainer._logs.items()
            }
            self._file(args, state).with_suffix(".json").write_text(json.dumps(table))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each process writes its own random state
        if state.is_world_process_zero:
            folder = _checkpoint(args, state)
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
            files = [path for path in folder.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
            write_atomically(folder / MANIFEST, json.dumps(sizes, indent=1))

    def _file(self, args: Any, state: Any) -> Path:
        return _checkpoint(args, state) / f"generated-{args.process_index}.safetensors"


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
