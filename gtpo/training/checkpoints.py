"""Checkpoints that are complete, and one of the last finished step of a run that stops within the next."""

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from gtpo.processes import is_main_process
from gtpo.runs.directory import RunDirectory, damage, how_to_continue, rotate, write_manifest

CHANGED = ("--changed_reward", "true")  # flags of a run that goes on after its reward was corrected


def save_finished_step(trainer: Any) -> str:
    """Write a checkpoint of the last finished step of a run that stops within one; how the run continues."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, CompleteCheckpoints):
            callback.save_finished_step()
    return how_to_continue(RunDirectory(trainer.args.output_dir), *CHANGED)


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
