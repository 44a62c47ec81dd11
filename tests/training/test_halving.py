"""A first micro-batch that runs out of memory is trained in halves: the same update, one line, one generation."""

from typing import Any

import pytest
import torch
from helpers.canned import GROUP, assert_same, weight_changes
from pytest import MonkeyPatch

from gtpo.forward import hidden_states
from gtpo.training.trainer import GRPOTrainer


class Memory:
    """A fake GPU: more than ``rows`` completions of a micro-batch do not fit its forward or backward pass."""

    def __init__(self, trainer: GRPOTrainer, monkeypatch: MonkeyPatch, rows: int, phase: str) -> None:
        self.failures = self.generations = 0
        forward = trainer._logps_and_entropy
        backward = trainer.accelerator.backward
        generate = trainer._generate_and_score_completions
        seen: list[int] = []

        def fail() -> None:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

        def limited_forward(model: Any, inputs: Any, *args: Any) -> Any:
            if torch.is_grad_enabled():
                seen[:] = [len(inputs["completion_ids"])]
                if phase == "forward" and seen[0] > rows:
                    fail()
            return forward(model, inputs, *args)

        def limited_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            backward(loss, **kwargs)
            if phase == "backward" and seen[0] > rows:
                fail()  # with gradients in place

        def counted(inputs: Any) -> Any:
            self.generations += 1
            return generate(inputs)

        monkeypatch.setattr(trainer, "_logps_and_entropy", limited_forward)
        monkeypatch.setattr(trainer.accelerator, "backward", limited_backward)
        monkeypatch.setattr(trainer, "_generate_and_score_completions", counted)


def split(rows: int) -> dict[str, int]:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GROUP // rows}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(("rows", "fits"), [(GROUP, GROUP // 2), (GROUP // 3, GROUP // 6)])
def test_the_update_is_that_of_the_whole_micro_batch(
    rows: int,
    fits: int,
    loss_type: str,
    phase: str,
    build: Any,
    monkeypatch: MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"loss_type": loss_type, "max_steps": 2, **split(rows)}
    whole = build("gtpo", "whole", **settings)
    expected = weight_changes(whole)
    trainer = build("gtpo", "halves", **settings)
    memory = Memory(trainer, monkeypatch, fits, phase)
    assert_same(weight_changes(trainer), expected)
    assert (memory.failures, memory.generations) == (1, 2)
    [line] = [line for line in caplog.messages if "out of memory" in line]
    assert f"micro-batches of {rows} completions" in line and f"--per_device_train_batch_size {rows // 2}" in line
    for mine, other in zip(trainer.state.log_history[:2], whole.state.log_history[:2], strict=True):
        names = ("loss", "entropy", "conflict_fraction", "filtered_fraction", "grad_norm", "reward", "num_tokens")
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"loss_type": "bnpo"}, GROUP // 2),  # its loss depends on the micro-batch
        ({}, GROUP // 4),  # once
        (split(1), 0),
        (split(GROUP // 4), 1),  # 3 completions have no halves
    ],
    ids=["bnpo", "quarters", "one", "odd"],
)
def test_other_failures_are_raised(settings: dict[str, Any], fits: int, build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("gtpo", **settings)
    Memory(trainer, monkeypatch, fits, "forward")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_packed_rows_that_do_not_fit_with_gradients_are_not_padded(monkeypatch: MonkeyPatch) -> None:
    """Padded rows take more; the trainer splits the micro-batch."""
    inputs = {name: torch.ones(3, 2, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    inputs |= {name: torch.ones(3, 2, dtype=torch.long) for name in ("completion_ids", "completion_mask")}

    def packed(*args: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(6, 1)

    monkeypatch.setattr(hidden_states, "hidden_states_packed", packed)
    monkeypatch.setattr(hidden_states, "hidden_states_per_completion", lambda *args: torch.ones(4, 1))
    packing = hidden_states.Packing(possible=True)
    with pytest.raises(torch.OutOfMemoryError):
        packing.hidden_states(None, None, inputs, None)  # type: ignore[arg-type]
    assert packing.possible


def test_a_later_step_that_does_not_fit_is_raised(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("gtpo", max_steps=2)
    forward = trainer._logps_and_entropy

    def late(*args: Any) -> Any:
        if trainer.state.global_step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args)

    monkeypatch.setattr(trainer, "_logps_and_entropy", late)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.state.global_step == 1
