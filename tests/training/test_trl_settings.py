"""TRL's settings of the loss on the trainers here: the entropy bonus, the 80/20 rule, truncated completions, and GDPO.

Weights against TRL's own trainer, GTPO against naive references.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import (
    GROUP,
    assert_same,
    canned_group,
    make_trainer,
    reward_parity,
    weight_changes,
    with_distinct_entropies,
)
from helpers.reference import (
    naive_completion_entropy,
    naive_conflict_mask,
    naive_conflict_push,
    naive_conflict_weights,
    naive_gtpo_loss,
    unpad,
)
from torch import Tensor

from gtpo.training.loss_tokens import leave_out_truncated, loss_mask
from gtpo_loss import LOSS_TYPES

ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 5.15, "entropy_coef_delta": 0.15,
    "entropy_coef_max": 0.3, "entropy_coef_min": 0.1,
}  # fmt: skip
CUT = (1, 4, 5, 10)  # rows of a group that end without </s>


def cut(trainer: Any) -> Any:
    """Let some completions of each canned group end at the length limit."""
    original = trainer._generate_single_turn

    def sample(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return [row[:-1] if i in CUT else row for i, row in enumerate(original(*args, **kwargs)[0])], None

    trainer._generate_single_turn = sample
    return trainer


def train(method: str, tiny: Path, folder: Path, micro_batch: int = GROUP, **settings: Any) -> tuple[Any, Any]:
    """Changes of the weights in three steps, and their log; the completions of ``CUT`` are truncated."""
    batches = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": GROUP // micro_batch}
    trainer = make_trainer(method, tiny, folder / method, **({"max_steps": 3} | batches | settings))
    return weight_changes(with_distinct_entropies(cut(trainer))), trainer.state.log_history[:3]


SETTINGS: dict[str, dict[str, Any]] = {
    "bonus": {"entropy_coef": 0.4},
    "penalty": {"entropy_coef": -0.4, "beta": 0.04},
    "adaptive": ADAPTIVE,
    "80/20": {"top_entropy_quantile": 0.2},
    "80/20 and adaptive": ADAPTIVE | {"top_entropy_quantile": 0.2, "num_iterations": 2, "beta": 0.04},
    "truncated": {"mask_truncated_completions": True, "beta": 0.04},
    "all": {"mask_truncated_completions": True, "entropy_coef": 0.4, "top_entropy_quantile": 0.5},
}


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weight changes of TRL's trainer without any of these settings."""

    @functools.cache
    def run(loss_type: str, micro_batch: int) -> Tensor:
        return train("trl", tiny, tmp_path_factory.mktemp("plain"), micro_batch, loss_type=loss_type)[0]

    return run


@pytest.mark.parametrize(("loss_type", "micro_batch"), [("grpo", 4), ("dr_grpo", GROUP), ("dapo", 4), ("bnpo", 4)])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_and_coefficients_equal_those_of_trl(
    name: str, loss_type: str, micro_batch: int, plain: Any, tiny: Path, tmp_path: Path
) -> None:
    settings = SETTINGS[name] | {"loss_type": loss_type}
    theirs, their_log = train("trl", tiny, tmp_path, micro_batch, **settings)
    ours, log = train("grpo", tiny, tmp_path, micro_batch, **settings)
    assert_same(ours, theirs)
    assert_same(plain(loss_type, micro_batch), theirs, differs=True)
    names = ["entropy_coef"] if "entropy_coef" in settings else []
    if loss_type != "dapo":  # there TRL logs the sum of the micro-batches
        names += ["loss", *(["policy_loss"] if names else [])]
    if "beta" in settings and micro_batch == GROUP:  # TRL's is a mean over micro-batches, ours over tokens
        names.append("kl")
    for row, their_row in zip(log, their_log, strict=True):
        for key in names:
            assert row[key] == pytest.approx(their_row[key], rel=1e-5, abs=1e-6), key
    if name == "adaptive":
        coefficients = [row["entropy_coef"] for row in log]
        assert max(coefficients) == 0.3 > 0.2 > min(coefficients)  # up to its maximum, and down


