"""The evaluation of held-out rows while training: its batches, and random numbers apart from those of training."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import set_seed


def eval_batches(rows: int, group_size: int, batch_size: int, processes: int, rank: int) -> list[tuple[list[int], int]]:
    """The rows that one process evaluates, G times each, batch by batch; with each batch its prompts in all processes.

    A batch consists of whole groups, split evenly and in rank order. Prompts that are left over and cannot be split
    evenly go to every process: these have a group in each, and count once.
    """
    unit = processes // math.gcd(group_size, processes)  # prompts whose completions divide evenly
    even, prompts = rows - rows % unit, batch_size * processes // group_size
    batches = []
    for start in range(0, even, prompts):
        stop = min(start + prompts, even)
        repeated = [row for row in range(start, stop) for _ in range(group_size)]
        share = len(repeated) // processes
        batches.append((repeated[rank * share : (rank + 1) * share], stop - start))
    if rows > even:
        batches.append(([row for row in range(even, rows) for _ in range(group_size)], rows - even))
    return batches


@contextmanager
def isolated_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, Python, NumPy and PyTorch start from a seed; afterwards they continue where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
