"""The checks of a sampler against policy and base model."""

from collections import defaultdict
from contextlib import nullcontext
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, canned_group
from helpers.reference import unpad
from pytest import MonkeyPatch, approx

from gtpo.errors import RunError
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_rollouts, next_check
from gtpo.training.record import Measured, Recorder


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


def logged_by(micro_batches: list[dict[str, float]], tokens: list[int], whole: int) -> dict[str, list[float]]:
    """What a step of these micro-batches logs; ``tokens`` of each, ``whole`` in all."""
    logged: dict[str, list[float]] = defaultdict(list)
    accelerator = SimpleNamespace(gather=lambda values: values, sync_gradients=False)
    trainer = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(training=True), log_completions=False)
    trainer.losses = lambda: len(micro_batches)
    trainer.generation, trainer._metrics = 1, {"train": logged}
    trainer._logs = {"extra": {"entropy": []}}
    recorder = Recorder(trainer)
    for number, (metrics, count) in enumerate(zip(micro_batches, tokens, strict=True), 1):
        accelerator.sync_gradients = number == len(micro_batches)
        measured = Measured(torch.zeros(1), metrics={name: torch.tensor(value) for name, value in metrics.items()})
        mask = (torch.arange(4) < count)[None].int()
        inputs = {"completion_mask": mask, "num_items_in_batch": torch.tensor(whole), "row": torch.zeros(1)}
        recorder.loss(torch.tensor(0.0), measured, torch.zeros(1, 4), torch.zeros(1, 4), inputs)
    return {name: values for name, values in logged.items() if name != "entropy"}


def test_a_mean_over_tokens_and_what_was_not_measured() -> None:
    """Two micro-batches of three tokens and of one: a mean over tokens weighs them by these."""
    found = logged_by([{"kl": 1.0, "mine": 1.0}, {"kl": 5.0, "mine": 3.0}], [3, 1], 4)
    assert sum(found["kl"]) / 2 == approx((3 * 1 + 5) / 4) and found["mine"] == [1.0, 3.0]
    assert logged_by([{"kl": 0.5}], [1], 1) == {"kl": [0.5]}  # one token in all
    assert logged_by([{"kl": 0.5}], [0], 0) == {"kl": [0.0]}
    assert logged_by([{"mine": nan}, {"mine": 2.0}], [1, 1], 2) == {"mine": [2.0]}
    assert logged_by([{"mine": nan}], [1], 1) == {}  # not measured
    found = logged_by([{"clip_ratio/low_min": 0.25}, {"clip_ratio/low_min": 0.5}], [1, 1], 2)
    assert found == {"clip_ratio/low_min": [0.25, 0.5]}
