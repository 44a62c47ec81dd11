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
STEPS = 2


def asker() -> str:
    """Who called: a line of ours as file:line, or a library that ours called."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "gtpo") or path == ROOT / "gtpo_loss.py":
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        for library in ("trl", "transformers", "peft"):
            if library in path.parts:
                return library
    return "other"


class Waits(TorchDispatchMode):
    """Counts them by who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if name in WAITS or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            self.count[asker()] += 1
        return function(*args, **(kwargs or {}))


def of_ours(count: Counter[str]) -> int:
    return sum(number for place, number in count.items() if ".py:" in place)


def counts_of(trainer: Any, monkeypatch: MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Waits and gathers of all steps."""
    waits = Waits()
    gathers = Counter[str]()

    def counted(whole: Any, count: Counter[str]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[asker()] += 1
            return whole(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, waits:
        for name in ("tolist", "cpu"):  # a transfer each on a GPU, and nothing on a CPU
            patch.setattr(Tensor, name, counted(getattr(Tensor, name), waits.count))
        patch.setattr(trainer.accelerator, "gather", counted(trainer.accelerator.gather, gathers))
        trainer.train()
    return waits.count, gathers


def test_a_micro_batch_waits_for_the_head_alone(build: Any, monkeypatch: MonkeyPatch) -> None:
    """Metrics, masks and tags are read once per step; the head splits its rows and looks for unlikely targets."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the head's threads would not be seen
    found = {}
    for rows in (1, GROUP):
        trainer = build(
            "gtpo",
            str(rows),
            max_steps=STEPS,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=GROUP // rows,
            gradient_checkpointing=True,
            log_completions=True,
        )
        found[rows] = counts_of(trainer, monkeypatch)
    torch.set_num_threads(threads)
    (waits, gathers) = found[1]
    (waits_together, gathers_together) = found[GROUP]
    more = waits - waits_together
    assert of_ours(more) == 2 * (GROUP - 1) * STEPS, more.most_common()
    assert of_ours(waits_together) <= 27 * STEPS, waits_together.most_common()
    assert of_ours(gathers) == of_ours(gathers_together) == 4 * STEPS, gathers.most_common()
