"""Where a run of conflict tokens ends: against loops over the tokens, across several blocks."""

from typing import Any

import pytest
import torch
from helpers.reference import naive_backward_spans, naive_forward_spans, unpad
from torch import Tensor

import gtpo_loss
from gtpo_loss import BLOCK, CONFLICT_SPANS, conflict_mask, conflict_spans, plain_opening_spans


@pytest.mark.parametrize("span", CONFLICT_SPANS)
@pytest.mark.parametrize("width", [1, 7, 300, 2 * BLOCK])
def test_spans_equal_the_loops_over_tokens(span: str, width: int) -> None:
    """Runs that end in the first block, in a later one and at the last token; masks with holes."""
    generator = torch.Generator().manual_seed(width)
    groups = 12
    size = 5
    base = torch.randint(3, (groups, 1, width), generator=generator)
    rate = torch.rand(groups, 1, 1, generator=generator) ** 6  # of tokens that differ from the others'
    changed = torch.rand(groups, size, width, generator=generator) < rate
    ids = torch.where(changed, 3 + torch.randint(2, changed.shape, generator=generator), base).flatten(0, 1)
    valid = torch.arange(width) < torch.randint(width + 1, (groups * size, 1), generator=generator)
    valid[: groups * size // 2] = True
    valid[::7] = torch.rand(width, generator=generator) < 0.9
    advantages = torch.randint(-1, 2, (groups * size,), generator=generator).float()
    found = conflict_spans(ids, valid, advantages, size, span)
    completions = unpad(ids, valid)
    scores = advantages.tolist()
    for actual, naive in zip(found, (naive_forward_spans, naive_backward_spans), strict=True):
        expected = []
        for start in range(0, len(ids), size):
            expected += naive(completions[start : start + size], scores[start : start + size], span)
        assert unpad(actual, valid) == expected
        assert not actual[~valid].any()
        assert span == "common" or width < 300 or actual[:, BLOCK:].any()
    first = slice(0, 4 * size)  # the plain form is slow
    forward, backward = (unpad(each[first], valid[first]) for each in found)
    if span == "anchored":
        assert plain_spans(completions[first], scores, size) == forward
        mirrored = [row[::-1] for row in completions[first]]
        assert [row[::-1] for row in plain_spans(mirrored, scores, size)] == backward


def plain_spans(completions: list[list[int]], scores: list[float], size: int) -> list[list[bool]]:
    spans = []
    for start in range(0, len(completions), size):
        spans += plain_opening_spans(completions[start : start + size], scores[start : start + size])
    return spans


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
