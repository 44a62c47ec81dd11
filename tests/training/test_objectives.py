"""examples/objectives: each file against a naive reference, in float64 and in a step, and against TRL 1.16's own loss.

``make test-backend BACKEND=trl`` runs the comparison with TRL, whose version in .venv has not all of these losses.
"""

import ast
import importlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from helpers.canned import TRAINERS, CannedGRPO, trained_weights
from helpers.reference import length_mask, pad, unpad
from helpers.scripts import ROOT
from helpers.weight import code_lines
from packaging.version import Version
from torch import Tensor

from gtpo.arguments import GTPOArguments, fields_of
from train_grpo import SETTINGS

Row = list[float]
Naive = Callable[[Row, Row, float, Row, float], tuple[float, Row]]
FILES = sorted(path.stem for path in (ROOT / "examples/objectives").glob("*.py"))
ROWS = 12
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def kind_of(file: str) -> Any:
    module = importlib.import_module(f"examples.objectives.{file}")
    (kind,) = (
        value
        for value in vars(module).values()
        if getattr(value, "fixed", None) and value.__module__ == module.__name__
    )
    return kind


# The naive references: one completion at a time, in Python floats. Arguments: ln pi, ln pi_old, A_i, the tokens with
# enough entropy, and the tokens of all completions. The value and the gradient by ln pi of B times J.


def clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    """min(r A, clip(r) A), and whether r has a gradient."""
    bounded = min(max(ratio, low), high)
    return min(ratio * advantage, bounded * advantage), ratio * advantage <= bounded * advantage


def gspo(new: Row, old: Row, advantage: float, *_: Any, low: float = 3e-4, high: float = 4e-4) -> tuple[float, Row]:
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    value, is_free = clipped(ratio, advantage, 1 - low, 1 + high)
    return value, [ratio * advantage / len(new) if is_free else 0.0] * len(new)


