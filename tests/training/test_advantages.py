"""``GRPOTrainer.advantages``: TRL's by default, somebody else's where a class overrides it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import (
    GROUP,
    TRAINERS,
    CannedGRPO,
    CannedGTPO,
    CannedRLOO,
    CannedTRL,
    batch_of,
    make_trainer,
)
from helpers.reference import naive_conflict_mask
from torch import Tensor

from examples.objectives.gdpo import GDPO
from gtpo.errors import RunError
from gtpo.training.advantages import group_advantages

SIZE = 4
NAN = math.nan
ROWS = [  # of three reward functions; a row without any, functions that never apply to a group, equal rewards
    *[[1.0, 10.0, 0.5], [0.0, 10.0, NAN], [2.0, 10.0, -0.5], [1.0, 10.0, 0.0]],
    *[[0.3, NAN, 1.0], [NAN, NAN, NAN], [0.1, NAN, 3.0], [0.7, NAN, 2.0]],
    *[[0.6, 1.0, 0.0], [0.6, 1.0, 0.0], [0.6, 1.0, 0.0], [0.6, 1.0, 0.0]],
]
WEIGHTS = [1.0, 0.2, 3.0]
SCALES = ["group", "batch", "none"]
AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]


def given(rows: list[list[float]]) -> list[Callable[..., list[float | None]]]:
    """Reward functions that return these rewards, one column each; None for NaN."""

    def of_column(column: int) -> Callable[..., list[float | None]]:
        values = [None if math.isnan(row[column]) else row[column] for row in rows]

        def reward(completions: Any, **columns: Any) -> list[float | None]:
            return (values * (len(completions) // len(values) + 1))[: len(completions)]

        reward.__name__ = f"reward_{column}"
        return reward

    return [of_column(column) for column in range(len(rows[0]))]


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    """``of(kind, rows, **settings)``: a canned trainer with these rewards; three prompts, four completions each."""

    def of(kind: Any, rows: list[list[float]] = ROWS, **settings: Any) -> Any:
        monkeypatch.setitem(TRAINERS, "mine", kind)
        weights = WEIGHTS[: len(rows[0])]
        rewards = {"rewards": given(rows), "reward_weights": weights, "num_generations": SIZE}
        return make_trainer("mine", tiny, tmp_path / kind.__name__, **rewards | settings)

    return of


def batch_and_log(trainer: Any, training: bool = True) -> tuple[dict[str, Tensor], list[float]]:
    batch = batch_of(trainer, 0, 1, 2, training=training)
    return batch, list(trainer._logs["advantages"])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_the_default_is_that_of_trl(scale: str, aggregation: str, training: bool, of: Any) -> None:
    settings = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "num_generations_eval": SIZE}
    expected, _ = batch_and_log(of(CannedTRL, **settings), training)
    found, log = batch_and_log(of(CannedGRPO, **settings), training)
    assert found["advantages"].count_nonzero() >= 6 and found["advantages"][5] == 0
    if aggregation == "sum_then_normalize":  # equal rewards over their std of 0
        expected["advantages"].masked_fill_(expected["advantages"].abs() < 1e-2, 0.0)
    assert torch.equal(found["advantages"], expected["advantages"])
    assert log == found["advantages"].tolist()
    assert found["has_reward"].tolist() == [row != 5 for row in range(GROUP)]


def test_the_table_has_one_advantage_for_each_completion(of: Any) -> None:
    """Held-out batches may be smaller than what the log holds."""
    trainer = of(CannedGRPO, num_generations_eval=SIZE)
    found = [batch_of(trainer, 0, size=SIZE, training=False)["advantages"].tolist() for _ in range(2)]
    assert list(trainer._logs["advantages"]) == found[0] + found[1]
    assert len(trainer._logs["prompt"]) == 2 * SIZE


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_has_no_advantage(scale: str, aggregation: str) -> None:
    """It has no std."""
    assert not group_advantages(torch.tensor([[3.0], [1.0], [9.0]]), torch.ones(1), 1, scale, aggregation).any()


# Overridden: examples/objectives


class CannedGDPO(CannedGRPO, GDPO):
    pass


def test_gdpo_is_the_other_aggregation_of_trl(of: Any) -> None:
    found, log = batch_and_log(of(CannedGDPO))
    expected, _ = batch_and_log(of(CannedTRL, multi_objective_aggregation="normalize_then_sum"))
    assert found["advantages"].count_nonzero() >= 6
    assert torch.equal(found["advantages"], expected["advantages"])
    assert log == found["advantages"].tolist()


def test_rloo_subtracts_the_mean_of_the_others(of: Any) -> None:
    found, _ = batch_and_log(of(CannedRLOO))
    sums = [sum(w * r for w, r in zip(WEIGHTS, row, strict=True) if not math.isnan(r)) for row in ROWS]
    scored = [not all(map(math.isnan, row)) for row in ROWS]
    expected = []
    for i in range(GROUP):
        start = i // SIZE * SIZE
        others = [sums[j] for j in range(start, start + SIZE) if j != i and scored[j]]
        expected.append(sums[i] - sum(others) / len(others) if scored[i] else 0.0)
    assert found["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_only_rewarded_completion_is_not_trained(of: Any) -> None:
    rows = [[NAN], [2.0], [NAN], [NAN], *[[float(i)] for i in range(8)]]
    for kind in (CannedRLOO, CannedGDPO, CannedGRPO):
        found, _ = batch_and_log(of(kind, rows))
        assert (found["advantages"][:4] == 0).all() and found["advantages"][4] < 0, kind


class Flipped(CannedGTPO):
    """Other signs than TRL's."""

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
        return -super().advantages(rewards, group_size)


