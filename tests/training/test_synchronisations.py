"""How often a training step waits for the device: the operations that return a value or a size to the host."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, make_trainer
from helpers.scripts import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"}
STEPS = 2


class Waits(TorchDispatchMode):
    """Counts them by who asked: (ours, or TRL, or another library's, and the function of ours)."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITS or by_mask:
            self.add()
        return function(*args, **(kwargs or {}))

    def add(self) -> None:
        frame = sys._getframe(1)
        while frame := frame.f_back:
            path = Path(frame.f_code.co_filename)
            if ROOT in path.parents and "tests" not in path.parts and ".venv" not in path.parts:
                self.count["ours", frame.f_code.co_name] += 1
                return
            for library in ("trl", "transformers", "peft"):
                if library in path.parts:
                    self.count[library, ""] += 1
                    return


def waits_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By who asked, per optimizer step, and the number of gathers."""
    waits, gathers = Waits(), Counter()
    for owner, name in ((Tensor, "tolist"), (Tensor, "cpu"), (Tensor, "numpy")):
        whole = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, *args, whole=whole, **kwargs: waits.add() or whole(self, *args, **kwargs)
        )
    gather = trainer.accelerator.gather

    def counted(*args: Any) -> Any:
        frame = sys._getframe(1)
        gathers["ours" if ROOT in Path(frame.f_code.co_filename).parents and ".venv" not in frame.f_code.co_filename else "trl"] += 1
        return gather(*args)

    monkeypatch.setattr(trainer.accelerator, "gather", counted)
    with waits:
        trainer.train()
    monkeypatch.undo()
    print()
    for key, n in waits.count.most_common():
        print(key, n / STEPS)
    print(gathers)
    return waits.count


@pytest.mark.parametrize("checkpointing", [True, False])
def test_count(checkpointing, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    rows = 1 if checkpointing else 4
    trainer = make_trainer(
        "gtpo", tiny, tmp_path, max_steps=STEPS, per_device_train_batch_size=rows, gradient_accumulation_steps=GROUP // rows,
        gradient_checkpointing=checkpointing, log_completions=True)
    waits_of(trainer, monkeypatch)
