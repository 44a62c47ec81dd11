"""Columns that the table of completions has in addition to TRL's: conflict spans, length limit, prompt, gold answer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def spans_in_text(ids: Tensor, valid: Tensor, mask: Tensor, decode: Callable[[Tensor], str]) -> list[list[list[int]]]:
    """The conflict spans of each completion as [start, end) in the characters of its text. Shape (B, T) each.

    ``decode`` gives the text of tokens, shape (t,).
    """
    return [_spans(*row, decode) for row in zip(ids, valid.bool(), mask, strict=True)]


def _spans(ids: Tensor, valid: Tensor, mask: Tensor, decode: Callable[[Tensor], str]) -> list[list[int]]:
    ids, mask = ids[valid], mask[valid]
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int()).nonzero()[:, 0]
    texts = [decode(ids[:edge]) for edge in edges.tolist()]
    return [[len(start), len(end)] for start, end in zip(texts[::2], texts[1::2], strict=True)]


def cut_off(ids: Tensor, valid: Tensor, end_ids: Sequence[int]) -> list[bool]:
    """Whether each completion, shape (B, T), ends at the length limit, without one of the tokens ``end_ids``."""
    last = ids.gather(1, (valid.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]
    return (~torch.isin(last, torch.tensor(end_ids, device=ids.device))).tolist()


def messages(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a row's prompt; None for plain text."""
    turns = row.get("prompt")
    if not isinstance(turns, list):
        return None
    return [{"role": str(turn["role"]), "content": str(turn.get("content") or "")} for turn in turns]


def gold_answer(row: dict[str, Any]) -> str | None:
    """The answer in the data; None where it has none."""
    return None if row.get("answer") is None else str(row["answer"])
