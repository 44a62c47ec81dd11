"""Random numbers that leave those of training as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import set_seed


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, Python, NumPy and PyTorch start from a seed; afterwards they continue where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
