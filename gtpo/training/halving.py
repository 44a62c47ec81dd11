"""The first micro-batch of a run may be too large for the memory: it is split in halves, once."""

import logging
from typing import Any

import torch
import trl
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

logger = logging.getLogger(__name__)


class Halving(trl.GRPOTrainer):
    """Methods of a GRPOTrainer that trains each micro-batch in ``_parts``, with a backward pass each.

    The gradient is that of the whole micro-batch: ``compute_loss`` divides by ``_parts`` too. ``bnpo`` averages over a
    micro-batch, which is not split.
    """

    _step: int  # TRL's
    _parts = 1
    _part = 0
    _has_trained = False  # a micro-batch fits
    _micro_batch: Any = None  # of the current step, as TRL prepares it

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        try:
            loss = self._train_parts(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError:
            if not self._can_halve():
                raise
        else:
            self._has_trained = True
            self._micro_batch = None
            return loss
        self._halve(model)  # here the error has released what it held
        return self.training_step(model, inputs, num_items_in_batch)

    def _train_parts(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        state = self.accelerator.gradient_state
        is_last = self.accelerator.sync_gradients
        step = self._step
        losses = []
        times = self._metrics["train"]["step_time"]
        steps = len(times)
        for part in range(self._parts):
            self._part = part
            self._step = step  # TRL counts micro-batches
            state._set_sync_gradients(is_last and part == self._parts - 1)
            losses.append(super().training_step(model, inputs, num_items_in_batch))
        if len(times) > steps:  # one entry a part, at the end of a step
            times[steps:] = [sum(times[steps:])]
        return torch.stack(losses).sum()

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if self._micro_batch is None:
            self._micro_batch = super()._prepare_inputs(generation_batch)
        return split_tensor_dict(self._micro_batch, self._parts)[self._part]

    def _can_halve(self) -> bool:
        """Whether it is the first micro-batch that did not fit, and not what generated it."""
        is_first = self._parts == 1 and not self._has_trained and self._micro_batch is not None
        return is_first and self.args.per_device_train_batch_size % 2 == 0 and self.loss_type != "bnpo"

    def _halve(self, model: Any) -> None:
        rows = self.args.per_device_train_batch_size
        logger.warning(
            "out of memory with micro-batches of %d completions: each is trained in halves from now on "
            "(--per_device_train_batch_size %d)",
            rows,
            rows // 2,
        )
        self._parts = 2
        self.recorder.unread = []  # metrics of the part that failed
        model.zero_grad()
        clear_device_cache(garbage_collection=True)
