"""Why a resumed run is the one without the interruption: the order of each epoch, checkpoints between generations."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

logger = logging.getLogger(__name__)


class EpochOrder(Sampler[int]):
    """The order of TRL's RepeatSampler, also for a run that begins with a later epoch.

    TRL draws one order after the other from a generator, so a resumed run would have that of the first epoch again.
    Epoch e has the e-th permutation of the seed, whichever epoch the run began with.
    """

    def __init__(self, of_trl: Any, trainer: Any) -> None:
        self.of_trl = of_trl
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        order = self.of_trl
        if order.shuffle:
            order.generator.manual_seed(order.seed)
            for _ in range(int(self.trainer.state.epoch)):  # e where epoch e begins, e and a part where it goes on
                torch.randperm(order.num_samples, generator=order.generator)
        yield from order

    def __len__(self) -> int:
        return len(self.of_trl)


class WholeGenerations(TrainerCallback):
    """Checkpoints of a GRPOTrainer are written where its completions are used up, so that none has to keep them.

    A checkpoint that is due between two updates on one generation is written after the last of them. Of a run that ends
    in between the newest one is that of the end of the generation before.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.is_due = False

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):  # type: ignore[no-untyped-def]
        """TRL counts micro-batches from 0 again."""
        self.trainer.recorder.step_ended()
        self.is_due = False
        steps, accumulation = state.global_step, args.gradient_accumulation_steps
        trainer = self.trainer
        trainer._step = steps * accumulation
        if has_length(train_dataloader) and len(train_dataloader):  # the last step of an epoch may have fewer
            of_epoch = len(train_dataloader)
            epochs, rest = divmod(steps, math.ceil(of_epoch / accumulation))
            trainer._step = epochs * of_epoch + rest * accumulation
        if not trainer.generation_is_used_up:  # an earlier revision wrote the checkpoint
            logger.warning(
                "the checkpoint of step %d lies between two updates on one batch of completions: the next step samples "
                "another one",
                steps,
            )

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.trainer.recorder.step_ended()
        self.is_due |= control.should_save
        control.should_save = False
        if self.trainer.generation_is_used_up:
            updates = math.ceil(self.trainer.micro_batches_of_generation / args.gradient_accumulation_steps)
            is_last = state.global_step + updates > state.max_steps and args.save_strategy != "no"
            control.should_save = self.is_due or is_last
            self.is_due = False
