"""``objective`` overridden by somebody else's class: the loss, its gradient on every token, and the conflict push."""

from functools import wraps
from typing import Any

import pytest
import torch
from helpers.canned import (
    GROUP,
    TRAINERS,
    CannedGRPO,
    CannedGTPO,
    canned_advantages,
    canned_group,
    weight_changes,
)
from helpers.reference import naive_conflict_push
from helpers.refusals import refused
from torch import Tensor

from gtpo import Measured
from gtpo.errors import RunError
from gtpo_loss import completion_entropy

Values = dict[str, Any]

STEPS = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
SHOWN = {"log_completions": True, "num_completions_to_print": 0}


class SquareRoot(CannedGRPO):
    """w_i = 1 / (b sqrt|o_i|)."""

    says_weights = True

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> tuple[Tensor, Measured]:
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"]
        weights = 1 / (len(mask) * mask.sum(1).sqrt())
        loss = -(weights * advantages * (logps * mask).sum(1)).sum()
        entropy = completion_entropy(token_entropy, mask)
        return loss, Measured(entropy, token_weights=weights if self.says_weights else None)


class Silent(SquareRoot):
    says_weights = False


class EveryToken(CannedGTPO):
    """A gradient where A = 0, and where lambda of GTPO would be 0."""

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> tuple[Tensor, Measured]:
        entropy = completion_entropy(token_entropy, inputs["completion_mask"])
        return -logps.sum() / len(logps), Measured(entropy)


