"""ln pi of the four tags in the sampled completions: the first thing that a loss of format moves."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any

from torch import Tensor

TAG_METRICS = tuple(f"tag_logps/{name}" for name in ("reasoning_start", "reasoning_end", "answer_start", "answer_end"))


def tag_logps(tokenizer: Any, ids: Tensor, valid: Tensor, logps: Tensor, tags: Sequence[str]) -> Tensor:
    """Mean over the completions that have a tag of its ln pi, the sum over the tokens of its first occurrence.

    Args:
        tokenizer: Of the completions.
        ids, valid, logps: Completion tokens, 1 on them, and ln pi of each. Shape (B, T).
        tags: The four tags, of ASCII characters.

    Returns:
        Nats, NaN for a tag that no completion has. Shape (4,).
    """
    found = logps.new_full((len(ids), len(tags)), float("nan"))
    for row, (tokens, mask) in enumerate(zip(ids.tolist(), valid.tolist(), strict=True)):
        pieces = tokenizer.convert_ids_to_tokens(list(compress(tokens, mask)))
        for column, tag in enumerate(tags):
            if span := tag_span(pieces, tag):
                found[row, column] = logps[row, valid[row].bool()][span[0] : span[1]].sum()
    return found.nanmean(0)


def tag_span(pieces: Sequence[str | None], tag: str) -> tuple[int, int] | None:
    """The tokens [first, last + 1) that the first occurrence of a tag touches; None without one.

    A piece is None where the model's vocabulary is larger than the tokenizer's.
    """
    texts = [piece or "" for piece in pieces]
    start = "".join(texts).find(tag)
    ends = list(accumulate(map(len, texts)))
    return None if start < 0 else (bisect_right(ends, start), bisect_left(ends, start + len(tag)) + 1)
