"""``objective`` overridden by somebody else's class: the loss, its gradient on every token, and the conflict push."""

from functools import wraps
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.canned import TRAINERS, CannedGRPO, CannedGTPO, batch_of, reward_parity, weight_changes
from torch import Tensor

from gtpo import Measured
from gtpo.errors import RunError
from gtpo.training.batch import LossInputs
from gtpo.training.trainer import says_gradient
from gtpo_loss import completion_entropy

Values = dict[str, Any]


class EveryToken(CannedGTPO):
    """A gradient where A = 0, and where lambda of GTPO would be 0."""

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
        entropy = completion_entropy(token_entropy, inputs["completion_mask"])
        return -logps.sum() / len(logps), Measured(entropy)


class Watched(CannedGRPO):
    """Only a metric is added."""

    asked = 0

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
        loss, measured = super().objective(logps, token_entropy, inputs)
        lowest = logps.detach().min()
        return loss, measured._replace(metrics={**(measured.metrics or {}), "lowest": lowest})

    def needs_gradient(self, inputs: Values) -> Tensor:
        self.asked += 1
        return super().needs_gradient(inputs)


@pytest.fixture
def build_of(monkeypatch: pytest.MonkeyPatch, build: Any) -> Any:
    """``build_of(kind, **settings)``: a canned trainer of a class; one that is based on GTPO has the paper's values."""

    def build_of(kind: Any, **settings: Any) -> Any:
        monkeypatch.setitem(TRAINERS, "mine", kind)
        return build("mine", **settings)

    return build_of