class Watched(CannedGRPO):
    """Only a metric is added."""

    asked = 0

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> tuple[Tensor, Measured]:
        loss, measured = super().objective(logps, token_entropy, inputs)
        highest = logps.detach().masked_fill(inputs["completion_mask"] == 0, -9.0).max()
        return loss, measured._replace(metrics={**(measured.metrics or {}), "highest": highest})

    def needs_gradient(self, inputs: Values) -> Tensor:
        self.asked += 1
        return super().needs_gradient(inputs)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a class a method of ``make_trainer``; one that is based on GTPO takes its settings."""
    return lambda trainer, method: monkeypatch.setitem(TRAINERS, method, trainer)


@pytest.mark.parametrize("steps_per_generation", [3, 6])
def test_the_push_has_the_token_weights_of_the_objective(steps_per_generation: int, add: Any, build: Any) -> None:
    """Six micro-batches of two for one generation are two optimizer steps: the push is logged with the second."""
    add(SquareRoot, "mine")
    batches = {"per_device_train_batch_size": GROUP // steps_per_generation, "gradient_accumulation_steps": 3}
    settings = {"steps_per_generation": steps_per_generation, "learning_rate": 0.0, "max_steps": 2}
    trainer = build("mine", **batches, **settings)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    row = first if steps_per_generation == 3 else second
    assert ("conflict_push" in first) is (steps_per_generation == 3)
    assert row["entropy"] > 0
    completions = canned_group(0)
    advantages = canned_advantages().tolist()
    each = [1 / GROUP / len(ids) ** 0.5 for ids in completions]
    expected = naive_conflict_push(completions, advantages, GROUP, each)
    assert (row["conflict_push"], row["conflict_push_corrected"]) == pytest.approx(expected, rel=1e-4)


def test_an_objective_that_does_not_say_its_token_weights_has_no_push(add: Any, build: Any) -> None:
    add(Silent, "mine")
    trainer = build("mine", **STEPS, **SHOWN)
    trainer.train()
    rows = trainer.state.log_history[:3]
    assert all(row["conflict_tokens"] > 0 for row in rows)
    assert not [name for row in rows for name in row if name.startswith("conflict_push")]
    assert list(trainer._logs["extra"]["delta"]) == [1.0] * GROUP


def test_an_objective_that_adds_a_metric_trains_the_same_tokens(add: Any, build: Any) -> None:
    add(Watched, "mine")
    watched = build("mine", "mine", **STEPS)
    weights = weight_changes(watched)
    assert torch.equal(weights, weight_changes(build("grpo", "grpo", **STEPS)))
    assert watched.asked == 9 and all(row["highest"] < 0 for row in watched.state.log_history[:3])


def test_an_objective_has_a_gradient_on_every_token(add: Any, build: Any) -> None:
    """The head skips the tokens that have none in GRPO and GTPO: here with every advantage 0."""
    add(EveryToken, "mine")
    equal = [lambda completions, **_: [1.0] * len(completions)]
    changes = [weight_changes(build("mine", rewards=equal))]
    changes.append(weight_changes(build("grpo", rewards=equal)))
    assert changes[0].norm() > 0 and not changes[1].any()


def returning(returned: Any) -> type[CannedGRPO]:
    class Mine(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            entropy = completion_entropy(token_entropy, inputs["completion_mask"])
            return returned(logps, entropy)

    return Mine


PAIR = "expected a pair, the loss and gtpo.Measured"
RETURNED: dict[str, tuple[Any, str]] = {
    "Measured alone": (
        lambda logps, entropy: Measured(entropy),
        f"Tensor, NoneType, NoneType, NoneType, NoneType: {PAIR}",
    ),
    "nothing": (lambda logps, entropy: None, f"NoneType: {PAIR}"),
    "a loss of rows": (
        lambda logps, entropy: (logps.mean(1), Measured(entropy)),
        "a loss of shape (12,): expected a tensor of",
    ),
    "a mean": (
        lambda logps, entropy: (logps.mean(), Measured(entropy.mean())),
        "Measured.entropy of shape (): expected a",
    ),
    "keep of tokens": (
        lambda logps, entropy: (logps.mean(), Measured(entropy, keep=logps)),
        "Measured.keep of shape (12, ",
    ),
    "one weight": (
        lambda logps, entropy: (logps.mean(), Measured(entropy, token_weights=torch.tensor(0.5))),
        "Measured.token_weights of shape (): expected a tensor of shape (12,)",
    ),
    "a metric of rows": (
        lambda logps, entropy: (logps.mean(), Measured(entropy, metrics={"mine": entropy})),
        "the metric mine of shape (12,): expected a tensor of shape ()",
    ),
    "a metric that is a number": (
        lambda logps, entropy: (logps.mean(), Measured(entropy, metrics={"mine": 1.0})),
        "the metric mine of type float",
    ),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_what_an_objective_returns_is_checked(returned: str, add: Any, build: Any) -> None:
    function, said = RETURNED[returned]
    mine = returning(function)
    add(mine, "mine")
    with pytest.raises(RunError) as raised:
        build("mine").train()
    line = mine.objective.__code__.co_firstlineno
    assert f"Mine.objective (test_objective_hook.py, line {line}) returned {said}" in str(raised.value)


@pytest.mark.parametrize("raises", [True, False])
def test_the_line_is_that_of_the_user_where_another_class_wraps_the_objective(
    raises: bool, add: Any, build: Any
) -> None:
    """As study/train.py does."""

    class Mine(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            return inputs["advantage" if raises else "advantages"]

    class Wrapped(Mine):
        @wraps(Mine.objective)
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            return super().objective(logps, token_entropy, inputs)

    line = Mine.objective.__code__.co_firstlineno + int(raises)
    add(Wrapped, "mine")
    said = "raised KeyError: 'advantage'" if raises else "returned Tensor: expected a pair"
    with pytest.raises(RunError, match=rf"Mine.objective \(test_objective_hook.py, line {line}\) {said}"):
        build("mine").train()


class Fixed(CannedGRPO):
    fixed = {"beta": 0.0, "loss_type": "grpo"}


def test_settings_that_an_objective_does_not_read_are_refused(add: Any, build: Any) -> None:
    add(Fixed, "mine")
    build("mine")
    build("grpo", loss_type="dapo", beta=0.04)
    for settings, said in (
        ({"beta": 0.04}, r"beta = 0.04: Fixed does not use it, expected 0.0"),
        ({"loss_type": "dapo"}, "loss_type = 'dapo': Fixed does not use it, expected 'grpo'"),
    ):
        with refused(said):
            build("mine", **settings)
