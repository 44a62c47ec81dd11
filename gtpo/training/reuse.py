"""A batch of completions for several optimizer steps (``num_iterations``): a checkpoint between them stores it."""

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)


class ReusedBatch(TrainerCallback):
    """A GRPOTrainer that is resumed goes on with the batch that its checkpoint was trained on.

    TRL would sample another one, and shift all later ones.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.trainer._step % self._generate_every():
            checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(send_to_device(self.trainer._buffered_inputs, "cpu"), self._file_in(checkpoint))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        trainer = self.trainer
        if not state.global_step:
            return
        trainer._step = state.global_step * args.gradient_accumulation_steps  # micro-batches: TRL counts from 0 again
        if not trainer._step % self._generate_every():
            return
        file = self._file_in(trainer.resumed_from)
        batches = torch.load(file, weights_only=True) if file.is_file() else []
        rows = args.per_device_train_batch_size
        if [len(batch["completion_ids"]) for batch in batches] != [rows] * args.steps_per_generation:
            logger.warning("%s does not have its batch of completions: the next step samples another one", file.parent)
            return
        trainer._buffered_inputs = send_to_device(batches, trainer.accelerator.device)
        for batch in trainer._buffered_inputs:
            batch["host_masks"] = batch["host_masks"].cpu()

    def _generate_every(self) -> int:
        """Micro-batches that a process trains for each batch that it samples."""
        return int(self.trainer.args.steps_per_generation * self.trainer.num_iterations)

    def _file_in(self, checkpoint: Path) -> Path:
        return checkpoint / f"reused-batch-{self.trainer.accelerator.process_index}.pt"
