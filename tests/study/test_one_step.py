"""One-step effects: the coefficients of each objective, first order against a step that is taken, resumption."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_lines
from helpers.reference import length_mask
from helpers.results import files_up_to
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gtpo.prompts import TAGS
from gtpo.runs.directory import to_argv
from study.one_step import TARGETS, OneStep, losses, one_step_of, write_effects

LENGTHS = (2, 4, 5)
WIDTH = 5


def test_the_coefficients_of_each_objective_computed_by_hand() -> None:
    mask = length_mask(LENGTHS, WIDTH)
    conflict = torch.zeros(3, WIDTH, dtype=torch.bool)
    conflict[:, 0] = True
    advantages = torch.tensor([1.0, 0.5, -1.5])
    entropy = torch.tensor([0.2, 0.9, 0.4])  # the second is above ln 2
    logps = -torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(0))
    leaf = logps.requires_grad_()
    found = losses(leaf, entropy, mask, conflict, advantages)
    rows = mask / (3 * torch.tensor(LENGTHS)[:, None])  # 1 / (G |o_i|) on the tokens
    signed = rows * advantages[:, None]
    strength = torch.tensor([1.0 - 0.02, 0.0, -1.5 - 0.04])  # delta_i (A_i - gamma <H>_i)
    whole = rows * strength[:, None]
    gtpo = whole.clone()
    gtpo[:, 0] *= torch.tensor([2.0, 2.0, 0.0])
    expected = {
        "GRPO": signed,
        "GTPO": gtpo,
        "GRPO, A > 0": signed.clamp(min=0),
    }
    assert set(found) == set(expected)
    for name, values in expected.items():
        [gradient] = torch.autograd.grad(found[name], leaf)
        torch.testing.assert_close(-gradient, values, msg=name)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shipped tiny base with a LoRA adapter whose B is not 0, and groups of four."""
    flags = {"model": "tiny", "dataset": "arithmetic", "lora_rank": 4, "G": 4, "max_completion_length": 48, "seed": 0}
    words = to_argv(flags | {"output_dir": str(tmp_path_factory.mktemp("run"))})
    trainer = one_step_of(words, None).trainer
    torch.manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return trainer


def group_with_variance(effects: OneStep) -> dict[str, Any]:
    return next(found for number in range(100) if (found := effects.of_group(number))["effects"])


def means(effects: OneStep) -> dict[str, float]:
    """The mean of ln pi over the tokens of each target."""
    found = dict.fromkeys(effects.counts, 0.0)
    with torch.no_grad():
        for part in effects.parts:
            logps, _ = effects.trainer._logps_and_entropy(effects.trainer.model, part)
            for name in part.keys() & TARGETS:
                found[name] += logps[part[name]].sum().item() / effects.counts[name]
    return found


@pytest.mark.slow
def test_the_first_order_is_that_of_a_step_that_is_taken(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of norm 0.05 along the gradients of GRPO and of its rewarded completions, which autograd is asked for."""
    effects = OneStep(trainer)
    step = 0.05
    gradients = []
    gradient_of = effects._gradient
    monkeypatch.setattr(
        effects, "_gradient", lambda loss: gradients.append(found := gradient_of(loss)) or found.clone()
    )
    found = group_with_variance(effects)
    start = means(effects)
    weights = parameters_to_vector(effects.weights).detach()
    of_objective = dict(zip(found["effects"], gradients, strict=True))
    largest = 0.0
    for name in ("GRPO", "GRPO, A > 0"):
        direction = of_objective[name] / of_objective[name].norm()
        vector_to_parameters(weights + step * direction.float(), effects.weights)
        for target, value in means(effects).items():
            effect = found["effects"][name][target]
            assert (value - start[target]) / step == pytest.approx(effect, rel=0.1, abs=5e-4), (name, target)
            largest = max(largest, abs(effect))
        vector_to_parameters(weights.clone(), effects.weights)
    assert largest > 0.01  # or the tolerance would accept everything


@pytest.mark.slow
def test_the_targets_are_tags_and_answer(trainer: Any) -> None:
    decode = trainer._tokenizer.decode
    for part in OneStep(trainer).parts:
        tags = part["own tags" if "own tags" in part else "tags"]
        for ids, of_tags in zip(part["completion_ids"], tags, strict=True):
            assert decode(ids[of_tags]).replace("\n", "") == "".join(TAGS)
        for ids, of_answer in zip(part["completion_ids"], part.get("answer", ()), strict=False):
            assert decode(ids[of_answer]).strip().isdigit()


@pytest.mark.slow
def test_a_prompt_that_returns_has_other_completions(trainer: Any) -> None:
    effects = OneStep(trainer)
    found = group_with_variance(effects)
    assert effects.of_group(found["group"] + len(effects.prompts))["effects"] != found["effects"]


@pytest.mark.slow
def test_an_interrupted_measurement_continues_with_the_same_groups(trainer: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    made = []
    make = lambda: made.append(OneStep(trainer)) or made[-1]  # noqa: E731
    cut = tmp_path / "cut.jsonl"
    write_effects(make, whole, 3)
    lines = whole.read_text().splitlines(keepends=True)
    assert [json.loads(line)["group"] for line in lines] == [0, 1, 2]
    cut.write_text(lines[0] + lines[1][:40])  # killed while it wrote the second line
    with files_up_to(len(lines[0]) - 1), pytest.raises(OSError, match="File too large"):
        write_effects(make, cut, 3)
    write_effects(make, cut, 3)
    assert read_lines(cut) == [json.loads(line) for line in lines]
    assert len(made) == 2
    write_effects(make, cut, 3)
    assert len(made) == 2  # nothing is left