def test_the_conflict_mask_follows_the_returned_advantages(of: Any) -> None:
    rows = [[float(i % 3)] for i in range(GROUP)]
    found, _ = batch_and_log(of(Flipped, rows))
    mask = [
        row[valid.bool()].tolist() for row, valid in zip(found["completion_ids"], found["completion_mask"], strict=True)
    ]
    expected = naive_conflict_mask(mask, found["advantages"].tolist(), SIZE)
    marked = [row[: len(spans)].int().tolist() for row, spans in zip(found["conflict_mask"], expected, strict=True)]
    assert marked == [[int(token) for token in spans] for spans in expected] and sum(map(sum, marked)) > 0


RETURNED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "some rows": (lambda r: r[:3, 0], "advantages of shape (3,): expected a tensor of shape (12,)"),
    "a list": (lambda r: r[:, 0].tolist(), "advantages of type list: expected"),
    "NaN": (lambda r: r.sum(1), "A_i = nan for the rewards [0.0, 10.0, nan] (row 2): expected a finite number"),
    "infinity": (lambda r: r[:, 0] / 0, "A_i = inf for the rewards [1.0, 10.0, 0.5] (row 1): expected"),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_what_is_returned_is_checked(returned: str, of: Any) -> None:
    function, said = RETURNED[returned]

    class Mine(CannedGRPO):
        def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
            found: Tensor = function(rewards)
            return found

    line = Mine.advantages.__code__.co_firstlineno
    with pytest.raises(RunError) as raised:
        batch_of(of(Mine), 0, 1, 2)
    message = str(raised.value)
    assert f"Mine.advantages (test_advantages.py, line {line}) returned {said}" in message
    assert message.endswith("; correct it, then start again, or from a checkpoint.")


def test_an_error_of_another_process_stops_this_one(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for it in the next collective operation."""
    said: list[list[str]] = []

    def gather(own: list[str]) -> list[str]:
        said.append(own)
        return [*own, "Mine.advantages returned"]

    monkeypatch.setattr("gtpo.training.hooks.gather_object", gather)
    with pytest.raises(RunError, match=r"^Mine\.advantages returned; correct it"):
        batch_of(of(CannedGRPO), 0, 1, 2)
    assert said == [[]]


def test_numbers_of_another_kind_are_taken(of: Any) -> None:
    class Mine(CannedGRPO):
        def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
            rewards[:] = 7.0  # a copy: TRL logs the rewards
            return torch.arange(GROUP, dtype=torch.float64, requires_grad=True)

    trainer = of(Mine)
    found, _ = batch_and_log(trainer)
    assert found["advantages"].dtype == torch.float32 and not found["advantages"].requires_grad
    assert found["advantages"].tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11]  # row 5 has no reward
    assert trainer._logs["rewards"]["reward_0"][0] == 1.0


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
@pytest.mark.parametrize("rule", ["entropy", "skip"])
def test_a_completion_without_a_reward_is_not_pushed(rule: str, method: str, tiny: Path, tmp_path: Path) -> None:
    """Not by gamma either, other than one whose A = 0: its gradient is 0 where all others have none."""
    changes = []
    for name, rows in {"none": [[NAN]] * 3 + [[1.0]] * 9, "equal": [[1.0]] * GROUP}.items():
        trainer = make_trainer(
            method, tiny, tmp_path / name, gtpo={"zero_advantage": rule, "entropy_filter": "off"}, rewards=given(rows)
        )
        batch = batch_of(trainer)
        assert (batch["advantages"] == 0).all()
        batch = {key: value[:3] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()}
        batch.pop("host_masks", None)
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradients = [w.grad.abs().sum().item() for w in trainer.model.parameters() if w.grad is not None]
        changes.append(sum(gradients))
    assert changes[0] == 0.0 and (changes[1] > 0) is (rule == "entropy")
