"""GRPO and GTPO with each loss_type, importance weights, and the push on conflict tokens.

Against TRL's trainer and naive references."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, assert_same, batch_of, canned_group, make_trainer, weight_changes
from helpers.reference import (
    naive_completion_entropy,
    naive_conflict_mask,
    naive_conflict_weights,
    naive_entropy_filter,
    naive_grpo_loss,
    naive_gtpo_loss,
    naive_token_weights,
    unpad,
)
from test_trainer import plain_logps_and_entropy
from torch import Tensor

from gtpo_loss import LOSS_TYPES

Values = dict[str, Any]

PLAIN = {"gamma": 0.0, "entropy_filter": "off", "conflict_correction": False}  # GTPO without any of its parts


# --- the trainers ----------------------------------------------------------------------------------------------------

ROWS = GROUP // 2
STEP = {"num_generations": ROWS, "max_steps": 3}  # completions of 1 to 23 tokens


def trained_at(method: str, tiny: Path, folder: Path, micro_batch: int = ROWS, **settings: Any) -> tuple[Any, Any]:
    """Changes of the weights and log of three steps on groups of six, or what ``settings`` says.

    A trainer is built just before it trains: TRL's shuffle, which decides the micro-batches, follows the seed.
    """
    batches = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": ROWS // micro_batch}
    trainer = make_trainer(method, tiny, folder, **(STEP | batches | settings))
    return weight_changes(trainer), trainer.state.log_history[:3]


@pytest.fixture
def train(tiny: Path, tmp_path: Path) -> Any:
    return lambda method, name="", *cut, **settings: trained_at(method, tiny, tmp_path / name, *cut, **settings)


@pytest.fixture(scope="module")
def trl_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weight changes and log of TRL's own trainer; only bnpo depends on the micro-batches."""

    @functools.cache
    def run(loss_type: str, iterations: int, micro_batch: int) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("trl")
        settings = {"loss_type": loss_type, "num_iterations": iterations} | clipping(iterations)
        return trained_at("trl", tiny, folder, micro_batch, **settings)

    return lambda loss_type, iterations, cut: run(loss_type, iterations, cut if loss_type == "bnpo" else ROWS)


def clipping(iterations: int) -> dict[str, float]:
    """Bounds that the second iteration reaches, unequal as in DAPO's clip-higher."""
    return {"epsilon": 0.01, "epsilon_high": 0.02} if iterations > 1 else {}


