"""The metric of the study's runs: the share of completions that guess."""

from typing import Any

import pytest
import torch
from helpers import canned

from study.train import with_measures


def test_the_share_of_guesses_of_a_step(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of twelve completions say "guess"; the loss is that of the trainer."""
    trainer = build("grpo")
    guess = trainer._tokenizer("so I guess <answer> 5", add_special_tokens=False)["input_ids"]
    rows = [guess if row % 4 == 1 else ids for row, ids in enumerate(canned.canned_group(0))]
    monkeypatch.setattr(canned, "canned_group", lambda step, size=12: rows[:size])
    trainer.__class__ = with_measures(type(trainer))
    batch = canned.batch_of(trainer)
    assert batch["is_guess"].tolist() == [row % 4 == 1 for row in range(len(rows))]
    logps = torch.full(batch["completion_mask"].shape, -2.0)
    loss, measured = trainer.objective(logps, torch.zeros_like(logps), batch)
    assert float(measured.metrics["guesses"]) == 25.0
    assert float(loss) == float(super(type(trainer), trainer).objective(logps, torch.zeros_like(logps), batch)[0])
