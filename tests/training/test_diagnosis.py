"""ConflictMetrics and RolloutCheck on TRL's own GRPOTrainer: values against naive references, and no changed weight."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, canned_group, make_trainer, trained_weights
from helpers.reference import naive_completion_entropy, naive_conflict_mask, naive_conflict_push
from pytest import MonkeyPatch

from gtpo import ConflictMetrics, RolloutCheck, SamplerProbe
from gtpo.errors import RunError
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_rollouts, probe_sampler

STEPS = {"max_steps": 3}


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


def train(tiny: Path, folder: Path, callbacks: bool, dropout: float = 0.0, **settings: Any) -> tuple[Any, Any]:
    trainer = with_sampler(make_trainer("trl", tiny, folder, **(STEPS | settings)))
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    if callbacks:
        trainer.add_callback(ConflictMetrics(trainer))
        trainer.add_callback(RolloutCheck(trainer, interval=1))
    torch.manual_seed(1)
    weights = trained_weights(trainer)
    return weights, [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"beta": 0.04, "num_iterations": 2}], ids=["on-policy", "kl"])
def test_the_callbacks_change_no_weight(settings: Any, dropout: float, tiny: Path, tmp_path: Path) -> None:
    plain, log = train(tiny, tmp_path / "plain", False, dropout, **settings)
    watched, watched_log = train(tiny, tmp_path / "watched", True, dropout, **settings)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert [row["loss"] for row in log] == [row["loss"] for row in watched_log]
    assert "conflict_tokens" in watched_log[0] and "conflict_tokens" not in log[0]


def test_the_metrics_equal_the_naive_references(tiny: Path, tmp_path: Path) -> None:
    _, (row, *_) = train(tiny, tmp_path, True)
    completions = canned_group(0)
    rewards = torch.tensor([float(sum(ids) % 3) for ids in completions], dtype=torch.float64)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    mask = naive_conflict_mask(completions, advantages, GROUP)
    conflicts = sum(map(sum, mask))
    lengths = [len(ids) for ids in completions]
    assert row["conflict_tokens"] == pytest.approx(conflicts / GROUP)
    assert row["conflict_fraction"] == pytest.approx(conflicts / sum(lengths))
    each = [1 / GROUP / length for length in lengths]
    for name, spans in (("", (False, True)), ("_opening", (False,)), ("_closing", (True,))):
        expected = naive_conflict_push(completions, advantages, GROUP, each, [1.0] * GROUP, spans)
        found = row[f"conflict_push{name}"], row[f"conflict_push_corrected{name}"]
        assert found == pytest.approx(expected, abs=1e-6)
    assert row["groups_without_variance"] == 0


def test_the_entropy_is_a_mean_over_completions(tiny: Path, tmp_path: Path) -> None:
    _, (row, *_) = train(tiny, tmp_path / "trained", True)
    trainer = make_trainer("trl", tiny, tmp_path / "untrained")
    prompt = trainer.processing_class(trainer.train_dataset[0]["prompt"])["input_ids"]
    entropies = []
    for completion in canned_group(0):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        log_pi = logits.double().log_softmax(-1)
        entropies.append((-(log_pi.exp() * log_pi).sum(-1)).tolist())
    means = naive_completion_entropy(entropies)
    assert row["completion_entropy"] == pytest.approx(sum(means) / GROUP, abs=1e-4)
    tokens = [value for each in entropies for value in each]
    assert row["entropy"] == pytest.approx(sum(tokens) / len(tokens), abs=1e-4)  # TRL's: a mean over tokens
    assert abs(row["entropy"] - row["completion_entropy"]) > 1e-3


def test_groups_without_variance_are_counted(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("trl", tiny, tmp_path, num_generations=3)
    trainer.add_callback(ConflictMetrics(trainer))
    trainer.reward_funcs = [lambda completions, **columns: [1.0] * 6 + [0.0, 1.0, 2.0] * 2]
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["groups_without_variance"] == row["frac_reward_zero_std"] == 0.5  # two of four groups


def test_an_evaluation_has_groups_of_its_own(tiny: Path, tmp_path: Path) -> None:
    """Six completions of a prompt while evaluating, twelve in training."""
    settings = {"held_out": 2, "num_generations_eval": GROUP // 2, "per_device_eval_batch_size": GROUP}
    trainer = make_trainer("trl", tiny, tmp_path, eval_strategy="steps", eval_steps=1, **settings)
    trainer.reward_funcs = [
        lambda completions, **columns: ([1.0] * 6 + [0.0, 1.0, 2.0, 0.0, 1.0, 2.0])[: len(completions)]
    ]
    trainer.add_callback(ConflictMetrics(trainer))
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert row["eval_groups_without_variance"] == 0.5 and row["eval_frac_reward_zero_std"] == 0.5
    (step,) = [row for row in trainer.state.log_history if "reward" in row]
    assert step["groups_without_variance"] == 0.0


def test_a_second_training_measures_once_per_batch(tiny: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(ConflictMetrics):
        def on_batch(self, batch: dict[str, Any], *_: Any) -> None:
            seen.append(len(batch["advantages"]))

    trainer = make_trainer("trl", tiny, tmp_path)
    trainer.add_callback(Counting(trainer))
    trainer.train()
    trainer.train()
    assert seen == [GROUP, GROUP]


def untrained_adapter(trainer: Any) -> Any:
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    return trainer


def test_a_stale_sampler_is_named_at_step_1(tiny: Path, tmp_path: Path) -> None:
    """The adapter starts as the base model; the sampler never gets it."""
    trainer = untrained_adapter(make_trainer("trl", tiny, tmp_path, max_steps=4))
    trainer.add_callback(RolloutCheck(with_sampler(trainer, in_sync=False)))
    with pytest.raises(RunError, match="rollouts do not come from the adapter at step 1: "):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("method", ["trl", "gtpo"])
def test_a_sampler_that_ignores_the_adapter_is_named_before_the_first_step(
    method: str, tiny: Path, tmp_path: Path
) -> None:
    """At the paper's learning rate the adapter would differ from the base model hundreds of steps later."""
    trainer = with_sampler(untrained_adapter(make_trainer(method, tiny, tmp_path, learning_rate=1e-6)), in_sync=False)
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    if method == "trl":
        trainer.add_callback(SamplerProbe(trainer))
    with pytest.raises(RunError, match="rollouts do not come from the adapter at step 0: "):
        trainer.train()
    assert all(not weight.any() for name, weight in trainer.model.named_parameters() if "lora_B" in name)