@pytest.mark.slow
@pytest.mark.parametrize(("iterations", "micro_batch"), [(1, 1), (2, 2), (2, ROWS)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_weights_equal_those_of_trl(
    loss_type: str, iterations: int, micro_batch: int, trl_run: Any, train: Any
) -> None:
    settings = {"loss_type": loss_type, "num_iterations": iterations} | clipping(iterations)
    weights, log = train("grpo", "", micro_batch, **settings)
    expected, their_log = trl_run(loss_type, iterations, micro_batch)
    assert_same(weights, expected)
    if loss_type == "bnpo" or micro_batch == ROWS:
        assert [row["loss"] for row in log] == pytest.approx([row["loss"] for row in their_log], rel=5e-6, abs=1e-6)
    assert (max(row["clip_ratio/low_mean"] + row["clip_ratio/high_mean"] for row in their_log) > 0) == (iterations > 1)


UNCLIPPED = {"epsilon": 1e6, "epsilon_high": 1e6}  # GTPO does not clip


@pytest.mark.parametrize("method", ["grpo", "gtpo"])
def test_dapo_divides_by_the_tokens_of_both_steps(method: str, train: Any) -> None:
    settings = {"loss_type": "dapo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"steps_per_generation": 6, "max_steps": 4, "learning_rate": 0.003}  # unclipped, 0.03 diverges
    theirs, _ = train("trl", "trl", **settings, **UNCLIPPED)
    ours, _ = train(method, method, gtpo=PLAIN, **settings, **UNCLIPPED if method == "grpo" else {})
    assert_same(ours, theirs)


@pytest.mark.parametrize(("loss_type", "iterations"), [("grpo", 1), ("dapo", 2), ("bnpo", 2)])
def test_gtpo_weights_do_not_depend_on_the_micro_batches(loss_type: str, iterations: int, train: Any) -> None:
    def trained(micro_batch: int, loss_type: str = loss_type) -> Tensor:
        settings = {"loss_type": loss_type, "num_iterations": iterations}
        return train("gtpo", f"{micro_batch}-{loss_type}", micro_batch, **settings)[0]

    whole = trained(ROWS)
    if loss_type != "bnpo":
        assert_same(trained(1), whole)
        assert_same(trained(2), whole)
    else:  # by definition they do: one completion is a mean over its tokens, and all of them are those of the step
        assert_same(trained(1), trained(ROWS, "grpo"))
        assert_same(whole, trained(ROWS, "dapo"))
        assert_same(trained(2), whole, differs=True)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gtpo_without_its_parts_trains_as_grpo(loss_type: str, trl_run: Any, train: Any) -> None:
    weights, _ = train("gtpo", "", 2, gtpo=PLAIN, loss_type=loss_type)
    assert_same(weights, trl_run(loss_type, 1, 2)[0])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("method", "positive_weight", "mode", "temperature"),
    [("gtpo", 2.0, "auto", 1.0), ("gtpo", 1.0, "negative_only", 0.7), ("grpo", 2.0, "off", 0.7)],
)
def test_a_step_is_the_naive_objective(
    method: str, positive_weight: float, mode: str, temperature: float, loss_type: str, build: Any
) -> None:
    """Loss and logged metrics, in float64 from the plain logits; two prompts of half a group each."""
    settings: Values = {"loss_type": loss_type, "num_generations": ROWS, "max_completion_length": 40}
    correction = {"entropy_filter": mode, "conflict_positive_weight": positive_weight}
    trainer = build(method, gtpo=correction, temperature=temperature, **settings)
    batch = batch_of(trainer, 0, 1)
    completions = canned_group(0)
    advantages = batch["advantages"].tolist()
    assert min(advantages) < 0 < max(advantages)
    lengths = [len(row) for row in completions]
    each = naive_token_weights(lengths, loss_type, 40)
    logps, entropies = plain_logps_and_entropy(trainer, batch)
    means = naive_completion_entropy(entropies)
    mask = naive_conflict_mask(completions, advantages, ROWS)
    assert unpad(batch["conflict_mask"], batch["completion_mask"]) == mask
    threshold = sum(sorted(means)[GROUP // 2 - 1 : GROUP // 2 + 1]) / 2
    delta = naive_entropy_filter(means, advantages, 0.1, threshold, mode)
    if method == "gtpo":
        assert 0 < sum(delta) < GROUP
        trainer.gtpo.entropy_threshold = threshold
        lambdas = naive_conflict_weights(mask, advantages, positive_weight)
        options: Values = {"token_entropy": entropies, "gamma": 0.1, "delta": delta, "token_weights": each}
        expected = naive_gtpo_loss(logps, advantages, weights=lambdas, **options)[0]
    else:
        expected = naive_grpo_loss(logps, advantages, token_weights=each)[0]
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected, abs=1e-5)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert logged["entropy"] == pytest.approx(sum(means) / GROUP, abs=1e-4)
    assert abs(logged["entropy"] - sum(map(sum, entropies)) / sum(lengths)) > 1e-3  # TRL's is a mean over tokens
    assert method == "grpo" or logged["filtered_fraction"] == pytest.approx(delta.count(0.0) / GROUP)
    conflicts = sum(map(sum, mask))
    assert logged["conflict_tokens"] == pytest.approx(conflicts / GROUP)
    assert logged["conflict_fraction"] == pytest.approx(conflicts / sum(lengths))
    assert logged["completion_length"] == pytest.approx(sum(lengths) / GROUP)


@pytest.mark.parametrize("zero_advantage", ["entropy", "skip"])
@pytest.mark.parametrize("conflict_correction", [True, False])
def test_a_completion_at_the_mean_is_penalized_or_skipped(
    conflict_correction: bool, zero_advantage: str, build: Any
) -> None:
    """Skipped, its strength A - gamma <H> is 0: as if the filter had dropped it."""
    gtpo = {"zero_advantage": zero_advantage, "entropy_filter": "off", "conflict_correction": conflict_correction}
    trainer = build("gtpo", gtpo=gtpo, num_generations=ROWS, max_completion_length=40)
    batch = batch_of(trainer, 0, 1)
    batch["advantages"][::2] = 0.0
    advantages = batch["advantages"].tolist()
    mask = unpad(batch["conflict_mask"], batch["completion_mask"])
    if not conflict_correction:
        mask = [[False] * len(row) for row in mask]
    logps, entropies = plain_logps_and_entropy(trainer, batch)
    delta = [float(zero_advantage == "entropy" or advantage != 0) for advantage in advantages]
    lambdas = naive_conflict_weights(mask, advantages, 2.0)
    options: dict[str, Any] = {"token_entropy": entropies, "gamma": 0.1, "delta": delta}
    expected, gradient = naive_gtpo_loss(logps, advantages, weights=lambdas, **options)
    assert delta.count(0.0) == (zero_advantage == "skip") * GROUP / 2
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    # The head skips tokens without a gradient, and no others.
    has_gradient = unpad(trainer.needs_gradient(batch), batch["completion_mask"])
    for row, flags in zip(gradient, has_gradient, strict=True):
        assert all(flag or value == 0 for value, flag in zip(row, flags, strict=True))
    assert all(map(all, has_gradient)) == (zero_advantage == "entropy" and not conflict_correction)


@pytest.mark.parametrize(
    ("method", "settings", "learns"),
    [
        ("gtpo", {}, True),
        ("gtpo", {"gtpo": {"conflict_correction": False}}, True),
        ("gtpo", {"gtpo": PLAIN}, False),
        ("grpo", {"beta": 0.04}, True),
    ],
)
def test_conflict_tokens_of_advantage_zero_learn_from_kl(
    method: str, settings: Values, learns: bool, build: Any
) -> None:
    trainer = build(method, **settings)
    batch = batch_of(trainer)
    batch |= {"advantages": torch.zeros(GROUP), "conflict_mask": batch["completion_mask"].bool()}
    if "ref_per_token_logps" in batch:
        batch["ref_per_token_logps"] += 1.0  # the reference is the policy at step 0
    trainer.compute_loss(trainer.model, batch).backward()
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
    assert any(gradient.abs().max() > 1e-6 for gradient in gradients) is learns


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_only_training_divides_by_the_accumulation_steps(loss_type: str, build: Any) -> None:
    six = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    trainer = build("grpo", loss_type=loss_type, **six)
    batch = batch_of(trainer, 0, 1)
    losses = {}
    for is_training, steps in ((True, 1), (True, 6), (False, 6)):
        trainer.model.train(is_training)
        trainer.current_gradient_accumulation_steps = steps
        losses[is_training, steps] = trainer.compute_loss(trainer.model, batch).item()
    assert losses[True, 6] == pytest.approx(losses[True, 1] / 6, rel=1e-5)
    # dapo: six micro-batches of this size have six times its tokens, an evaluation has this batch
    assert losses[False, 6] == pytest.approx(losses[True, 6 if loss_type == "dapo" else 1], rel=1e-5)


def test_an_objective_that_is_not_the_papers_is_named(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    build("gtpo", "paper")
    assert not caplog.messages
    build("gtpo", "other", loss_type="dr_grpo", scale_rewards="none", steps_per_generation=2)
    (message,) = caplog.messages
    assert "loss_type='dr_grpo'" in message and "scale_rewards='none'" in message and "correction" not in message
    assert "steps_per_generation=2 (the paper: 1)" in message


# --- the sampler: TRL's correction, with log-probabilities as vLLM gives them ----------------------------------------


def with_sampler(trainer: Any, scores: list[list[list[float | None]]]) -> Any:
    """Let the trainer believe that vLLM sampled the canned completions with these log-probabilities."""

    def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        step = trainer.state.global_step
        return canned_group(step), scores[step]

    trainer._generate_single_turn = sample
    trainer.use_vllm = True
    trainer._next_rollout_check = 9
    trainer._is_first_batch = False  # canned scores are those of no policy
    return trainer


@pytest.fixture(scope="module")
def sampled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float | None]]]:
    """ln pi of three canned groups, off by rounding, some tokens by 1.5 nats, and one without a score."""
    trainer = make_trainer("grpo", tiny, tmp_path_factory.mktemp("sampled"))
    steps = []
    noise = itertools.cycle([0.0, 0.03, -0.05, 0.02, 0.0, -0.02, 0.0, 1.5, 0.01, -1.5, 0.04])
    for step in range(3):
        trainer.state.global_step = step
        logps, _ = plain_logps_and_entropy(trainer, batch_of(trainer, 0, 1))
        steps.append([[logp + next(noise) for logp in row] for row in logps])
        steps[-1][2][1] = None
    return steps


@pytest.mark.parametrize(
    ("mode", "loss_type", "iterations"),
    zip(
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        ("grpo", "dapo", "dr_grpo", "grpo"),
        (1, 2, 1, 2),
        strict=True,
    ),
)
def test_the_correction_of_the_sampler_is_that_of_trl(
    mode: str, loss_type: str, iterations: int, sampled: list, build: Any
) -> None:
    settings = {"loss_type": loss_type, "num_iterations": iterations, "num_generations": ROWS, "max_steps": 3}
    settings |= {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": 0.5}

    def trained(method: str, **other: Any) -> tuple[Tensor, dict[str, float]]:
        clip = {} if method == "gtpo" else UNCLIPPED
        trainer = build(method, f"{method}{len(other)}", gtpo=PLAIN, **settings, **clip, **other)
        return weight_changes(with_sampler(trainer, sampled)), trainer.state.log_history[0]

    theirs, log = trained("trl")
    assert abs(log["sampling/importance_sampling_ratio/mean"] - 1) > 0.02  # the correction has an effect
    assert_same(trained("grpo")[0], theirs)
    assert_same(trained("gtpo")[0], theirs)
    assert_same(trained("grpo", vllm_importance_sampling_correction=False)[0], theirs, differs=True)
