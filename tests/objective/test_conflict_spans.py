"""The readings of the conflict span that Section 5.1 leaves open, each against its own reference."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.reference import length_mask, pad, unpad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gtpo_loss
from gtpo_loss import BLOCK, CONFLICT_SPANS, conflict_mask, conflict_spans, rewards_at_mean

A, B, C, D, E = 1, 2, 3, 4, 5


def naive_forward(group: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    """The forward mask of one group, written from the definitions."""
    masks = []
    for tokens in group:
        conflict = []
        for p, token in enumerate(tokens):
            signs = {a > 0 for o, a in zip(group, advantages, strict=True) if a != 0 and p < len(o) and o[p] == token}
            conflict.append(signs == {True, False})
        mask = [False] * len(tokens)
        if span == "first_run":
            position = 0
            while position < len(tokens) and not conflict[position]:
                position += 1
            while position < len(tokens) and conflict[position]:
                mask[position] = True
                position += 1
        if span == "common" and any(a > 0 for a in advantages) and any(a < 0 for a in advantages):
            signed = [o for o, a in zip([*group, tokens], [*advantages, 1.0], strict=True) if a != 0]
            position = 0
            while position < min(map(len, signed)) and all(o[position] == tokens[position] for o in signed):
                mask[position] = True
                position += 1
        masks.append(mask)
    return masks


def naive_mask(group: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    forward = naive_forward(group, advantages, span)
    backward = naive_forward([o[::-1] for o in group], advantages, span)
    return [[f or b for f, b in zip(fw, bw[::-1], strict=True)] for fw, bw in zip(forward, backward, strict=True)]


def mask_of(group: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    width = max(map(len, group)) + 2
    completion_mask = length_mask([len(o) for o in group], width)
    ids = pad(group, width, A, torch.int64)  # padding equal to a real token
    mask = conflict_mask(ids, completion_mask, torch.tensor(advantages), len(group), span)
    assert not mask[~completion_mask.bool()].any()
    return unpad(mask, completion_mask)


def test_the_first_run_may_start_anywhere() -> None:
    #  + A B C D E     B C agree at positions 1 and 2, E at the end; from the right only E
    #  - D B C A E
    group, advantages = [[A, B, C, D, E], [D, B, C, A, E]], [1.0, -1.0]
    assert mask_of(group, advantages, "first_run") == [[False, True, True, False, True]] * 2
    assert mask_of(group, advantages, "anchored") == [[False, False, False, False, True]] * 2


def test_the_common_prefix_is_shared_by_all() -> None:
    #  + A B C          A is common to all three; B only to the first two, which is enough for "anchored"
    #  - A B D
    #  - A C E
    group, advantages = [[A, B, C], [A, B, D], [A, C, E]], [1.0, -0.5, -0.5]
    assert mask_of(group, advantages, "common") == [[True, False, False]] * 3
    assert mask_of(group, advantages, "anchored")[0] == [True, True, False]


def test_a_completion_without_advantage_does_not_shorten_the_common_prefix() -> None:
    group, advantages = [[A, B, C], [A, B, D], [E, E]], [1.0, -1.0, 0.0]
    assert mask_of(group, advantages, "common") == [[True, True, False], [True, True, False], [False, False]]


groups = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=2, max_size=5)


@pytest.mark.parametrize("span", ["first_run", "common"])
@settings(max_examples=500)
@given(group=groups, data=st.data())
def test_spans_match_their_reference(span: str, group: list[list[int]], data: st.DataObject) -> None:
    size = len(group)
    advantages = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=size, max_size=size))
    assert mask_of(group, advantages, span) == naive_mask(group, advantages, span)


def test_an_unknown_span_is_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'middle' is unknown: pick one of anchored, first_run, common"):
        conflict_mask(ids, ids, torch.tensor([1.0, -1.0]), 2, "middle")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.8, 0.9, 0.3, 0.0, 0.5], [False, False, False, False, True]),
        ([0.3, 0.6, 0.9, 0.6, 0.6], [False, True, False, True, True]),
        ([0.1, 0.1, 0.1, 0.1, 0.1], [True] * 5),
        ([0.0, 0.0, 0.0, 0.0, 0.0], [True] * 5),
        ([1.0, 1.001, 0.999, 1.0005, 0.9995], [True, False, False, False, False]),
    ],
)
@pytest.mark.parametrize("change", [lambda r: r, lambda r: 10 * r, lambda r: 0.1 * r, lambda r: r + 100.0])
def test_a_reward_at_the_mean_of_its_group_is_there_in_any_unit(
    change: Callable[[Tensor], Tensor], rewards: list[float], expected: list[bool]
) -> None:
    other = [1.0, 0.0, 0.0, 0.0, 0.0]
    found = rewards_at_mean(torch.cat([change(torch.tensor(rewards)), torch.tensor(other)]), 5)
    assert found.tolist() == [*expected, *[False] * 5]


def test_a_reward_that_is_nan_is_not_at_the_mean() -> None:
    assert rewards_at_mean(torch.tensor([math.nan, 1.0, 2.0, 2.0]), 2).tolist() == [False, False, True, True]


def spans_by_pairs(ids: Tensor, valid: Tensor, advantages: Tensor, size: int, span: str) -> list[Tensor]:
    """M_fw and M_bw by comparing every pair of rows at every place."""
    columns = torch.arange(ids.shape[1])
    sign = advantages.sign().view(-1, size, 1)
    found = []
    for order in (torch.where(valid, way * columns, len(columns)).argsort(stable=True) for way in (1, -1)):
        tokens, kept = (part.gather(1, order).view(-1, size, len(columns)) for part in (ids, valid))
        tokens = torch.where(kept, tokens, -1 - torch.arange(size)[:, None])
        same = tokens[:, :, None] == tokens[:, None]  # (P, G, G, T)
        conflict = (same & (sign > 0)[:, None]).any(2) & (same & (sign < 0)[:, None]).any(2)
        if span == "common":
            conflict &= (same | (sign == 0)[:, None]).all(2)
        gap = (conflict.cummax(-1).values & ~conflict).cummax(-1).values
        run = conflict & ~gap if span == "first_run" else conflict.cummin(-1).values
        found.append(run.view_as(valid).gather(1, order.argsort()))
    return found


@pytest.mark.parametrize("span", CONFLICT_SPANS)
@pytest.mark.parametrize("width", [1, 7, 300, 2 * BLOCK])
def test_spans_equal_a_comparison_of_all_pairs(span: str, width: int) -> None:
    """Runs that end in the first block, in a later one and at the last token; masks with holes."""
    generator = torch.Generator().manual_seed(width)
    groups, size = 12, 5
    base = torch.randint(3, (groups, 1, width), generator=generator)
    rate = torch.rand(groups, 1, 1, generator=generator) ** 6  # of tokens that differ from the others'
    changed = torch.rand(groups, size, width, generator=generator) < rate
    ids = torch.where(changed, 3 + torch.randint(2, changed.shape, generator=generator), base).flatten(0, 1)
    valid = torch.arange(width) < torch.randint(width + 1, (groups * size, 1), generator=generator)
    valid[: groups * size // 2] = True
    valid[::7] = torch.rand(width, generator=generator) < 0.9
    advantages = torch.randint(-1, 2, (groups * size,), generator=generator).float()
    found = conflict_spans(ids, valid, advantages, size, span)
    for actual, expected in zip(found, spans_by_pairs(ids, valid, advantages, size, span), strict=True):
        assert actual.tolist() == expected.tolist()
        assert span == "common" or width < 300 or actual[:, BLOCK:].any()


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
    assert sum(places) == (2 * 1000 if span == "first_run" else 3 * BLOCK)
