"""How often a training step waits for the device: operations that return a value or a size to the host, and gathers."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from helpers.canned import GROUP
from helpers.scripts import ROOT
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"}
INDEXED = {"index", "index_put", "index_put_"}
LIBRARIES = {"trl", "transformers", "peft"}
STEPS = 2


def note(count: Counter) -> None:
    """Count for the line of ours that asks, unless it is a library that ours called."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "gtpo") or path == ROOT / "gtpo_loss.py":
            count[f"{path.relative_to(ROOT)}:{frame.f_lineno}"] += 1
            return
        if LIBRARIES & {*path.parts}:
            return


def counted(whole: Any, count: Counter) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(count)
        return whole(*args, **kwargs)

    return call


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name in INDEXED else ()
        if name in WAITS or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            note(self.count)
        return function(*args, **(kwargs or {}))


def counts_of(trainer: Any, monkeypatch: MonkeyPatch) -> tuple[Counter, Counter]:
    """Waits and gathers of all steps, by lines of ours."""
    gathers = Counter()
    with monkeypatch.context() as patch, Waits() as waits:
        for name in ("tolist", "cpu"):  # a transfer each on a GPU, and nothing on a CPU
            patch.setattr(Tensor, name, counted(getattr(Tensor, name), waits.count))
        patch.setattr(trainer.accelerator, "gather", counted(trainer.accelerator.gather, gathers))
        trainer.train()
    return waits.count, gathers


def test_a_micro_batch_waits_for_the_head_alone(build: Any, monkeypatch: MonkeyPatch) -> None:
    """Metrics, masks and tags are read once per step; the head splits its rows and looks for unlikely targets."""
    settings = {"max_steps": STEPS, "gradient_checkpointing": True, "log_completions": True}
    together = build("gtpo", **settings)
    single = build("gtpo", per_device_train_batch_size=1, gradient_accumulation_steps=GROUP, **settings)
    waits_together, gathers_together = counts_of(together, monkeypatch)
    waits, gathers = counts_of(single, monkeypatch)
    more = waits - waits_together
    assert more.total() == 2 * (GROUP - 1) * STEPS, more
    assert waits_together.total() <= 29 * STEPS, waits_together
    assert gathers == gathers_together and gathers.total() <= 15 * STEPS, gathers
