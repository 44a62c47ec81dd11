"""What a group says about its tokens, against naive references; the checks of a sampler against policy and base."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import canned_group
from pytest import MonkeyPatch

from gtpo.errors import RunError
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_rollouts, next_check


def with_sampler(trainer: Any, in_sync: bool = True) -> Any:
    """Canned completions with their log-probabilities under the policy, or under the base model: a stale sampler."""

    def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        group = canned_group(trainer.state.global_step)[: len(prompt_ids)]
        model = trainer.model
        batch = padded_batch(prompt_ids, group, 0, torch.device("cpu"))
        ids, mask = (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in ("ids", "mask"))
        model.eval()
        with torch.no_grad():
            if in_sync:
                logits = model(input_ids=ids, attention_mask=mask).logits
            else:
                with model.disable_adapter():
                    logits = model(input_ids=ids, attention_mask=mask).logits
        model.train()
        logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        width = batch["completion_ids"].shape[1]
        return group, [row[-width:][: len(own)].tolist() for row, own in zip(logps, group, strict=True)]

    trainer._generate_single_turn = sample
    return trainer


def untrained_adapter(trainer: Any) -> Any:
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    return trainer


def test_a_stale_sampler_is_named_at_step_1(build: Any) -> None:
    """The adapter starts as the base model; the sampler never gets it."""
    trainer = with_sampler(untrained_adapter(build("grpo", max_steps=4)), in_sync=False)
    with pytest.raises(RunError, match="rollouts do not come from the adapter at step 1: "):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_sampler_in_sync_passes(build: Any, monkeypatch: MonkeyPatch) -> None:
    """Each check is made with the rollouts of its step."""
    trainer = with_sampler(untrained_adapter(build("grpo", max_steps=6)))
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
    of_policy: float, of_base: float, passes: bool, monkeypatch: MonkeyPatch
) -> None:
    """Rounding separates the sampler from both; a gap in nats per token."""
    gaps = iter([of_policy, of_base])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    monkeypatch.setattr("gtpo.training.checks.score", lambda *_: -next(gaps) * mask)
    batch = {"completion_mask": mask, "sampling_per_token_logps": torch.zeros(2, 4)}
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, gather=lambda gap: gap, device=torch.device("cpu"))
    model = SimpleNamespace(disable_adapter=nullcontext)
    state = SimpleNamespace(global_step=1)
    sampling = {"top_p": 1.0, "top_k": 0, "min_p": None}
    with nullcontext() if passes else pytest.raises(RunError):
        check_rollouts(SimpleNamespace(accelerator=accelerator, model=model, state=state, **sampling), batch)


@pytest.mark.parametrize(("target_modules", "with_logps"), [(None, True), (("q_proj",), False)])
def test_without_adapter_or_sampler_nothing_is_checked(target_modules: Any, with_logps: bool, build: Any) -> None:
    trainer = build("grpo", target_modules=target_modules, max_steps=2, learning_rate=1e-4)
    if with_logps:
        with_sampler(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
