"""examples/objectives: each file against a naive reference, in float64 and in a step, and against TRL 1.16."""

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from helpers.canned import TRAINERS, CannedGRPO
from helpers.reference import length_mask
from packaging.version import Version
from torch import Tensor

from examples.objectives.rloo import RLOO, CompletionRatio, LeaveOneOut
from gtpo import GRPOTrainer
from gtpo.errors import UsageError

ROWS = 12
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def kind_of(file: str) -> Any:
    module = importlib.import_module(f"examples.objectives.{file}")
    *_, kind = (  # the last: the halves of RLOO come before it
        value
        for value in vars(module).values()
        if getattr(value, "fixed", None) and value.__module__ == module.__name__
    )
    return kind


# B times J of one completion without padding, from the formula of the paper; autograd gives its gradient. Given: ln pi
# and r_it by token, A_i, 1 for the tokens of enough entropy, and B / the tokens of all completions.


def surrogate(ratio: Tensor, advantage: float, low: float = 0.2, high: float = 0.28) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def gmpo(new: Tensor, ratio: Tensor, advantage: float, *_: Any) -> Tensor:
    sign = 1 if advantage > 0 else -1
    each = (ratio**sign).clamp(max=math.exp(0.4)) ** sign
    return each.prod() ** (1 / len(each)) * advantage


def sapo(new: Tensor, ratio: Tensor, advantage: float, *_: Any) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return (4 / tau / (1 + torch.exp(-tau * (ratio - 1)))).mean() * advantage


def vespo(new: Tensor, ratio: Tensor, advantage: float, chosen: Tensor, share: float) -> Tensor:
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    whole = ratio.detach().prod().clamp(min=1e-8)
    return whole**power * (decay * (1 - whole)).exp() * advantage * new.sum() * share


def off_policy_mask(new: Tensor, ratio: Tensor, advantage: float, *_: Any) -> Tensor:
    is_kept = advantage >= 0 or -ratio.log().mean() <= 0.5
    return surrogate(ratio, advantage).mean() * is_kept


def sequence(ratio: Tensor) -> Tensor:
    return ratio.log().mean().exp()


NAIVE: dict[str, Callable[[Tensor, Tensor, float, Tensor, float], Tensor]] = {
    "cispo": lambda new, ratio, a, chosen, share: (ratio.detach().clamp(max=5.0) * a * new).sum() * share,
    "gmpo": gmpo,
    "gspo": lambda new, ratio, a, *_: surrogate(sequence(ratio), a, 3e-4, 4e-4),
    "high_entropy": lambda new, ratio, a, chosen, _: (surrogate(ratio, a) * chosen).mean(),
    "luspo": lambda new, ratio, a, *_: len(new) * surrogate(sequence(ratio), a, 2e-3, 2.5e-3),
    "off_policy_mask": off_policy_mask,
    "rloo": lambda new, ratio, a, *_: surrogate(ratio.prod(), a, 0.2, 0.2),
    "sapo": sapo,
    "two_sided": lambda new, ratio, a, *_: surrogate(ratio.clamp(max=4.0), a).mean(),
    "vespo": vespo,
}


