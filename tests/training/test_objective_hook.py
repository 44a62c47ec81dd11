"""``objective`` overridden by somebody else's class: the loss, its gradient on every token, and the conflict push."""

from functools import wraps
from typing import Any

import pytest
import torch
from helpers.canned import (
    TRAINERS,
    CannedGRPO,
    CannedGTPO,
    weight_changes,
)
from helpers.refusals import refused
from torch import Tensor

from gtpo import Measured
from gtpo.errors import RunError
from gtpo_loss import completion_entropy

Values = dict[str, Any]

STEPS = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
SHOWN = {"log_completions": True, "num_completions_to_print": 0}


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


def test_an_added_metric_trains_the_same_tokens(add: Any, build: Any) -> None:
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
        f"Tensor, NoneType, NoneType, NoneType: {PAIR}",
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
        lambda logps, entropy: (logps.mean(), Measured(entropy, keep=torch.tensor(0.5))),
        "Measured.keep of shape (): expected a tensor of shape (12,)",
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
def test_an_error_names_the_users_line(raises: bool, add: Any, build: Any) -> None:
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
