"""What a step leaves in the metrics and in the table of completions, and one group for notebooks: not the loss."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from gtpo.reports.html import Group
from gtpo.training.callbacks import non_finite_error
from gtpo.training.checks import sampler_metrics
from gtpo.training.diagnosis import conflict_counts, push_metrics

TOKEN_MEANS = {"kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
OVER_PROCESSES = {"clip_ratio/low_min": np.min, "clip_ratio/high_max": np.max}  # of the others the mean
# State that a training step changes, besides the policy.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check", "_push")


class Measured(NamedTuple):
    """What an objective used for a micro-batch of b rows, for metrics and the table of completions; no gradient.

    Only ``entropy`` is needed. The loss of a step is the mean of its micro-batches and processes, so ``token_weights``
    is w_i of this micro-batch alone: 1 / (b |o_i|) for GRPO. Without it ``conflict_push`` is not logged.
    """

    entropy: Tensor  # <H>_i, (b,)
    weights: Tensor | None = None  # lambda, (b, T); None: 1
    keep: Tensor | None = None  # delta, (b,); None: 1
    metrics: Mapping[str, Tensor] | None = None  # 0-d, by name
    token_weights: Tensor | None = None  # w_i, (b,): the factor of A_i r_it in the loss


class Push(NamedTuple):
    """Rollouts of all processes whose conflict push is measured once the objective has said w_i of every row."""

    ids: Tensor  # (B, T), as the mask
    valid: Tensor
    spans: tuple[Tensor, Tensor]  # M_fw and M_bw, (B, T) each
    advantages: Tensor  # (B,)
    group_size: int
    token_weights: dict[int, float]  # w_i by row


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
    found = conflict_counts(valid, spans)
    trainer._push = Push(ids, valid, spans, advantages, group_size, {}) if found["conflict_tokens"] else None
    for name, value in (found | {"completion_length": (valid.sum() / len(ids)).item()}).items():
        trainer._metrics[mode][name].append(value)
    rows = len(batch["completion_ids"])
    first = trainer.accelerator.process_index * rows
    batch["row"] = torch.arange(first, first + rows, device=ids.device)  # follows TRL's shuffle
    if mode == "eval" or not trainer.log_completions:
        return
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
    """Keep the metrics of a micro-batch; with the last one of a step all are read, at once."""
    entropy, metrics = measured.entropy, dict(measured.metrics or {})
    keep = torch.ones_like(entropy) if measured.keep is None else measured.keep
    weights = torch.full_like(entropy, math.nan) if measured.token_weights is None else measured.token_weights
    mode = "train" if trainer.model.training else "eval"
    micro_batches = trainer.args.steps_per_generation * trainer._parts if mode == "train" else 1
    parts = trainer.accelerator.num_processes * micro_batches  # whose losses are averaged
    logps = logps.detach()
    if inputs.get("sampling_per_token_logps") is not None:
        drawn = inputs.get("old_per_token_logps", logps)  # under the weights that vLLM sampled with
        metrics |= sampler_metrics(trainer, drawn, inputs)
    for name in TOKEN_MEANS & metrics.keys():  # weight each process and micro-batch by its tokens
        share = inputs["completion_mask"].sum() / inputs["num_items_in_batch"].clamp(min=1)
        metrics[name] = metrics[name] * share * parts
    finite = {"the loss": loss.detach().isfinite(), "the entropy": entropy.isfinite().all()}
    rows = [inputs["row"], entropy, keep, weights / parts]
    saved = inputs | {"logps": logps, "token_entropy": token_entropy}
    trainer._unread.append(_Unread(finite, metrics, rows, saved))
    if mode == "eval" or trainer.accelerator.sync_gradients:
        unread, trainer._unread = trainer._unread, []
        _read(trainer, mode, unread)


class _Unread(NamedTuple):
    """Of a micro-batch, on the device: flags and 0-d metrics by name, rows of the table (b,), and what it computed."""

    finite: dict[str, Tensor]
    metrics: dict[str, Tensor]
    rows: list[Tensor]
    inputs: dict[str, Any]


def _read(trainer: Any, mode: str, unread: list[_Unread]) -> None:
    """Log the micro-batches of a step; RunError on every process if a loss or an entropy is NaN or infinite.

    One gather and one transfer to the host; every process has to call it.
    """
    each = [torch.stack([*part.finite.values(), *part.metrics.values()]).float() for part in unread]
    tables = [torch.stack(part.rows, 1).float().flatten() for part in unread]
    found = trainer.accelerator.gather(torch.stack([torch.cat(pair) for pair in zip(each, tables, strict=True)])[None])
    values, rows = np.split(found.cpu().numpy(), [len(each[0])], axis=2)  # (processes, micro-batches, ...)
    flags = [*unread[0].finite]
    if not values[..., : len(flags)].all():  # every process raises, or the others would hang
        index = int(values[..., : len(flags)].all((0, 2)).argmin())
        what = next((name for name, flag in reversed(unread[index].finite.items()) if not flag), flags[0])
        raise non_finite_error(what, trainer, [unread[index].inputs])
    has_table = mode == "train" and trainer.log_completions
    token_weights = {}
    for place, entropy, delta, weight in rows.reshape(-1, 4).tolist():
        row = int(place)
        if has_table:
            trainer._logs["extra"]["entropy"][row] = entropy
            trainer._logs["extra"]["delta"][row] = delta
        if not math.isnan(weight):
            token_weights[row] = weight
    _record_push(trainer, mode, token_weights)
    for name, column in zip(unread[0].metrics, np.moveaxis(values[..., len(flags) :], 2, 0), strict=True):
        reduce = OVER_PROCESSES.get(name, np.mean)
        for by_process in column.T:
            measured = by_process[~np.isnan(by_process)]  # NaN: not measured there
            if len(measured):
                trainer._metrics[mode][name].append(float(reduce(measured)))


def _record_push(trainer: Any, mode: str, token_weights: dict[int, float]) -> None:
    """Log the conflict push once w_i of all rows is known: with several steps for one generation, at the last one."""
    push: Push | None = trainer._push
    if push is None:
        return
    push.token_weights.update(token_weights)
    if len(push.token_weights) < len(push.ids):
        return
    trainer._push = None
    of_rows = torch.tensor([push.token_weights[row] for row in range(len(push.ids))], device=push.ids.device)
    positive_weight = trainer.gtpo.conflict_positive_weight
    for name, value in push_metrics(*push[:4], of_rows, push.group_size, positive_weight).items():
        trainer._metrics[mode][name].append(value)


def spans_in_text(ids: Tensor, valid: Tensor, mask: Tensor, decode: Callable[[Any], str]) -> list[list[list[int]]]:
    """The conflict spans of each completion as [start, end) in the characters of its text. Shape (B, T) each.

    ``decode`` gives the text of tokens, shape (t,).
    """
    spans = []
    for tokens, is_valid, marked in torch.stack([ids, valid.bool(), mask], 1).cpu().numpy():  # (T,) each
        own = is_valid > 0
        edges = np.flatnonzero(np.diff(marked[own], prepend=0, append=0))
        lengths = [len(decode(tokens[own][:edge])) for edge in edges]
        spans.append([[start, end] for start, end in zip(lengths[::2], lengths[1::2], strict=True)])
    return spans


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


def inspect_group(trainer: Any, row: int) -> Group:
    """Generate and score G completions of a row of ``train_dataset`` as a training step does, without training on them.

    Nothing is logged or counted, and the state of the random generators is restored: a run is the same with and without
    the call, and a second call returns the same completions. Of one process.
    """
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
            _, measured = trainer.objective(*scores, batch)
    finally:
        trainer.model.train(was_training)
    valid, entropy = batch["completion_mask"].bool(), measured.entropy
    weights = torch.ones_like(scores[0]) if measured.weights is None else measured.weights
    keep = torch.ones_like(entropy) if measured.keep is None else measured.keep
    tokenizer = trainer.processing_class
    rows = range(group_size)
    return Group(
        prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
        tokens=[_token_texts(tokenizer, batch["completion_ids"][i][valid[i]].tolist()) for i in rows],
        rewards=rewards,
        advantages=batch["advantages"].tolist(),
        weights=[weights[i][valid[i]].tolist() for i in rows],
        entropy=entropy.tolist(),
        keep=keep.tolist(),
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
