"""The metric of the study's runs: the share of completions that guess."""

from typing import Any

import pytest
import torch
from helpers import canned
from helpers.canned import TRAINERS, CannedGRPO, CannedGTPO, weight_changes
from pytest import MonkeyPatch, mark
from torch import Tensor

from gtpo.training.trainer import says_gradient
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


class EvenTokens(CannedGRPO):
    """A gradient at every second token."""

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
        return super().objective(logps, token_entropy, inputs)

    def needs_gradient(self, inputs: dict[str, Any]) -> Tensor:
        return (torch.arange(inputs["completion_mask"].shape[1]) % 2 == 0).expand_as(inputs["completion_mask"])


class AllTokens(CannedGTPO):
    """Another objective, which has a gradient at every token."""

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
        return super().objective(logps, token_entropy, inputs)


@mark.parametrize(("kind", "says"), [(CannedGRPO, True), (CannedGTPO, True), (EvenTokens, True), (AllTokens, False)])
def test_the_tokens_with_a_gradient_are_those_of_the_arm(
    kind: Any, says: bool, build: Any, monkeypatch: MonkeyPatch
) -> None:
    """`python -m study compare` and the train scripts: the weights after two steps are the same."""
    changes = []
    for each in (kind, with_measures(kind)):
        assert says_gradient(each) is says
        monkeypatch.setitem(TRAINERS, "mine", each)
        changes.append(weight_changes(build("mine", max_steps=2)))
    assert torch.equal(*changes)
    monkeypatch.setitem(TRAINERS, "mine", CannedGRPO)
    assert torch.equal(changes[0], weight_changes(build("mine", max_steps=2))) == (kind is CannedGRPO)
