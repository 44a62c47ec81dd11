"""The change of a share by a step of each correction, to first order: against gradients of the whole objective."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo.models.hub import TINY_BASE
from study.push import Group, along, changes, gradient, logps, main, sample


@pytest.fixture(scope="module")
def sampled() -> tuple[torch.nn.Module, list[Group]]:
    """A base in float64, and groups of two prompts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in (2, 3)]
    return model, [sample(model, tokenizer, row) for row in rows]


def test_a_change_is_the_inner_product_of_two_gradients(sampled: tuple[torch.nn.Module, list[Group]]) -> None:
    """With both weights of a token, and the weights of the model are as before."""
    model, groups = sampled
    before = [weight.clone() for weight in model.parameters()]
    direction = gradient(model, groups, "guesses")
    shares = torch.cat([group.shares["guesses"] for group in groups])
    assert 0 < shares.mean() < 1
    found = [changes(*each) for each in zip(groups, along(model, groups, direction), strict=True)]
    assert all(torch.equal(*each) for each in zip(model.parameters(), before, strict=True))
    for group, of_group in zip(groups, found, strict=True):
        scores = logps(model, group)
        lengths = group.valid.sum(1, keepdim=True)
        for (name, weights), change in of_group.items():
            divisor = lengths if weights == "1/|o_i|" else lengths.double().mean()
            objective = (group.pushes[name] * scores / divisor).sum() / 8
            parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
            expected = sum((part * to).sum() for part, to in zip(parts, direction, strict=True))
            assert change == pytest.approx(1000 * expected.item(), rel=1e-3, abs=1e-3)
    assert len({of_group["correction alone", "equal"] for of_group in found}) == 2


def test_the_gradient_of_a_share_is_that_of_its_score_function(sampled: tuple[torch.nn.Module, list[Group]]) -> None:
    model, groups = sampled
    shares = torch.cat([group.shares["guesses"] for group in groups])
    scores = torch.cat([logps(model, group).sum(1) for group in groups])
    expected = torch.autograd.grad(((shares - shares.mean()) * scores).mean(), list(model.parameters()))
    for found, part in zip(gradient(model, groups, "guesses"), expected, strict=True):
        torch.testing.assert_close(found, part)


def test_every_correction_has_a_line_for_both_shares(capsys: pytest.CaptureFixture[str]) -> None:
    main(str(TINY_BASE), count=4, seed=0)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("4 groups of 8") and len(lines) == 16
    assert [line for line in lines if line.startswith("right answers  correction on tags             1/|o_i|")]
