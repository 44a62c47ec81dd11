"""The study's runs: those of the train scripts, with the share of completions that guess as a metric."""

from typing import Any

import pytest
import torch
from helpers import canned
from helpers.canned import TRAINERS, CannedGRPO, CannedGTPO, weight_changes
from pytest import MonkeyPatch, mark
from torch import Tensor

from gtpo.training.trainer import GRPOTrainer, GTPOTrainer, says_gradient
from study.train import main, with_measures


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


@mark.parametrize(
    ("method", "kind", "names"), [("grpo", GRPOTrainer, {"settings"}), ("gtpo", GTPOTrainer, {"gtpo", "tags"})]
)
def test_a_run_is_of_the_script_that_is_named(
    method: str, kind: Any, names: set[str], monkeypatch: MonkeyPatch, no_gpu: None
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("gtpo.training.loop.train_policy", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("sys.argv", ["train.py", f"train_{method}.py", "--dataset", "arithmetic", "--seed", "7"])
    main()
    ((trainer, settings, backend, _, own),) = calls
    assert issubclass(trainer, kind) and own.keys() == names
    assert (settings.method, settings.trainer.seed, backend) == (method, 7, "transformers")