def test_the_probe_of_a_sampler_leaves_no_trace(tiny: Path, tmp_path: Path) -> None:
    trainer = with_sampler(untrained_adapter(make_trainer("trl", tiny, tmp_path)))
    trainer.use_vllm = True
    trainer._last_loaded_step = 0  # the initial entropy was measured with the engine
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    sample = trainer._generate_single_turn
    seen = []
    state = torch.get_rng_state()

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((trainer._last_loaded_step, {n: w.clone() for n, w in trainer.model.named_parameters()}))
        trainer._last_loaded_step = trainer.state.global_step  # as TRL
        return sample(*args, **kwargs)

    trainer._generate_single_turn = watched
    trainer.model.train()
    probe_sampler(trainer)
    [(synced, weights)] = seen
    assert synced == -1 == trainer._last_loaded_step and trainer.model.training  # handed over before and after
    assert {name for name in before if not torch.equal(before[name], weights[name])} == {
        n for n in before if "lora_B" in n
    }
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_sampler_in_sync_passes(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    trainer = with_sampler(untrained_adapter(make_trainer("trl", tiny, tmp_path, max_steps=8)))
    steps: list[int] = []
    monkeypatch.setattr(
        "gtpo.training.diagnosis.check_rollouts", lambda trainer, batch: steps.append(trainer.state.global_step)
    )
    check = RolloutCheck(trainer, interval=3)
    trainer.add_callback(check)
    trainer.train()
    assert steps == [0, 1, 2, 4, 7]
    trainer.model.eval()
    check.next = 0
    check.on_batch({"sampling_per_token_logps": 0.0})
    assert len(steps) == 6 and not trainer.model.training


@pytest.mark.parametrize(
    ("of_policy", "of_base", "passes"), [(0.15, 0.1, True), (0.25, 0.1, False), (0.25, 9.0, True), (0.35, 9.0, False)]
)
def test_rollouts_may_be_up_to_twice_as_far_from_the_policy_as_from_the_base_model(
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


@pytest.mark.parametrize(("target_modules", "in_sync"), [(None, True), (("q_proj",), None)])
def test_without_adapter_or_sampler_nothing_is_checked(
    target_modules: Any, in_sync: bool | None, tiny: Path, tmp_path: Path
) -> None:
    trainer = make_trainer("trl", tiny, tmp_path, target_modules=target_modules, max_steps=2, learning_rate=1e-4)
    trainer.add_callback(RolloutCheck(trainer if in_sync is None else with_sampler(trainer)))
    trainer.train()
    assert trainer.state.global_step == 2