def test_an_added_metric_trains_the_same_tokens(build_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its class says so, which is looked up once."""
    looked_up = Mock(wraps=says_gradient)
    monkeypatch.setattr("gtpo.training.trainer.says_gradient", looked_up)
    steps = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    watched = build_of(Watched, **steps)
    weights = weight_changes(watched)
    assert torch.equal(weights, weight_changes(build_of(CannedGRPO, **steps)))
    assert looked_up.call_count == 2  # of two trainers
    assert watched.asked == 9 and all(row["lowest"] < 0 for row in watched.state.log_history[:3])


@pytest.mark.parametrize("base", [CannedGRPO, CannedGTPO])
@pytest.mark.parametrize("rewards", [lambda completions, **_: [1.0] * len(completions), reward_parity])
def test_an_objective_has_a_gradient_on_every_token(base: Any, rewards: Any, build_of: Any) -> None:
    """The head skips the tokens that have none in GRPO and GTPO: where every advantage is 0, or lambda or delta is."""

    class Alone(base):
        objective = EveryToken.objective

    class Said(Alone):
        def needs_gradient(self, inputs: Values) -> Tensor:
            return torch.ones_like(inputs["conflict_mask"])

    class Skips(Alone):
        def needs_gradient(self, inputs: Values) -> Tensor:
            return torch.zeros_like(inputs["conflict_mask"]).index_fill(0, torch.tensor([3]), True)

    alone, said, skips = (weight_changes(build_of(kind, rewards=[rewards])) for kind in (Alone, Said, Skips))
    assert alone.any() and torch.equal(alone, said) and not torch.equal(alone, skips)


def test_without_an_advantage_grpo_trains_nothing(build_of: Any) -> None:
    assert not weight_changes(build_of(CannedGRPO, rewards=[lambda completions, **_: [1.0] * len(completions)])).any()


# What is returned, of the ln pi of the tokens and the entropy of the completions -> what is said about it
RETURNED: Values = {
    "Measured alone": (
        lambda logps, entropy: Measured(entropy),
        "Tensor, NoneType, NoneType, NoneType: expected a pair, the loss and gtpo.Measured",
    ),
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
    "a metric that is a number": (
        lambda logps, entropy: (logps.mean(), Measured(entropy, metrics={"mine": 1.0})),
        "the metric mine of type float: expected a tensor of shape ()",
    ),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_what_an_objective_returns_is_checked(returned: str, build_of: Any) -> None:
    function, said = RETURNED[returned]

    class Mine(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            return function(logps, completion_entropy(token_entropy, inputs["completion_mask"]))

    with pytest.raises(RunError) as raised:
        build_of(Mine).train()
    assert f") returned {said}" in str(raised.value)


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_names_the_users_line(raises: bool, build_of: Any) -> None:
    """As study/train.py does."""

    class Mine(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            return inputs["advantage" if raises else "advantages"]

    class Wrapped(Mine):
        @wraps(Mine.objective)
        def objective(self, *values: Any) -> Any:
            return super().objective(*values)

    line = Mine.objective.__code__.co_firstlineno + int(raises)
    said = "raised KeyError: 'advantage'" if raises else "returned Tensor: expected a pair"
    with pytest.raises(RunError, match=rf"Mine.objective \(test_objective_hook.py, line {line}\) {said}"):
        build_of(Wrapped).train()


class InPlace(CannedGRPO):
    """Changes all that it is given, and each micro-batch again."""

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
        inputs["advantages"] *= 0.1
        inputs["completion_mask"][:, -1] = 0
        returned = super().objective(logps, token_entropy, inputs)
        logps.mul_(2.0)
        token_entropy.zero_()
        return returned

    def needs_gradient(self, inputs: Values) -> Tensor:
        found = super().needs_gradient(inputs)
        inputs["advantages"].zero_()
        return found


class Copied(CannedGRPO):
    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
        mask = inputs["completion_mask"].clone()
        mask[:, -1] = 0
        changed = {"advantages": inputs["advantages"] * 0.1, "completion_mask": mask}
        return super().objective(logps, token_entropy, inputs | changed)

    def needs_gradient(self, inputs: Values) -> Tensor:
        return super().needs_gradient(inputs)


@pytest.mark.parametrize("iterations", [1, 2])
def test_an_objective_may_change_what_it_is_given(iterations: int, build_of: Any) -> None:
    """TRL keeps the batch for the next update, the metrics read it after the objective."""
    settings = {"num_iterations": iterations, "max_steps": 2 * iterations, "learning_rate": 0.3}
    found = []
    for kind in (InPlace, Copied):
        trainer = build_of(kind, **settings)
        changes = weight_changes(trainer)
        kept = trainer.recorder.inputs[0]
        found.append([changes, *(kept[name] for name in ("logps", "token_entropy", "advantages"))])
    assert all(map(torch.equal, *found)) and found[0][0].any()


DETACHED: Values = {
    "detached": lambda logps, entropy: logps.detach().mean(),
    "the entropy": lambda logps, entropy: entropy.mean(),
    "a number": lambda logps, entropy: torch.tensor(1.0),
    "another leaf": lambda logps, entropy: torch.tensor(1.0, requires_grad=True) * 2,
    "a new leaf": lambda logps, entropy: logps.detach().requires_grad_().mean(),
}


@pytest.mark.parametrize("kind", DETACHED)
def test_a_loss_without_a_gradient_is_refused(kind: str, build_of: Any) -> None:
    class Mine(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            entropy = completion_entropy(token_entropy, inputs["completion_mask"])
            return DETACHED[kind](logps, entropy), Measured(entropy)

    with pytest.raises(RunError, match=r"Mine.objective \(.*\) returned a loss without a gradient"):
        build_of(Mine).train()


def test_a_loss_of_the_weights_themselves_has_a_gradient(build_of: Any) -> None:
    class Decay(CannedGRPO):
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Values) -> Any:
            weights = [weight for weight in self.model.parameters() if weight.requires_grad]
            entropy = completion_entropy(token_entropy, inputs["completion_mask"])
            return torch.stack([weight.square().sum() for weight in weights]).sum(), Measured(entropy)

    assert weight_changes(build_of(Decay)).any()


def test_the_inputs_of_an_objective_are_as_named(build_of: Any) -> None:
    """TRL's batch has others too; b = 12 rows."""
    batch = batch_of(build_of(CannedGRPO))
    assert LossInputs.__required_keys__ <= batch.keys()
    rows, width = batch["completion_ids"].shape
    assert (
        rows == 12 and batch["prompt_ids"].shape == batch["prompt_mask"].shape and not batch["num_items_in_batch"].shape
    )
    assert {batch[name].shape for name in ("completion_mask", "conflict_mask")} == {(rows, width)}
    assert {batch[name].shape for name in ("advantages", "has_reward", "row")} == {(rows,)}