def naive_loss(file: str, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
    lengths = inputs["completion_mask"].sum(1).tolist()
    old_logps = inputs.get("old_per_token_logps", logps.detach())
    entropy = inputs["entropy"]
    lowest = torch.cat([row[:length] for row, length in zip(entropy, lengths, strict=True)]).quantile(0.8) - 1e-7
    total = torch.zeros((), dtype=logps.dtype)
    for i, length in enumerate(lengths):
        new = logps[i, :length]
        ratio = (new - old_logps[i, :length]).exp()
        chosen = (entropy[i, :length] >= lowest).to(new)
        total = total - NAIVE[file](new, ratio, inputs["advantages"][i].item(), chosen, len(lengths) / sum(lengths))
    return total / len(lengths)


def random_batches(count: int) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """float64 batches, on policy and further and further off; garbage on the padding of ln pi_old."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (ROWS,), generator=generator).tolist()
        mask = length_mask(lengths, 10)
        logps, noise, entropy = (torch.rand(ROWS, 10, generator=generator, dtype=torch.float64) for _ in range(3))
        logps = -3 * logps * mask
        distance = [0.0, 1e-3, 0.1, 0.5, 4.0][seed % 5]
        advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
        advantages[-1] = 0.0
        inputs = {
            "completion_mask": mask,
            "completion_ids": torch.ones_like(mask),
            "prompt_ids": torch.ones(ROWS, 1, dtype=torch.long),
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
            "advantages": advantages,
            "entropy": (entropy * mask).float().double(),  # TRL compares in float32
            "num_items_in_batch": mask.sum(),
        }
        if distance:
            inputs["old_per_token_logps"] = logps + distance * (noise - 0.5)
        yield logps.requires_grad_(), inputs


def without_model(kind: Any, **values: Any) -> Any:
    """A trainer that has what its loss reads."""
    trainer = kind.__new__(kind)
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
    )
    trainer.__dict__.update({"accelerator": accelerator, "model": SimpleNamespace(training=True), **EPSILON, **values})
    return trainer


def loss_and_gradient(file: str, logps: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    kind = kind_of(file)
    trainer = without_model(kind, settings=kind.Settings(), losses=lambda: 1)
    loss, measured = trainer.objective(logps, inputs["entropy"], inputs)
    assert measured.entropy.shape == (ROWS,)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient


@pytest.mark.parametrize("file", NAIVE)
def test_loss_and_gradient_are_those_of_the_formula(file: str) -> None:
    moved = 0
    for logps, inputs in random_batches(100):
        expected = naive_loss(file, logps, inputs)
        (expected_gradient,) = torch.autograd.grad(expected, logps)
        loss, gradient = loss_and_gradient(file, logps, inputs)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
        moved += int(gradient.abs().sum() > 0)
    assert moved >= 80


def test_the_halves_of_rloo() -> None:
    """Its advantages are of one class, with GRPO's loss, and its loss of the other, with GRPO's advantages."""
    rewards = torch.tensor([[10.0, 0.0], [10.0, 10.0], [0.0, 1.0], [0.0, 10.0]])  # sums 10, 20, 1, 10
    weights = {"reward_weights": torch.ones(2)}
    expected = torch.tensor([10 - 31 / 3, 20 - 7.0, 1 - 40 / 3, 10 - 31 / 3])
    for kind in (LeaveOneOut, RLOO):
        torch.testing.assert_close(without_model(kind, **weights).advantages(rewards, 4), expected)
    assert CompletionRatio.advantages is GRPOTrainer.advantages
    assert LeaveOneOut.objective is GRPOTrainer.objective
    assert CompletionRatio.objective is RLOO.objective  # held above against the formula
    assert {"scale_rewards"} == LeaveOneOut.fixed.keys() == RLOO.fixed.keys() - CompletionRatio.fixed.keys()


@pytest.mark.parametrize("file", ["gspo", "gmpo", "sapo", "cispo"])
def test_one_update_a_generation_is_grpo_or_dapo(file: str) -> None:
    """The gradient is -A_i / (B |o_i|) on every token, of CISPO -A_i / sum |o_i| as of DAPO."""
    for logps, inputs in random_batches(20):
        if "old_per_token_logps" in inputs:
            continue
        mask = inputs["completion_mask"]
        each = mask.sum() if file == "cispo" else ROWS * mask.sum(1, keepdim=True)
        _, gradient = loss_and_gradient(file, logps, inputs)
        torch.testing.assert_close(gradient, -inputs["advantages"][:, None] * mask / each)


OF_TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # class, attributes, fields of its arguments
    "cispo": ("GRPOTrainer", {"loss_type": "cispo", "epsilon_high": 5.0}, {}),
    "gmpo": ("experimental.gmpo.GMPOTrainer", {"epsilon_low": 0.4, "epsilon_high": 0.4}, {}),
    "gspo": ("GRPOTrainer", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, {}),
    "high_entropy": ("GRPOTrainer", {"top_entropy_quantile": 0.2}, {}),
    "luspo": (
        "GRPOTrainer",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
        {},
    ),
    "off_policy_mask": ("GRPOTrainer", {"off_policy_mask_threshold": 0.5}, {}),
    "rloo": ("RLOOTrainer", {"epsilon_high": 0.2}, {}),
    "sapo": ("GRPOTrainer", {"loss_type": "sapo"}, {}),
    "two_sided": ("GRPOTrainer", {}, {"delta": 4.0}),
    "vespo": ("GRPOTrainer", {"loss_type": "vespo"}, {}),
}
IN_ARGUMENTS = ("delta", "sapo_temperature_pos", "sapo_temperature_neg", "steps_per_generation")
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
GRPO = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "beta": 0.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "current_gradient_accumulation_steps": 1,
}


@pytest.mark.skipif(Version(trl.__version__) < Version("1.16"), reason="the peer is TRL 1.16")
@pytest.mark.parametrize("file", OF_TRL)
def test_loss_and_gradient_are_those_of_trl(file: str) -> None:
    name, attributes, of_arguments = OF_TRL[file]
    place, _, name = name.rpartition(".")
    kind = getattr(importlib.import_module(f"trl.{place}" if place else "trl"), name)
    defaults = trl.GRPOConfig("unused", use_cpu=True, bf16=False)
    arguments = {field: getattr(defaults, field) for field in (*IN_ARGUMENTS, *VESPO)} | {"steps_per_generation": 1}
    for logps, inputs in random_batches(100):
        args = SimpleNamespace(**arguments | of_arguments, use_bias_correction_kl=False)
        peer = without_model(kind, **GRPO | attributes, args=args, _metrics={"train": defaultdict(list)})
        scores = logps, inputs["entropy"], None
        peer._get_per_token_logps_and_entropies = lambda *_, scores=scores, **__: scores
        if file == "rloo":
            old = inputs.get("old_per_token_logps", logps.detach())
            inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
        expected = peer._compute_loss(None, inputs)
        (expected_gradient,) = torch.autograd.grad(expected, logps)
        loss, gradient = loss_and_gradient(file, logps, inputs)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("file", NAIVE)
def test_two_steps_on_one_generation(file: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiny model, on policy and off: the loss that is trained is that of the naive reference."""
    seen: list[tuple[float, float]] = []

    class Watched(CannedGRPO, kind_of(file)):  # type: ignore[misc]
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
            found = super().objective(logps, token_entropy, inputs)
            expected = naive_loss(file, logps.double(), inputs | {"entropy": token_entropy})
            seen.append((found[0].item(), expected.item()))
            return found

    monkeypatch.setitem(TRAINERS, "mine", Watched)
    high = {} if "epsilon_high" in Watched.fixed else {"epsilon_high": 0.28}
    trainer = build("mine", num_iterations=2, max_steps=2, **high)
    trainer.train()
    assert len(seen) == 2
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


OTHER = {"beta": 0.04, "epsilon": 0.3, "epsilon_high": 0.3, "loss_type": "dapo", "scale_rewards": "batch"}
OTHER |= {"multi_objective_aggregation": "normalize_then_sum"}
OF_RATIO = {"beta", "epsilon", "epsilon_high", "loss_type"}
UNREAD = dict.fromkeys(("cispo", "gmpo", "gspo", "luspo", "sapo", "vespo"), OF_RATIO)  # settings of no effect
UNREAD |= {file: {"beta", "loss_type"} for file in ("high_entropy", "off_policy_mask", "two_sided")}
UNREAD |= {"gdpo": {"scale_rewards", "multi_objective_aggregation"}, "rloo": OF_RATIO | {"scale_rewards"}}


@pytest.mark.parametrize("file", UNREAD)
def test_a_setting_that_the_formula_does_not_read_is_refused(file: str) -> None:
    kind = kind_of(file)
    args = trl.GRPOConfig(loss_type="grpo", use_bias_correction_kl=False, bf16=False, use_cpu=True)
    kind.check_settings(args)
    refused_ = set()
    for name, value in OTHER.items():
        before = getattr(args, name)
        setattr(args, name, value)
        try:
            kind.check_settings(args)
        except UsageError as error:
            assert str(error).startswith(f"{name} = {value!r}: {kind.__name__} does not use it, expected {before!r}")
            refused_.add(name)
        setattr(args, name, before)
    assert refused_ == UNREAD[file]