def luspo(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    value, gradient = gspo(new, old, advantage, low=2e-3, high=2.5e-3)
    return len(new) * value, [len(new) * part for part in gradient]


def rloo(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    ratio = math.prod(math.exp(n - o) for n, o in zip(new, old, strict=True))
    value, is_free = clipped(ratio, advantage, 0.8, 1.2)
    return value, [ratio * advantage if is_free else 0.0] * len(new)


def gmpo(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    mean = 1.0
    is_free = []
    for n, o in zip(new, old, strict=True):
        ratio = math.exp(n - o)
        bounded = min(ratio, math.exp(0.4)) if advantage > 0 else max(ratio, math.exp(-0.4))
        mean *= bounded ** (1 / len(new))
        is_free.append(bounded == ratio)
    return mean * advantage, [mean * advantage / len(new) * free for free in is_free]


def cispo(new: Row, old: Row, advantage: float, chosen: Row, share: float) -> tuple[float, Row]:
    weights = [min(math.exp(n - o), 5.0) * advantage * share for n, o in zip(new, old, strict=True)]
    return sum(w * n for w, n in zip(weights, new, strict=True)), weights


def vespo(new: Row, old: Row, advantage: float, chosen: Row, share: float) -> tuple[float, Row]:
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    ratio = max(math.exp(sum(new) - sum(old)), 1e-8)
    weight = ratio**power * math.exp(decay * (1 - ratio)) * advantage * share
    return weight * sum(new), [weight] * len(new)


def sapo(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    tau = 1.0 if advantage > 0 else 1.05
    value = 0.0
    gradient = []
    for n, o in zip(new, old, strict=True):
        ratio = math.exp(n - o)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        value += 4 / tau * gate * advantage / len(new)
        gradient.append(4 * gate * (1 - gate) * ratio * advantage / len(new))
    return value, gradient


def grpo(new: Row, old: Row, advantage: float, chosen: Row, *_: Any, highest: float = math.inf) -> tuple[float, Row]:
    value = 0.0
    gradient = []
    for n, o, factor in zip(new, old, chosen, strict=True):
        ratio = math.exp(n - o)
        bounded = min(ratio, highest)
        surrogate = min(bounded * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        is_free = surrogate == ratio * advantage
        value += factor * surrogate / len(new)
        gradient.append(factor * ratio * advantage / len(new) if is_free else 0.0)
    return value, gradient


def two_sided(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    return grpo(new, old, advantage, [1.0] * len(new), highest=4.0)


def off_policy_mask(new: Row, old: Row, advantage: float, *_: Any) -> tuple[float, Row]:
    drift = sum(o - n for n, o in zip(new, old, strict=True)) / len(new)
    return grpo(new, old, advantage, [float(advantage >= 0 or drift <= 0.5)] * len(new))


NAIVE: dict[str, Naive] = {
    "cispo": cispo,
    "gmpo": gmpo,
    "gspo": gspo,
    "high_entropy": grpo,
    "luspo": luspo,
    "off_policy_mask": off_policy_mask,
    "rloo": rloo,
    "sapo": sapo,
    "two_sided": two_sided,
    "vespo": vespo,
}


def naive_loss(file: str, logps: Tensor, inputs: dict[str, Any]) -> tuple[float, Tensor]:
    mask = inputs["completion_mask"]
    new = unpad(logps.detach(), mask)
    old = unpad(inputs["old_per_token_logps"], mask) if "old_per_token_logps" in inputs else new
    entropies = unpad(inputs["entropy"], mask)
    lowest = sorted(itertools.chain(*entropies))
    place = 0.8 * (len(lowest) - 1)  # the quantile is between two tokens
    below = lowest[math.floor(place)]
    lowest_chosen = below + (place % 1) * (lowest[math.ceil(place)] - below) - 1e-7
    rows = len(mask)
    share = rows / sum(map(len, new))  # 1 / sum_i |o_i| after the mean of the rows
    loss = 0.0
    gradients = []
    for n, o, a, h in zip(new, old, inputs["advantages"].tolist(), entropies, strict=True):
        value, gradient = NAIVE[file](n, o, a, [float(each >= lowest_chosen) for each in h], share)
        loss -= value / rows
        gradients.append([-part / rows for part in gradient])
    return loss, pad(gradients, mask.shape[1], 0.0, torch.float64)


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
        expected, expected_gradient = naive_loss(file, logps, inputs)
        loss, gradient = loss_and_gradient(file, logps, inputs)
        assert loss.item() == pytest.approx(expected, abs=1e-6, rel=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
        moved += int(gradient.abs().sum() > 0)
    assert moved >= 80


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


@pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="the peer is TRL 1.16: make test-backend BACKEND=trl"
)
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
            seen.append((found[0].item(), expected[0]))
            return found

    monkeypatch.setitem(TRAINERS, "mine", Watched)
    high = {} if "epsilon_high" in Watched.fixed else {"epsilon_high": 0.28}
    trainer = build("mine", num_iterations=2, max_steps=2, **high)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    after = trained_weights(trainer)
    assert len(seen) == 2 and any(not torch.equal(after[name], before[name]) for name in after)
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short_and_says_its_source_and_command(file: str) -> None:
    text = (ROOT / f"examples/objectives/{file}.py").read_text()
    tree = ast.parse(text)
    assert code_lines(text, tree) <= 40
    head = ast.get_docstring(tree) or ""
    assert re.search(r"arXiv \d{4}\.\d{5}", head)
    (cls,) = re.findall(rf"--objective examples/objectives/{file}\.py:(\w+)", head)
    kind = getattr(importlib.import_module(f"examples.objectives.{file}"), cls)
    own = set() if kind.Settings is object else set(fields_of([kind.Settings]))
    taken = fields_of([*SETTINGS, GTPOArguments, trl.GRPOConfig]).keys()
    assert not own & taken
    assert kind.fixed.keys() <= taken
