"""A batch of completions for several optimizer steps (``num_iterations``): a checkpoint between them stores it."""

import logging
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
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
            batches = []
            for batch in self._buffered_inputs:
                batches.append({name: _to(value, torch.device("cpu")) for name, value in batch.items()})
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            torch.save(batches, self._file_in(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        self._step = state.global_step * self.args.gradient_accumulation_steps % self._generate_every()
        if not self._step:
            return
        batches = []
        if self._file_in(folder).is_file():
            batches = torch.load(self._file_in(folder), weights_only=True)
        rows = [len(batch["completion_ids"]) for batch in batches]
        if rows != [self.args.per_device_train_batch_size] * self.args.steps_per_generation:
            logger.warning("%s does not have its batch of completions: the next step samples another one", folder)
            return
        for batch in batches:
            for name in batch.keys() - {"host_masks"}:
                batch[name] = _to(batch[name], self.accelerator.device)
        self._buffered_inputs = batches

    def _generate_every(self) -> int:
        """Micro-batches that a process trains for each batch that it samples."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _file_in(self, folder: Path) -> Path:
        return folder / f"reused-batch-{self.accelerator.process_index}.pt"


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
