"""TRL's batches: how rows are padded, gathered and counted, and random numbers apart from those of training."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed
from trl.trainer.utils import pad

from gtpo_loss import conflict_spans, tag_mask

Batch = dict[str, Any]  # tensors of TRL's trainer by name
Row = dict[str, Any]  # of a dataset, or of what is logged
Metrics = dict[str, Tensor]  # 0-d, by name
Numbers = dict[str, float]  # by name
Ids = list[list[int]]  # tokens without padding
Pair = tuple[Tensor, Tensor]
Spans = Pair  # M_fw and M_bw, (B, T) each
Scores = Pair  # ln pi and H of tokens


class LossInputs(TypedDict):
    """``inputs`` of an objective: a dict of b rows, a random part of those of a step; masks are 1 on tokens."""

    prompt_ids: Tensor  # padded left, (b, P)
    prompt_mask: Tensor  # (b, P)
    completion_ids: Tensor  # padded right, (b, T)
    completion_mask: Tensor  # (b, T)
    advantages: Tensor  # A_i, (b,)
    has_reward: Tensor  # bool, (b,)
    conflict_mask: Tensor  # M, bool, (b, T)
    row: Tensor  # the place among the completions of the step, whose groups of G are adjacent, (b,)
    num_items_in_batch: Tensor  # tokens of all completions of a generation, ()
    # Where the settings need them: of several updates for a generation, or vLLM; of beta; of vLLM the other two
    old_per_token_logps: NotRequired[Tensor]  # (b, T)
    ref_per_token_logps: NotRequired[Tensor]  # (b, T)
    sampling_per_token_logps: NotRequired[Tensor]  # (b, T)
    importance_sampling_ratio: NotRequired[Tensor]  # (b, T)


class Trainer(Protocol):
    """What metrics and checks use of a trainer: of TRL's, and the head and the settings of ours."""

    accelerator: Any
    args: Any
    state: Any
    model: Any
    model_wrapped: Any
    processing_class: Any
    train_dataset: Any
    shuffle_dataset: bool
    log_completions: bool
    eos_token_ids: list[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    gtpo: Any
    tags: Sequence[str]
    _metrics: dict[str, dict[str, list[float]]]
    _logs: dict[str, Any]

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor: ...
    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: LossInputs) -> Any: ...
    @property
    def generation(self) -> int: ...
    def losses(self) -> int: ...
    def causal_lm(self, model: Any) -> Any: ...
    def head(self, causal_lm: Any, hidden: Tensor, targets: Tensor) -> Scores: ...
    def scores(self, model: Any, batch: Batch, rows: int) -> Scores: ...
    def open_bar(self, title: str, completions: int) -> AbstractContextManager[Any]: ...
    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Ids, Any, Any]: ...
    def _generate_single_turn(self, prompt_ids: Ids, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...


class Rollouts(NamedTuple):
    """The completions of all processes, of which the rows of a group are adjacent."""

    ids: Tensor  # (B, T)
    valid: Tensor  # 1 on their tokens, (B, T)
    spans: Spans
    advantages: Tensor  # A_i, (B,)
    group_size: int


def gather_rollouts(trainer: Trainer, batch: Batch, advantages: Tensor, group_size: int) -> Rollouts:
    """Those of all processes, zero-padded to the longest, in rank order. ``advantages``: of all of them, (B,)."""
    rows = []
    for name in ("completion_ids", "completion_mask"):
        part = trainer.accelerator.pad_across_processes(batch[name], dim=1)
        rows.append(trainer.accelerator.gather(part))
    ids, valid = rows
    forward, backward = conflict_spans(ids, valid, advantages, group_size, trainer.gtpo.conflict_span)
    if trainer.gtpo.conflict_tokens == "tags":
        rows = [tokens[is_token] for tokens, is_token in zip(ids, valid.bool(), strict=True)]
        pieces = [trainer.processing_class.convert_ids_to_tokens(row.tolist()) for row in rows]
        in_tags = tag_mask(pieces, trainer.tags, ids.shape[1]).to(ids.device)
        forward, backward = forward & in_tags, backward & in_tags
    return Rollouts(ids, valid, (forward, backward), advantages, group_size)


def replace_last(log: deque[float], values: list[float]) -> None:
    """The last entries of a log that may hold fewer."""
    for _ in range(min(len(log), len(values))):
        log.pop()
    log.extend(values)


def padded_batch(prompt_ids: Ids, completion_ids: Ids, pad_token_id: int, device: torch.device) -> Batch:
    """TRL's layout: prompts (B, P) padded to the left, completions (B, T) to the right, and their masks."""
    prompts, prompt_mask = padded(prompt_ids, "left", pad_token_id, device)
    completions, completion_mask = padded(completion_ids, "right", pad_token_id, device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
    }


def padded(lists: Ids, side: str, pad_token_id: int, device: torch.device) -> Pair:
    """Token ids and their mask. Shape (B, T) each."""
    ids = [torch.tensor(row, dtype=torch.long) for row in lists]
    mask = [torch.ones_like(tokens) for tokens in ids]
    return pad(ids, pad_token_id, side).to(device), pad(mask, 0, side).to(device)


def log_metrics(trainer: Trainer, metrics: Numbers) -> None:
    """Add values to those whose mean TRL logs."""
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in metrics.items():
        logged[name].append(value)


@contextmanager
def isolated_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, Python, NumPy and PyTorch start from a seed; afterwards they are where they were."""
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