def test_a_resumed_run_continues_with_the_coefficient_of_its_checkpoint(tiny: Path, tmp_path: Path) -> None:
    def make(name: str) -> Any:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "entropy_coef_max": 9.0}
        return make_trainer("grpo", tiny, tmp_path / name, **(ADAPTIVE | options))

    whole = make("whole")
    whole.train()
    coefficients = [row["entropy_coef"] for row in whole.state.log_history if "loss" in row]
    assert coefficients[1] != 0.2 and len(set(coefficients)) > 2
    stored = json.loads((tmp_path / "whole" / "checkpoint-2" / "entropy_ctrl_state.json").read_text())
    assert stored["entropy_coef"] == coefficients[1] and stored["last_world_entropy"] > 0
    resumed = make("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [row["entropy_coef"] for row in resumed.state.log_history if "loss" in row] == coefficients
    assert (resumed.entropy_coef, resumed._last_world_entropy) == (whole.entropy_coef, whole._last_world_entropy)
    for (name, left), (_, right) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_evaluation_leaves_the_coefficient_alone(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path, **ADAPTIVE)
    trainer.train()
    last_entropy = trainer._last_world_entropy
    trainer.model.eval()
    rows = [trainer.train_dataset[0]] * GROUP
    batch = trainer._generate_and_score_completions(rows)
    losses = []
    for coefficient, target in ((0.3, 9.0), (0.0, 9.0), (0.3, 0.0)):
        trainer.entropy_coef, trainer.args.entropy_target = coefficient, target
        losses.append(trainer.compute_loss(trainer.model, batch).item())
    _, token_entropy = trainer.scores(trainer.model, batch, GROUP)
    mean = (token_entropy.sum() / batch["completion_mask"].sum()).item()
    assert losses == pytest.approx([losses[1] - 0.3 * mean, losses[1], losses[1]], rel=1e-5)
    state = trainer.entropy_coef, trainer._last_world_entropy, trainer._entropy_window_stats
    assert state == (0.3, last_entropy, None) and "entropy_coef" not in trainer._metrics["eval"]


def reward_length(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [100.0 * len(ids) for ids in completion_ids]


@pytest.mark.parametrize("method", ["grpo", "gtpo"])
def test_gdpo_normalizes_each_reward_by_itself(method: str, tiny: Path, tmp_path: Path) -> None:
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    settings |= {"num_generations": 6, "rewards": (reward_parity, reward_length)}
    trainer = make_trainer(method, tiny, tmp_path, **settings)
    trainer.model.train()
    rows = [trainer.train_dataset[prompt] for prompt in (0, 1) for _ in range(6)]
    advantages = trainer._generate_and_score_completions(rows)["advantages"]
    completions = canned_group(0)
    sums = torch.zeros(GROUP, dtype=torch.float64)
    for weight, reward in ((1.0, reward_parity), (0.5, reward_length)):
        of_group = torch.tensor(reward(None, completions), dtype=torch.float64).view(2, 6)
        normal = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
        sums += weight * normal.flatten()
    expected = (sums - sums.mean()) / (sums.std() + 1e-4)  # over the step
    torch.testing.assert_close(advantages.double(), expected, atol=1e-5, rtol=0)
    if method == "grpo":
        assert_same(train("grpo", tiny, tmp_path, **settings)[0], train("trl", tiny, tmp_path, **settings)[0])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_truncated_completion_keeps_its_conflicts_and_has_no_gradient(
    loss_type: str, tiny: Path, tmp_path: Path
) -> None:
    settings = {"loss_type": loss_type, "mask_truncated_completions": True, "max_completion_length": 40}
    trainer = cut(make_trainer("gtpo", tiny, tmp_path, gtpo={"entropy_filter": "on"}, **settings))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    completions = [row[:-1] if i in CUT else row for i, row in enumerate(canned_group(0))]
    assert unpad(batch["completion_ids"], batch["completion_mask"]) == completions
    advantages = batch["advantages"].tolist()
    assert {advantages[i] > 0 for i in CUT} == {True, False}
    mask = naive_conflict_mask(completions, advantages, GROUP)
    assert unpad(batch["conflict_mask"], batch["completion_mask"]) == mask
    finished = [row for row in range(GROUP) if row not in CUT]
    of_finished = naive_conflict_mask([completions[i] for i in finished], [advantages[i] for i in finished], 8)
    assert of_finished != [mask[i] for i in finished]  # without the truncated ones there are fewer conflicts

    lengths, tokens = [len(row) for row in completions], sum(len(completions[i]) for i in finished)
    assert batch["num_items_in_batch"] == tokens
    each = {  # every row counts in 1 / B, as in TRL; tokens of truncated ones do not
        "grpo": [1 / GROUP / n for n in lengths],
        "dr_grpo": [1 / GROUP / 40] * GROUP,
        "dapo": [1 / tokens] * GROUP,
        "bnpo": [1 / tokens] * GROUP,
    }[loss_type]
    each = [0.0 if i in CUT else weight for i, weight in enumerate(each)]
    seen: list[Tensor] = []
    logps_and_entropy = trainer._logps_and_entropy

    def keep(*args: Any) -> tuple[Tensor, Tensor]:
        logps, entropy = logps_and_entropy(*args)
        logps.retain_grad()
        seen.extend((logps, entropy))
        return logps, entropy

    trainer._logps_and_entropy = keep
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    entropies = unpad(seen[1].double(), batch["completion_mask"])
    means = naive_completion_entropy(entropies)
    delta = [float(mean <= 5.05) for mean in means]
    options: dict[str, Any] = {"weights": naive_conflict_weights(mask, advantages), "token_entropy": entropies}
    options |= {"gamma": 0.1, "delta": delta, "token_weights": each}
    expected, gradient = naive_gtpo_loss(unpad(seen[0].detach(), batch["completion_mask"]), advantages, **options)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    for row, of_row in enumerate(unpad(seen[0].grad, batch["completion_mask"])):
        assert of_row == pytest.approx(gradient[row], abs=1e-7)
        assert not any(of_row) or row not in CUT
    logged = trainer._metrics["train"]
    assert logged["filtered_fraction"] == [pytest.approx(delta.count(0.0) / GROUP)]
    assert logged["entropy"] == [pytest.approx(sum(means) / GROUP, abs=1e-5)]
    pushes = naive_conflict_push(completions, advantages, GROUP, each)
    assert (logged["conflict_push"][0], logged["conflict_push_corrected"][0]) == pytest.approx(pushes, abs=1e-6)


def test_a_step_of_truncated_completions_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    for loss_type in LOSS_TYPES:
        settings = {"mask_truncated_completions": True, "entropy_coef": 0.4, "beta": 0.04, "loss_type": loss_type}
        trainer = make_trainer("grpo", tiny, tmp_path / loss_type, **settings)
        trainer._generate_single_turn = lambda *args, **kwargs: ([row[:-2] for row in canned_group(0)], None)
        assert not weight_changes(trainer).any()
        row = trainer.state.log_history[0]
        assert row["loss"] == row["kl"] == row["policy_loss"] == 0 and row["entropy"] > 4


def test_the_answers_of_tools_are_not_counted_with_truncated_completions_left_out() -> None:
    """The first completion has a tool's answer at tokens 1 and 2; the second is truncated."""
    batch = {
        "completion_ids": torch.zeros(2, 5, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]),
    }
    assert loss_mask(batch).tolist() == [[1, 0, 0, 1, 0], [1, 1, 1, 1, 1]]
    trainer = SimpleNamespace(
        _cut_off=lambda *_: [False, True], accelerator=SimpleNamespace(gather=lambda value: value)
    )
    leave_out_truncated(trainer, batch)
    assert loss_mask(batch).tolist() == [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert batch["num_items_in_batch"] == 2
