"""What a step leaves in the metrics and in the table of completions, and one group for notebooks.

Nothing here changes the loss.
"""

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gtpo.errors import UsageError
from gtpo.reports.groups import Group
from gtpo.training.callbacks import non_finite_error
from gtpo.training.checks import sampler_gap
from gtpo.training.diagnosis import conflict_metrics

TAG_METRICS = tuple(f"tag_logps/{name}" for name in ("reasoning_start", "reasoning_end", "answer_start", "answer_end"))
# State that a training step changes, besides the policy.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check")


class Measured(NamedTuple):
    """What the objective used: <H>_i (B,), lambda (B, T), delta (B,), and 0-d metrics by name."""

    entropy: Tensor
    weights: Tensor
    keep: Tensor
    metrics: dict[str, Tensor]


def record_rollouts(
    trainer: Any,
    inputs: list[dict[str, Any]],
    batch: dict[str, Any],
    ids: Tensor,
    valid: Tensor,
    advantages: Tensor,
    spans: tuple[Tensor, Tensor],
    group_size: int,
) -> None:
    """The conflict metrics of a step, and its rows of the table; ``ids`` (B, T) and the rest are of all processes."""
    mode = "train" if trainer.model.training else "eval"
    found = conflict_metrics(
        trainer, ids, valid, spans, advantages, group_size, positive_weight=trainer.gtpo.conflict_positive_weight
    )
    for name, value in (found | {"completion_length": (valid.sum() / len(ids)).item()}).items():
        trainer._metrics[mode][name].append(value)
    if mode == "eval" or not trainer.log_completions:
        return
    rows = len(batch["completion_ids"])
    first = trainer.accelerator.process_index * rows
    batch["row"] = torch.arange(first, first + rows, device=ids.device)  # follows TRL's shuffle
    decode = partial(trainer.processing_class.decode, skip_special_tokens=True)
    columns = {
        "conflicts": spans_in_text(ids, valid, spans[0] | spans[1], decode),
        "cut_off": cut_off(trainer, ids, valid),
        "messages": gather_object([messages(row) for row in inputs]),
        "gold_answer": gather_object([gold_answer(row) for row in inputs]),
        "entropy": [None] * len(ids),  # this and delta are filled in with the loss
        "delta": [None] * len(ids),
    }
    for column, values in columns.items():
        trainer._logs["extra"][column].extend(values)


def record_loss(
    trainer: Any, loss: Tensor, measured: Measured, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]
) -> None:
    """The metrics of a micro-batch; RunError on every process if the loss or an entropy is NaN or infinite."""
    entropy, _, keep, metrics = measured
    mode = "train" if trainer.model.training else "eval"
    accelerator = trainer.accelerator
    finite = loss.detach().isfinite() & entropy.isfinite().all()
    if not accelerator.gather(finite).all():  # every process raises, or the others would hang
        what = "the loss" if entropy.isfinite().all() else "the entropy"
        raise non_finite_error(what, trainer, [inputs | {"logps": logps, "token_entropy": token_entropy}])
    if "row" in inputs:
        rows = accelerator.gather(inputs["row"]).tolist()
        for column, local in (("entropy", entropy), ("delta", keep)):
            for row, value in zip(rows, accelerator.gather(local).tolist(), strict=True):
                trainer._logs["extra"][column][row] = value
    if inputs.get("sampling_per_token_logps") is not None:
        drawn = inputs.get("old_per_token_logps", logps.detach())  # under the weights that vLLM sampled with
        metrics["sampler_logp_gap"] = sampler_gap(drawn, inputs)
    if "kl" in metrics:  # a mean over tokens: weight each process and micro-batch by its tokens
        share = inputs["completion_mask"].sum() / inputs["num_items_in_batch"].clamp(min=1)
        micro_batches = trainer.args.steps_per_generation if mode == "train" else 1
        metrics["kl"] = metrics["kl"] * share * accelerator.num_processes * micro_batches
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(accelerator.gather(value).mean().item())
    of_tags = tag_logps(
        trainer._tokenizer, inputs["completion_ids"], inputs["completion_mask"], logps.detach(), trainer.tags
    )
    of_tags = accelerator.gather(of_tags).view(-1, len(TAG_METRICS)).nanmean(0)
    for name, logp in zip(TAG_METRICS, of_tags.tolist(), strict=True):
        if not math.isnan(logp):
            trainer._metrics[mode][name].append(logp)


# Columns of the table in addition to TRL's


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


def cut_off(trainer: Any, ids: Tensor, valid: Tensor) -> list[bool]:
    """Whether each completion, shape (B, T), ends at the length limit, without an end token."""
    end_ids = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
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


# One group, without training on it


def inspect_group(trainer: Any, row: int) -> Group:
    """Generate and score G completions of a row of ``train_dataset`` as a training step does, without training on them.

    Nothing is logged or counted, and the state of the random generators is restored: a run is the same with and without
    the call, and a second call returns the same completions. UsageError if several processes are running.
    """
    if trainer.accelerator.num_processes > 1:
        raise UsageError(f"inspect_group needs one process, and {trainer.accelerator.num_processes} are running.")
    was_training = trainer.model.training
    trainer.model.train()  # groups of training mode; there is no dropout
    example, group_size = trainer.train_dataset[row], trainer.num_generations
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with _unlogged(trainer), torch.random.fork_rng(devices), torch.no_grad():
            batch = trainer._generate_and_score_completions([example] * group_size)
            table = trainer._logs["rewards"]
            rewards = {name: list(table[name])[-group_size:] for name in trainer.reward_func_names}
            scores = trainer.scores(trainer.model_wrapped, batch, trainer.args.per_device_train_batch_size)
            _, measured = trainer._objective(*scores, batch)
    finally:
        trainer.model.train(was_training)
    valid = batch["completion_mask"].bool()
    tokenizer = trainer.processing_class
    rows = range(group_size)
    return Group(
        prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
        tokens=[_token_texts(tokenizer, batch["completion_ids"][i][valid[i]].tolist()) for i in rows],
        rewards=rewards,
        advantages=batch["advantages"].tolist(),
        weights=[measured.weights[i][valid[i]].tolist() for i in rows],
        entropy=measured.entropy.tolist(),
        keep=measured.keep.tolist(),
        messages=messages(example),
        gold_answer=gold_answer(example),
        cut_off=cut_off(trainer, batch["completion_ids"], batch["completion_mask"]),
    )


@contextmanager
def _unlogged(trainer: Any) -> Iterator[None]:
    """Inside, a step may be generated and scored; afterwards nothing of it is logged or counted."""
    logged = copy.deepcopy({name: getattr(trainer, name) for name in _LOGGED})
    tokens_seen = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        trainer.__dict__.update(logged)
        trainer.state.num_input_tokens_seen = tokens_seen


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]
