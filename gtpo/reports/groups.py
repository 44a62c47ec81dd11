"""One group as plain data: G completions of a prompt, and what the objective does with each token."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gtpo_loss import conflict_weights


@dataclass(frozen=True)
class Group:
    """A prompt and its G completions; every list has one element per completion.

    Attributes:
        prompt: The prompt as text; a group from a stored table lacks the special tokens.
        tokens: Text of each token, the end-of-text token included. From a stored table: text of each span.
        rewards: Name of a reward function -> its rewards; None where it gave none.
        advantages: A_i.
        weights: lambda of each token, Eq. 9.
        entropy: <H>_i in nats.
        keep: delta: 0 for a completion that the entropy filter drops, else 1.
        messages: The turns of the prompt, {role, content}; None for a prompt that is plain text.
        gold_answer: The answer of the data; None where it has none.
        cut_off: Whether a completion was cut off at the length limit; empty where that is not known.
    """

    prompt: str
    tokens: list[list[str]]
    rewards: dict[str, list[float | None]]
    advantages: list[float]
    weights: list[list[float]]
    entropy: list[float]
    keep: list[float]
    messages: list[dict[str, Any]] | None = None
    gold_answer: str | None = None
    cut_off: list[bool] = field(default_factory=list)


def logged_text(logged: Any) -> str:
    """A prompt or completion of TRL's table as text: since 1.16 the table has the messages of a conversation."""
    return logged if isinstance(logged, str) else "\n".join(message["content"] for message in logged)


def read_group(
    table: str | Path, group_size: int, rewards: Sequence[str], positive_weight: float = 2.0
) -> tuple[int, Group]:
    """The step and the first group of a stored table of completions (``completions/*.parquet`` of a run).

    ``rewards`` are the columns that are rewards, where the table has them; a reward function may log other columns.
    ``positive_weight`` is the run's lambda on shared tokens with A > 0.
    """
    from pyarrow.parquet import read_table

    rows = read_table(table).to_pylist()[:group_size]
    tokens, weights = [], []
    for row in rows:
        on_span = conflict_weights(
            torch.ones(1, 1, dtype=torch.bool), torch.tensor([row["advantage"]]), positive_weight
        ).item()
        text = logged_text(row["completion"])
        edges = [0, *(edge for span in row["conflicts"] for edge in span), len(text)]
        tokens.append([text[a:b] for a, b in itertools.pairwise(edges)])
        weights.append([on_span if piece % 2 else 1.0 for piece in range(len(edges) - 1)])
    return rows[0]["step"], Group(
        prompt=logged_text(rows[0]["prompt"]),
        tokens=tokens,
        rewards={name: [row[name] for row in rows] for name in rewards if name in rows[0]},
        advantages=[row["advantage"] for row in rows],
        weights=weights,
        entropy=[row["entropy"] for row in rows],
        keep=[row["delta"] for row in rows],
        messages=rows[0].get("messages"),
        gold_answer=rows[0].get("gold_answer"),
        cut_off=[row["cut_off"] for row in rows if "cut_off" in row],
    )
