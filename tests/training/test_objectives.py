"""examples/objectives: each file against a naive reference, in float64 and in a step."""

import importlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import TRAINERS, CannedGRPO
from helpers.reference import length_mask
from torch import Tensor

ROWS = 12


def kind_of(file: str) -> Any:
    module = importlib.import_module(f"examples.objectives.{file}")
    kinds = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    (kind,) = (kind for kind in kinds if hasattr(kind, "fixed"))
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


NAIVE = {
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
        logps, noise, entropy = torch.rand(3, ROWS, 10, generator=generator, dtype=torch.float64)
        logps = -3 * logps * mask
        advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
        advantages[-1] = 0.0
        inputs = {"completion_mask": mask, "advantages": advantages, "entropy": entropy * mask}
        inputs["num_items_in_batch"] = mask.sum()
        if distance := [0.0, 1e-3, 0.1, 0.5, 4.0][seed % 5]:
            inputs["old_per_token_logps"] = logps + distance * (noise - 0.5)
        yield logps.requires_grad_(), inputs


def loss_and_gradient(file: str, logps: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of a trainer that has only what its loss reads."""
    kind = kind_of(file)
    trainer = kind.__new__(kind)
    one_process = SimpleNamespace(gather=lambda tensor: tensor, pad_across_processes=lambda tensor, **_: tensor)
    trainer.__dict__ |= {"accelerator": one_process, "settings": kind.Settings(), "losses": lambda: 1}
    trainer.__dict__ |= {"epsilon_low": 0.2, "epsilon_high": 0.28}
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
        torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
        moved += bool(gradient.any())
    assert moved >= 80


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


@pytest.mark.parametrize("file", NAIVE)
def test_two_steps_on_one_generation(file: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiny model, on policy and off: the loss that is trained is that of the naive reference."""
    trained, naive = [], []

    class Watched(CannedGRPO, kind_of(file)):  # type: ignore[misc]
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
            found = super().objective(logps, token_entropy, inputs)
            trained.append(found[0].item())
            naive.append(naive_loss(file, logps.double(), inputs | {"entropy": token_entropy}).item())
            return found

    monkeypatch.setitem(TRAINERS, "mine", Watched)
    high = {} if "epsilon_high" in Watched.fixed else {"epsilon_high": 0.28}
    build("mine", num_iterations=2, max_steps=2, **high).train()
    assert len(trained) == 2 and trained == pytest.approx(naive, rel=1e-4, abs=1e-5)
