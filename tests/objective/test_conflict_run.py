"""Where a run of conflict tokens ends: against loops over the tokens, across several blocks."""

from typing import Any

import pytest
import torch
from helpers.reference import naive_backward_spans, naive_conflict_mask, naive_forward_spans, unpad
from torch import Tensor

import gtpo_loss
from examples.objectives.credit import credited_mask
from gtpo_loss import BLOCK, CONFLICT_SPANS, conflict_mask, conflict_spans, plain_opening_spans


@pytest.mark.parametrize("span", CONFLICT_SPANS)
@pytest.mark.parametrize(("width", "size"), [(0, 2), (1, 5), (7, 1), (7, 3), (7, 5), (300, 5), (2 * BLOCK, 5)])
def test_spans_equal_the_loops_over_tokens(span: str, width: int, size: int) -> None:
    """Runs that end in the first block, in a later one and at the last token; masks with holes."""
    generator = torch.Generator().manual_seed(width)
    groups = 12
    rows = groups * size
    base = torch.randint(3, (groups, 1, width), generator=generator)
    rate = torch.rand(groups, 1, 1, generator=generator) ** 6  # of tokens that differ from the others'
    changed = torch.rand(groups, size, width, generator=generator) < rate
    ids = torch.where(changed, 3 + torch.randint(2, changed.shape, generator=generator), base).flatten(0, 1)
    valid = torch.arange(width) < torch.randint(width + 1, (rows, 1), generator=generator)
    valid[: rows // 2] = True
    valid[::7] = torch.rand(width, generator=generator) < 0.9
    advantages = torch.randint(-2, 3, (rows,), generator=generator).float()
    forward, backward = conflict_spans(ids, valid, advantages, size, span)
    completions = unpad(ids, valid)
    scores = advantages.tolist()
    expected_forward = []
    expected_backward = []
    plain = []
    for start in range(0, rows, size):
        group = completions[start : start + size], scores[start : start + size]
        expected_forward += naive_forward_spans(*group, span)
        expected_backward += naive_backward_spans(*group, span)
        plain += plain_opening_spans(*group)
    assert unpad(forward, valid) == expected_forward
    assert unpad(backward, valid) == expected_backward
    assert not (forward | backward)[~valid].any()
    assert span == "common" or width < 300 or (forward[:, BLOCK:].any() and backward[:, BLOCK:].any())
    if span == "anchored":
        assert plain == expected_forward
        assert torch.equal(conflict_mask(ids, valid, advantages, size), forward | backward)
        credited = naive_conflict_mask(completions, scores, size, "credited")
        assert unpad(credited_mask(ids, valid, advantages, size), valid) == credited


@pytest.mark.parametrize("span", CONFLICT_SPANS)
def test_an_anchored_run_is_not_followed_past_its_end(span: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    whole = gtpo_loss._conflicts

    def counted(tokens: Tensor, *args: Any) -> Tensor:
        places.append(tokens.shape[2])
        return whole(tokens, *args)

    monkeypatch.setattr(gtpo_loss, "_conflicts", counted)
    ids = torch.arange(2 * 1000).view(2, -1)
    ids[:, : BLOCK + 1] = 0  # from the left it ends in the second block, from the right in the first
    conflict_mask(ids, torch.ones_like(ids), torch.tensor([1.0, -1.0]), 2, span)
    assert sum(places) == (2 * BLOCK + 1000 if span == "first_run" else 3 * BLOCK)  # from the right none starts
