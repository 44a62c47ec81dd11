"""The evaluation of held-out rows while training: its batches, and random numbers separate from those of training."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import trl
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from gtpo.training.batch import Numbers, isolated_rng

_OF_GROUPS = ("conflict_tokens", "conflict_fraction", "frac_reward_zero_std")  # metrics that compare completions


def eval_batches(rows: int, group_size: int, batch_size: int, processes: int, rank: int) -> list[tuple[list[int], int]]:
    """The rows that one process evaluates, G times each, batch by batch; with each batch its prompts in all processes.

    A batch consists of whole groups, split evenly and in rank order. Prompts that are left over and cannot be split
    evenly have as many groups as make them even, and count once.
    """
    unit = processes // math.gcd(group_size, processes)  # groups whose completions divide evenly
    even = rows - rows % unit
    at_once = batch_size * processes // group_size  # groups of a batch in all processes
    batches = []
    for first, last, copies in ((0, even, 1), (even, rows, unit)):
        step = at_once // copies
        for start in range(first, last, step):
            prompts = range(start, min(start + step, last))
            repeated = np.repeat(prompts, copies * group_size)
            batches.append((np.array_split(repeated, processes)[rank].tolist(), len(prompts)))
    return batches


class HeldOutEvaluation(trl.GRPOTrainer):
    """Methods of a GRPOTrainer for held-out rows: each prompt counts once, and training is not disturbed."""

    _logs: Any  # TRL's
    log_completions: bool
    _weighted: dict[str, list[tuple[float, int]]]  # of an evaluation: metric -> its values, each with its prompts

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Numbers:
        """TRL's evaluation, after which training continues bit-identically as without it.

        Each evaluation draws the same random numbers. TRL's table stays that of training, to which TRL would add the
        rows. Of several sets each is an evaluation, whose metrics have its name: ``eval_<name>_reward``.
        """
        evaluate = partial(super().evaluate, eval_dataset, ignore_keys, metric_key_prefix)
        if isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict):
            return evaluate()  # which calls this method for each of them
        with self._undisturbed():
            return evaluate()

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """The metrics of other rows, without predictions; training continues as without it."""
        with self._undisturbed():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Inside, random numbers are those of the seed and the table is not written; afterwards both are as before."""
        table = copy.deepcopy(self._logs)
        shown = self.log_completions
        self.log_completions = False
        try:
            seed = self.args.seed + self.accelerator.process_index
            with isolated_rng(seed, self.accelerator.device):
                yield
        finally:
            self._logs = table
            self.log_completions = shown

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Transformers' loop, and the mean of each metric over the prompts; TRL's would be over the batches."""
        self._weighted = defaultdict(list)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, pairs in self._weighted.items():
            total = sum(value * prompts for value, prompts in pairs)
            count = sum(prompts for _, prompts in pairs)
            output.metrics[f"{metric_key_prefix}_{name}"] = total / count if count else None
        return output

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of :func:`eval_batches`; Accelerate would fill the last one with duplicate rows."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        if rows is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        if not isinstance(rows, Sized):
            rows = list(rows)  # a stream
        batches = eval_batches(
            len(rows),
            self.num_generations_eval,
            self.args.per_device_eval_batch_size,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        indices, prompts = zip(*batches, strict=True)
        counts = iter(prompts)
        collate = self._get_collator_with_removed_columns(lambda batch: batch, "evaluation")
        return DataLoader(rows, batch_sampler=indices, collate_fn=lambda batch: (collate(batch), next(counts)))

    get_test_dataloader = get_eval_dataloader  # of predict

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        """Generate and score one batch, and keep each of its metrics with the number of its prompts."""
        rows, prompts = inputs
        loss, _, _ = super().prediction_step(model, rows, *args, **kwargs)
        measured = self._metrics["eval"]
        measured["loss"].append(self.accelerator.gather(loss).mean().item())
        if self.num_generations_eval == 1:
            for name in _OF_GROUPS:
                measured.pop(name, None)
        for name, values in measured.items():
            self._weighted[name] += [(value, prompts) for value in values if not math.isnan(value)]
        measured.clear()
        return None, None, None
