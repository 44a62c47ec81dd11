"""The correction by credit (examples/objectives/credit.py), against loops over the completions of whole groups."""

from typing import Any

import pytest
import torch
from helpers.canned import GROUP, TRAINERS, CannedGRPO
from helpers.reference import naive_conflict_mask
from torch import Tensor

from examples.objectives.credit import Credit


def test_a_step_has_the_mask_of_the_whole_group(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group in micro-batches of one row: lambda is 2 or 0 where the group's holders gain on average."""
    seen: dict[int, tuple[Tensor, ...]] = {}

    class Watched(CannedGRPO, Credit):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
            loss, measured = super().objective(logps, token_entropy, inputs)
            names = ("completion_ids", "completion_mask", "advantages")
            seen[inputs["row"].item()] = (*(inputs[name][0] for name in names), measured.weights[0])
            advantage = inputs["advantages"]
            expected = -advantage * (measured.weights * inputs["completion_mask"]).mean(1) * logps.shape[1]
            assert loss.item() == pytest.approx((expected / inputs["completion_mask"].sum(1)).item(), rel=1e-5)
            return loss, measured

    monkeypatch.setitem(TRAINERS, "mine", Watched)
    build("mine", per_device_train_batch_size=1, gradient_accumulation_steps=GROUP).train()
    assert sorted(seen) == list(range(GROUP))
    columns = zip(*(seen[row] for row in range(GROUP)), strict=True)
    ids, valid, advantages, weights = (list(column) for column in columns)
    completions = [row[keep.bool()].tolist() for row, keep in zip(ids, valid, strict=True)]
    scores = [round(value.item(), 6) for value in advantages]
    expected = naive_conflict_mask(completions, scores, GROUP, "credited")
    assert expected != naive_conflict_mask(completions, scores, GROUP)  # credit decides
    for found, keep, marked, score in zip(weights, valid, expected, scores, strict=True):
        on_mask = 1 + torch.tensor(score).sign().item()
        assert found[keep.bool()].tolist() == [on_mask if is_marked else 1.0 for is_marked in marked]
