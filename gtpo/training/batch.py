"""TRL's batches: how rows are padded, gathered and counted, and random numbers apart from those of training."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed
from trl.trainer.utils import pad

Batch = dict[str, Any]  # tensors of TRL's trainer by name: GRPOTrainer.objective lists them
Row = dict[str, Any]  # of a dataset, or of what is logged
Metrics = dict[str, Tensor]  # 0-d, by name
Ids = list[list[int]]  # tokens without padding
Spans = tuple[Tensor, Tensor]  # M_fw and M_bw, (B, T) each
Scores = tuple[Tensor, Tensor]  # ln pi and H of tokens


def padded_batch(prompt_ids: Ids, completion_ids: Ids, pad_token_id: int, device: torch.device) -> Batch:
    """TRL's layout: prompts (B, P) padded to the left, completions (B, T) to the right, and their masks."""
    batch = {}
    for name, lists, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
        batch[f"{name}_ids"], batch[f"{name}_mask"] = padded(lists, side, pad_token_id, device)
    return batch


def padded(lists: Ids, side: str, pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and their mask. Shape (B, T) each."""
    ids = [torch.tensor(row, dtype=torch.long) for row in lists]
    mask = pad([torch.ones_like(row) for row in ids], padding_value=0, padding_side=side)
    return pad(ids, padding_value=pad_token_id, padding_side=side).to(device), mask.to(device)


def gather_rows(accelerator: Any, batch: Batch) -> list[Tensor]:
    """Completion ids and mask of all processes, zero-padded to the longest. Shape (B, T) each, in rank order."""
    parts = batch["completion_ids"], batch["completion_mask"]
    return [accelerator.gather(accelerator.pad_across_processes(part, dim=1)) for part in parts]


def group_size_of(trainer: Any) -> int:
    """G of the batch at hand: of training, or of an evaluation."""
    return int(trainer.num_generations if trainer.model.training else trainer.num_generations_eval)


def log_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add values to those whose mean TRL logs."""
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in metrics.items():
        logged[name].append(value)


@contextmanager
def isolated_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Inside, Python, NumPy and PyTorch start from a seed, if there is one; afterwards they are where they were."""
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if seed is not None:
            set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
