"""ln pi of the tags in sampled completions: a metric of the study's runs (docs/log.md, the premise of Section 4.1)."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor

from study import Words

TAG_METRICS = (
    "tag_logps/reasoning_start",
    "tag_logps/reasoning_end",
    "tag_logps/answer_start",
    "tag_logps/answer_end",
)


def tag_spans(tokenizer: Any, ids: Tensor, valid: Tensor, tags: Words) -> Tensor:
    """The tokens [first, last + 1) of each tag's first occurrence; [0, 0) without one. (B, T) -> (B, tags, 2)

    ``tags`` are of ASCII characters; tokens are counted without padding.
    """
    rows = []
    for tokens, mask in zip(ids.tolist(), valid.tolist(), strict=True):
        pieces = tokenizer.convert_ids_to_tokens(list(compress(tokens, mask)))
        rows.append([tag_span(pieces, tag) or (0, 0) for tag in tags])
    return torch.tensor(rows, device=ids.device)


def inside(spans: Tensor, valid: Tensor) -> Tensor:
    """The tokens in each span of :func:`tag_spans`. (B, tags, 2), (B, T) -> bool (B, tags, T)"""
    places = valid.cumsum(1) - 1
    places = places.masked_fill(valid == 0, -1)[:, None]  # (B, 1, T)
    first, end = spans.split(1, dim=-1)  # (B, tags, 1)
    return (places >= first) & (places < end)


def tag_logps(spans: Tensor, valid: Tensor, logps: Tensor) -> Tensor:
    """Mean over the completions that have a tag of its ln pi, the sum over the tokens of its first occurrence.

    ``spans`` of :func:`tag_spans`, ``valid`` and ``logps`` (B, T) -> nats (4,), NaN for a tag that no completion has.
    """
    of_tags = torch.where(inside(spans, valid), logps[:, None], 0.0)  # (B, 4, T)
    return of_tags.sum(-1).masked_fill(spans[..., 1] == 0, math.nan).nanmean(0)  # absent: [0, 0)


def tag_span(pieces: Sequence[str | None], tag: str) -> tuple[int, int] | None:
    """The tokens [first, last + 1) that the first occurrence of a tag touches; None without one.

    A piece is None where the model's vocabulary is larger than the tokenizer's.
    """
    texts = [piece or "" for piece in pieces]
    start = "".join(texts).find(tag)
    if start < 0:
        return None
    end = start + len(tag)
    ends = list(accumulate(map(len, texts)))
    return bisect_right(ends, start), bisect_left(ends, end) + 1
