"""``inspect_group``: the same numbers as a training step, and no side effects."""

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers.canned import GROUP, _Canned, canned_group, make_trainer
from helpers.reference import naive_conflict_mask, naive_conflict_weights
from pytest import MonkeyPatch


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_group_of_a_trainer(method: str, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(method, tiny, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    entropies = sorted(trainer.inspect_group(1).entropy)
    threshold = (entropies[3] + entropies[4]) / 2 if method == "gtpo" else float("inf")
    if method == "gtpo":
        trainer.gtpo.entropy_threshold = threshold
    view = trainer.inspect_group(1)
    completions = canned_group(0)
    tokenizer = trainer.processing_class
    assert view.prompt == tokenizer.decode(tokenizer(trainer.train_dataset[1]["prompt"])["input_ids"])
    assert [len(tokens) for tokens in view.tokens] == [len(ids) for ids in completions]
    assert ["".join(tokens) for tokens in view.tokens] == [tokenizer.decode(ids) for ids in completions]
    assert view.rewards == {"reward_parity": [float(sum(ids) % 3) for ids in completions]}
    rewards = torch.tensor(view.rewards["reward_parity"])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert view.advantages == pytest.approx(expected.tolist(), abs=1e-5)
    mask = naive_conflict_mask(completions, view.advantages, GROUP)
    naive = naive_conflict_weights(mask, view.advantages)
    assert view.weights == (naive if method == "gtpo" else [[1.0] * len(ids) for ids in completions])
    assert {0.0, 1.0, 2.0} == {weight for row in naive for weight in row}  # the case has all three
    assert view.keep == [float(entropy <= threshold) for entropy in view.entropy]
    assert sum(view.keep) == (4 if method == "gtpo" else GROUP)


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_inspect_group_has_no_side_effects(method: str, tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delattr(_Canned, "_generate_single_turn")  # sample from the policy: the random generator matters

    def trained(inspect: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        settings = {"log_completions": True, "num_completions_to_print": 0, "max_completion_length": 6, "max_steps": 2}
        trainer = make_trainer(method, tiny, tmp_path / str(inspect), **settings)
        before = torch.random.get_rng_state()
        if inspect:
            was_training = trainer.model.training
            assert trainer.inspect_group(5) == trainer.inspect_group(5)
            assert trainer.model.training == was_training
            assert not trainer._logs["prompt"] and trainer.state.num_input_tokens_seen == 0
            assert all(weight.grad is None for weight in trainer.model.parameters())
        assert torch.equal(before, torch.random.get_rng_state())
        trainer.train()
        times = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
        logs = [{key: value for key, value in row.items() if key not in times} for row in trainer.state.log_history]
        weights = {n: w.detach().clone() for n, w in trainer.model.named_parameters() if w.requires_grad}
        table = pandas.concat(map(pandas.read_parquet, sorted((tmp_path / str(inspect) / "completions").iterdir())))
        return {"logs": logs, "completions": table.to_csv(index=False)}, weights

    (plain_records, plain) = trained(False)
    (inspected_records, inspected) = trained(True)
    assert plain_records == inspected_records
    assert all(torch.equal(plain[name], inspected[name]) for name in plain)


def test_state_is_restored_when_a_reward_raises(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)

    def failing(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("left_over", 1.0)
        log_extra("left_over", ["x"] * len(completions))
        raise ZeroDivisionError

    monkeypatch.setattr(trainer, "reward_funcs", [failing])
    with pytest.raises(ZeroDivisionError):
        trainer.inspect_group(0)
    assert not trainer._pending_metrics and not trainer._pending_extra_logs  # the next step would log them


def test_the_rewards_are_those_of_the_group_after_a_step_too(tiny: Path, tmp_path: Path) -> None:
    """Its rows follow those of the step in TRL's table. The check of the rollouts is not postponed."""
    trainer = make_trainer("grpo", tiny, tmp_path, num_generations=GROUP // 2)
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[i // 6] for i in range(GROUP)])
    trainer.state.global_step = 1
    trainer._next_rollout_check = 1
    before, expected = ([float(sum(ids) % 3) for ids in canned_group(step)] for step in (0, 1))
    assert trainer.inspect_group(0).rewards == {"reward_parity": expected[:6]} != {"reward_parity": before[6:]}
    assert trainer._next_rollout_check == 1
