"""The checks of a sampler against policy and base model."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, canned_group
from helpers.reference import unpad
from pytest import MonkeyPatch

from gtpo.errors import RunError
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_rollouts, next_check


def with_sampler(trainer: Any, in_sync: bool = True) -> Any:
    """Canned completions with their log-probabilities under the policy, or under the base model: a stale sampler.

    An adapter starts as the base model.
    """
    policy = trainer.model
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.zero_()

    def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        group = canned_group(trainer.state.global_step)
        batch = padded_batch(prompt_ids, group, 0, torch.device("cpu"))
        with torch.no_grad(), nullcontext() if in_sync else policy.disable_adapter():
            logps, _ = trainer.scores(policy, batch, GROUP)
        return group, unpad(logps, batch["completion_mask"])

    trainer._generate_single_turn = sample
    return trainer


def test_a_stale_sampler_is_named_at_step_1(build: Any) -> None:
    """The sampler never gets the adapter."""
    trainer = with_sampler(build("grpo", max_steps=4), in_sync=False)
    with pytest.raises(RunError, match="rollouts do not come from the adapter at step 1: "):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_sampler_in_sync_passes(build: Any, monkeypatch: MonkeyPatch) -> None:
    """Each check is made with the rollouts of its step."""
    trainer = with_sampler(build("grpo", max_steps=6))
    steps: list[int] = []

    def checked(trainer: Any, batch: Any) -> None:
        steps.append(trainer.state.global_step)
        check_rollouts(trainer, batch)

    monkeypatch.setattr("gtpo.training.trainer.check_rollouts", checked)
    trainer.train()
    assert steps == [0, 1, 2, 4]
    assert [next_check(step) for step in (4, 8, 16, 36)] == [8, 16, 32, 56]


@pytest.mark.parametrize(
    ("of_policy", "of_base", "passes"), [(0.15, 0.1, True), (0.25, 0.1, False), (0.25, 9.0, True), (0.35, 9.0, False)]
)
def test_rollouts_nearer_to_the_base_stop_the_run(
    of_policy: float, of_base: float, passes: bool, build: Any, monkeypatch: MonkeyPatch
) -> None:
    """Rounding separates the sampler from both; a gap in nats per token."""
    gaps = iter([of_policy, of_base])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    monkeypatch.setattr("gtpo.training.checks.score", lambda *_: -next(gaps) * mask)
    batch = {"completion_mask": mask, "sampling_per_token_logps": torch.zeros(2, 4)}
    with nullcontext() if passes else pytest.raises(RunError):
        check_rollouts(build("grpo"), batch)


def test_a_model_without_an_adapter_is_not_checked(build: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo.training.checks.score", None)
    trainer = with_sampler(build("grpo", target_modules=None))
    trainer.train()
    assert trainer.state.global_step == 1
