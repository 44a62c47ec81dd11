"""One-step effects: the coefficients of each objective."""

import torch
from helpers.reference import length_mask

from study.one_step import losses

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
