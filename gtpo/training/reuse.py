"""A batch of completions for several optimizer steps (``num_iterations``): a checkpoint between them stores it."""

import logging
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import send_to_device
from transformers import TrainerState

logger = logging.getLogger(__name__)


class ReusedBatch(trl.GRPOTrainer):
    """Methods of a GRPOTrainer that is resumed on the batch that its checkpoint was trained on.

    TRL would sample another one, and shift all later ones.
    """

    _step: int  # TRL's: micro-batches
    _buffered_inputs: Any

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._step % self._generate_every():
            file = self._file_in(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")
            torch.save(send_to_device(self._buffered_inputs, "cpu"), file)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        step = TrainerState.load_from_json(f"{resume_from_checkpoint}/trainer_state.json").global_step
        self._step = step * self.args.gradient_accumulation_steps % self._generate_every()
        file = self._file_in(resume_from_checkpoint)
        if not self._step:
            return
        batches = torch.load(file, weights_only=True) if file.is_file() else []
        rows = self.args.per_device_train_batch_size
        if [len(batch["completion_ids"]) for batch in batches] != [rows] * self.args.steps_per_generation:
            logger.warning("%s does not have its batch of completions: the next step samples another one", file.parent)
            return
        self._buffered_inputs = send_to_device(batches, self.accelerator.device)
        for batch in self._buffered_inputs:
            batch["host_masks"] = batch["host_masks"].cpu()

    def _generate_every(self) -> int:
        """Micro-batches that a process trains for each batch that it samples."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _file_in(self, checkpoint: str) -> Path:
        return Path(checkpoint, f"reused-batch-{self.accelerator.process_index}.pt")
