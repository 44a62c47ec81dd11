"""``GRPOTrainer.advantages``: TRL's by default, somebody else's where a class overrides it."""

import math
from collections import deque
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, TRAINERS, CannedGRPO, CannedGTPO, CannedRLOO, CannedTRL, batch_of
from helpers.reference import naive_conflict_mask, unpad
from pytest import MonkeyPatch
from torch import Tensor

from examples.objectives.gdpo import GDPO
from gtpo.errors import RunError
from gtpo.training.batch import replace_last

SIZE = 4
NAN = math.nan
ROWS = [  # of three reward functions; a row without any, functions that never apply to a group, equal rewards
    *[[1.0, 10.0, 0.5], [0.0, 10.0, NAN], [2.0, 10.0, -0.5], [1.0, 10.0, 0.0]],
    *[[0.3, NAN, 1.0], [NAN, NAN, NAN], [0.1, NAN, 3.0], [0.7, NAN, 2.0]],
    *[[0.6, 1.0, 0.0], [0.6, 1.0, 0.0], [0.6, 1.0, 0.0], [0.6, 1.0, 0.0]],
]
WEIGHTS = [1.0, 0.2, 3.0]


def given(rows: Any) -> Any:
    """Reward functions that return these rewards, one column each; None for NaN."""

    def of_column(column: int) -> Any:
        values = [None if math.isnan(row[column]) else row[column] for row in rows]

        def reward(completions: Any, **columns: Any) -> Any:
            return values[: len(completions)]

        reward.__name__ = f"reward_{column}"
        return reward

    return [of_column(column) for column in range(len(rows[0]))]


@pytest.fixture
def of(monkeypatch: MonkeyPatch, build: Any) -> Any:
    """``of(kind, rows, **settings)``: a canned trainer with these rewards; three prompts, four completions each."""

    def of(kind: Any, rows: Any = ROWS, **settings: Any) -> Any:
        monkeypatch.setitem(TRAINERS, "mine", kind)
        weights = WEIGHTS[: len(rows[0])]
        return build("mine", rewards=given(rows), reward_weights=weights, num_generations=SIZE, **settings)

    return of


def scored(trainer: Any, training: bool = True) -> Any:
    """The batch of three prompts; the table has its advantages."""
    batch = batch_of(trainer, 0, 1, 2, training=training)
    assert list(trainer._logs["advantages"]) == batch["advantages"].tolist()
    return batch


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_default_is_that_of_trl(scale: str, aggregation: str, training: bool, of: Any) -> None:
    settings = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "num_generations_eval": SIZE}
    expected = scored(of(CannedTRL, **settings), training)["advantages"]
    batch = scored(of(CannedGRPO, **settings), training)
    found = batch["advantages"]
    assert found.count_nonzero() >= 6 and found[5] == 0
    if aggregation == "sum_then_normalize":  # equal rewards over their std of 0
        expected = expected.masked_fill(expected.abs() < 1e-2, 0.0)
    assert torch.equal(found, expected)
    assert batch["has_reward"].tolist() == [row != 5 for row in range(GROUP)]


def test_a_smaller_batch_replaces_the_last_entries_of_a_table() -> None:
    """That of held-out rows."""
    log = deque([1.0, 2.0, 3.0])
    replace_last(log, [8.0, 9.0])
    assert list(log) == [1.0, 8.0, 9.0]


# Overridden: examples/objectives


class CannedGDPO(CannedGRPO, GDPO):
    pass


def test_gdpo_is_the_other_aggregation_of_trl(of: Any) -> None:
    found = scored(of(CannedGDPO))["advantages"]
    expected = scored(of(CannedTRL, multi_objective_aggregation="normalize_then_sum"))["advantages"]
    assert found.count_nonzero() >= 6 and torch.equal(found, expected)


def test_rloo_subtracts_the_mean_of_the_others(of: Any) -> None:
    """Sums of 4.5, 2, 2.5 and 3 in the first group, of 3.3, 9.1 and 6.7 in the second."""
    expected = [2.0, -4 / 3, -2 / 3, 0.0, -4.6, 0.0, 4.1, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert scored(of(CannedRLOO))["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_only_rewarded_completion_is_not_trained(of: Any) -> None:
    rows = [[NAN], [2.0], [NAN], [NAN], *[[float(i)] for i in range(8)]]
    for kind in (CannedRLOO, CannedGDPO, CannedGRPO):
        found = scored(of(kind, rows))["advantages"]
        assert (found[:4] == 0).all() and found[4] < 0, kind


class Flipped(CannedGTPO):
    """Other signs than TRL's."""

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
        return -super().advantages(rewards, group_size)


def test_the_conflict_mask_follows_the_returned_advantages(of: Any) -> None:
    found = scored(of(Flipped, [[float(i % 3)] for i in range(GROUP)]))
    completions, marked = (unpad(found[name], found["completion_mask"]) for name in ("completion_ids", "conflict_mask"))
    assert marked == naive_conflict_mask(completions, found["advantages"].tolist(), SIZE)
    assert any(map(any, marked))


RETURNED: dict[str, Any] = {
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
    assert f"Mine.advantages (test_advantages.py, line {line}) returned {said}" in str(raised.value)


def test_an_error_of_another_process_stops_this_one(of: Any, monkeypatch: MonkeyPatch) -> None:
    """Which would wait for it in the next collective operation."""
    monkeypatch.setattr("gtpo.training.trainer.check_rewards", lambda *_: None)  # which gathers too
    monkeypatch.setattr("gtpo.training.faults.gather_object", lambda own: [*own, "Mine.advantages returned"])
    with pytest.raises(RunError, match=r"^Mine\.advantages returned; correct it"):
        scored(of(CannedGRPO))


def test_numbers_of_another_kind_are_taken(of: Any) -> None:
    class Mine(CannedGRPO):
        def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
            rewards[:] = 7.0  # a copy: TRL logs the rewards
            return torch.arange(GROUP, dtype=torch.float64, requires_grad=True)

    trainer = of(Mine)
    found = scored(trainer)["advantages"]
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11]  # row 5 has no reward
    assert trainer._logs["rewards"]["reward_0"][0] == 1.0


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
@pytest.mark.parametrize("rule", ["entropy", "skip"])
def test_a_completion_without_a_reward_is_not_pushed(rule: str, method: str, build: Any) -> None:
    """Not by gamma either, other than one whose A = 0: its gradient is 0 where all others have none."""
    pushed = []
    for rows in ([[NAN]] * 3 + [[1.0]] * 9, [[1.0]] * GROUP):
        trainer = build(method, gtpo={"zero_advantage": rule, "entropy_filter": "off"}, rewards=given(rows))
        batch = batch_of(trainer)
        assert (batch["advantages"] == 0).all()
        batch.pop("host_masks", None)
        first = {name: value[:3] for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        trainer.compute_loss(trainer.model, batch | first).backward()
        pushed.append(any(w.grad is not None and w.grad.any() for w in trainer.model.parameters()))
    assert pushed == [False, rule == "entropy"]
