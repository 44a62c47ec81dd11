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
# State of TRL's trainer that a training step changes, besides the policy.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check")


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


class Rollouts(NamedTuple):
    """The completions of all processes, of which the rows of a group are adjacent."""

    ids: Tensor  # (B, T)
    valid: Tensor  # 1 on their tokens, (B, T)
    spans: tuple[Tensor, Tensor]  # M_fw and M_bw, (B, T) each
    advantages: Tensor  # A_i, (B,)
    group_size: int


class MicroBatch(NamedTuple):
    """What a micro-batch of b rows has measured, on the device until its step is complete."""

    finite: dict[str, Tensor]  # flags by name, 0-d
    metrics: dict[str, Tensor]  # by name, 0-d
    rows: Tensor  # place among the rollouts, <H>_i, delta and w_i; (b, 4)
    inputs: dict[str, Any]  # and what was computed from them: saved if the step fails


class Step(NamedTuple):
    """The micro-batches of a step on the host, of R processes and M micro-batches each."""

    finite: dict[str, np.ndarray]  # (R, M) each
    metrics: dict[str, np.ndarray]  # (R, M) each
    rows: np.ndarray  # as those of MicroBatch, of all of them; (R M b, 4)


def _pack(unread: list[MicroBatch]) -> Tensor:
    """All of a step in one tensor, for one gather and one transfer to the host. Shape (M, flags + metrics + 4 b)."""
    packed = []
    for part in unread:
        scalars = torch.stack([*part.finite.values(), *part.metrics.values()]).float()
        packed.append(torch.cat([scalars, part.rows.flatten()]))
    return torch.stack(packed)


def _unpack(gathered: np.ndarray, like: MicroBatch) -> Step:
    """``gathered``: what :func:`_pack` gave in each process, shape (R, M, ...), of micro-batches with these names."""
    flags = len(like.finite)
    scalars = flags + len(like.metrics)
    columns = np.moveaxis(gathered[..., :scalars], 2, 0)  # (flags + metrics, R, M)
    finite = dict(zip(like.finite, columns[:flags], strict=True))
    metrics = dict(zip(like.metrics, columns[flags:], strict=True))
    return Step(finite, metrics, gathered[..., scalars:].reshape(-1, 4))


class Recorder:
    """Writes the metrics of a trainer and its table of completions."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.unread: list[MicroBatch] = []  # of the current step, until the last one
        self.pushed: Rollouts | None = None  # whose conflict push waits for w_i of every row
        self.token_weights: dict[int, float] = {}  # w_i, by row

    @property
    def mode(self) -> str:
        """``train`` or ``eval``."""
        return "train" if self.trainer.model.training else "eval"

    @property
    def has_table(self) -> bool:
        """Whether the completions of this batch are in the table."""
        return self.mode == "train" and self.trainer.log_completions

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add values, whose mean TRL logs."""
        logged = self.trainer._metrics[self.mode]
        for name, value in metrics.items():
            logged[name].append(value)

    def rollouts(self, inputs: list[dict[str, Any]], batch: dict[str, Any], whole: Rollouts) -> None:
        """The conflict metrics of a generation, and its rows of the table; ``batch`` is of this process."""
        found = conflict_counts(whole.valid, whole.spans)
        self.pushed = whole if found["conflict_tokens"] else None
        self.token_weights = {}
        found["completion_length"] = (whole.valid.sum() / len(whole.ids)).item()
        self.log(found)
        rows = len(batch["completion_ids"])
        first = self.trainer.accelerator.process_index * rows
        batch["row"] = torch.arange(first, first + rows, device=whole.ids.device)  # follows TRL's shuffle
        if self.has_table:
            self._add_rows(inputs, whole)

    def _add_rows(self, inputs: list[dict[str, Any]], whole: Rollouts) -> None:
        trainer, (forward, backward) = self.trainer, whole.spans
        decode = partial(trainer.processing_class.decode, skip_special_tokens=True)
        unknown = [None] * len(whole.ids)  # filled in with the loss
        columns = {
            "conflicts": spans_in_text(whole.ids, whole.valid, forward | backward, decode),
            "cut_off": cut_off(trainer, whole.ids, whole.valid),
            "messages": gather_object([messages(row) for row in inputs]),
            "gold_answer": gather_object([gold_answer(row) for row in inputs]),
            "entropy": unknown,
            "delta": unknown,
        }
        for column, values in columns.items():
            trainer._logs["extra"][column].extend(values)

    def loss(
        self, loss: Tensor, measured: Measured, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]
    ) -> None:
        """Keep what a micro-batch has measured; with the last one of a step all are read, at once."""
        logps, entropy = logps.detach(), measured.entropy
        keep, weights = measured.keep, measured.token_weights
        if keep is None:
            keep = torch.ones_like(entropy)
        if weights is None:
            weights = torch.full_like(entropy, math.nan)
        finite = {"the loss": loss.detach().isfinite(), "the entropy": entropy.isfinite().all()}
        rows = torch.stack([inputs["row"], entropy, keep, weights / self._parts()], 1).float()
        saved = inputs | {"logps": logps, "token_entropy": token_entropy}
        self.unread.append(MicroBatch(finite, self._metrics_of(measured, logps, inputs), rows, saved))
        if self.mode == "eval" or self.trainer.accelerator.sync_gradients:
            self._read()

    def _parts(self) -> int:
        """Micro-batches of all processes whose losses are averaged."""
        trainer = self.trainer
        parts = trainer.accelerator.num_processes
        if self.mode == "train":
            parts *= trainer.args.steps_per_generation * trainer._parts
        return parts

    def _metrics_of(self, measured: Measured, logps: Tensor, inputs: dict[str, Any]) -> dict[str, Tensor]:
        metrics = dict(measured.metrics or {})
        metrics.setdefault("entropy", measured.entropy.mean())
        if inputs.get("sampling_per_token_logps") is not None:
            drawn = inputs.get("old_per_token_logps", logps)  # under the weights that vLLM sampled with
            metrics |= sampler_metrics(self.trainer, drawn, inputs)
        for name in TOKEN_MEANS & metrics.keys():  # weight each process and micro-batch by its tokens
            share = inputs["completion_mask"].sum() / inputs["num_items_in_batch"].clamp(min=1)
            metrics[name] = metrics[name] * share * self._parts()
        return metrics

    def _read(self) -> None:
        """Log the micro-batches of a step; every process has to call it."""
        unread, self.unread = self.unread, []
        gathered = self.trainer.accelerator.gather(_pack(unread)[None])
        step = _unpack(gathered.cpu().numpy(), unread[0])
        self._check_finite(step, unread)
        for place, entropy, delta, weight in step.rows.tolist():
            row = int(place)
            if self.has_table:
                self.trainer._logs["extra"]["entropy"][row] = entropy
                self.trainer._logs["extra"]["delta"][row] = delta
            if not math.isnan(weight):
                self.token_weights[row] = weight
        for name, values in step.metrics.items():
            reduce = OVER_PROCESSES.get(name, np.mean)
            for of_processes in values.T:
                measured = of_processes[~np.isnan(of_processes)]  # NaN: not measured there
                if len(measured):
                    self.log({name: float(reduce(measured))})
        self._push()

    def _check_finite(self, step: Step, unread: list[MicroBatch]) -> None:
        """RunError on every process, or the others would hang, if a loss or an entropy is NaN or infinite."""
        is_finite = np.stack([*step.finite.values()]).all((0, 1))  # (M,)
        if is_finite.all():
            return
        part = unread[int(is_finite.argmin())]
        failed = [name for name, flag in part.finite.items() if not flag]  # none: it is on another process
        raise non_finite_error(failed[-1] if failed else "the loss", self.trainer, [part.inputs])

    def _push(self) -> None:
        """Log the conflict push once w_i of all rows is known, at the last step of a generation."""
        whole = self.pushed
        if whole is None or len(self.token_weights) < len(whole.ids):
            return
        self.pushed = None
        ids, valid, spans, advantages, group_size = whole
        weights = torch.tensor([self.token_weights[row] for row in range(len(ids))], device=ids.device)
        positive_weight = self.trainer.gtpo.conflict_positive_weight
        self.log(push_metrics(ids, valid, spans, advantages, weights, group_size, positive_weight))

    def group(self, row: int) -> Group:
        """One group as a training step sees it, without training on it (``inspect_group`` of the trainer)."""
        trainer, was_training = self.trainer, self.trainer.model.training
        trainer.model.train()  # groups of training mode; there is no dropout
        example, group_size = trainer.train_dataset[row], trainer.num_generations
        devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
        try:
            with self._unlogged(), torch.random.fork_rng(devices), torch.no_grad():
                batch = trainer._generate_and_score_completions([example] * group_size)
                table = trainer._logs["rewards"]
                rewards = {name: list(table[name])[-group_size:] for name in trainer.reward_func_names}
                scores = trainer.scores(trainer.model_wrapped, batch, trainer.args.per_device_train_batch_size)
                _, measured = trainer.objective(*scores, batch)
        finally:
            trainer.model.train(was_training)
        ids, valid = batch["completion_ids"], batch["completion_mask"].bool()
        weights = torch.ones_like(scores[0]) if measured.weights is None else measured.weights
        keep = torch.ones_like(measured.entropy) if measured.keep is None else measured.keep
        tokenizer = trainer.processing_class
        return Group(
            prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
            tokens=[_token_texts(tokenizer, row[own].tolist()) for row, own in zip(ids, valid, strict=True)],
            rewards=rewards,
            advantages=batch["advantages"].tolist(),
            weights=[row[own].tolist() for row, own in zip(weights, valid, strict=True)],
            entropy=measured.entropy.tolist(),
            keep=keep.tolist(),
            messages=messages(example),
            gold_answer=gold_answer(example),
            cut_off=cut_off(trainer, ids, batch["completion_mask"]),
        )

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        """Inside, a step may be generated and scored; afterwards nothing of it is logged or counted."""
        trainer, own = self.trainer, (self.pushed, self.token_weights)
        logged = copy.deepcopy({name: getattr(trainer, name) for name in _LOGGED})
        tokens_seen = trainer.state.num_input_tokens_seen
        try:
            yield
        finally:
            vars(trainer).update(logged)
            trainer.state.num_input_tokens_seen = tokens_seen
            self.pushed, self.token_weights = own


def spans_in_text(ids: Tensor, valid: Tensor, mask: Tensor, decode: Callable[[Any], str]) -> list[list[list[int]]]:
    """The conflict spans of each completion as [start, end) in the characters of its text. Shape (B, T) each.

    ``decode`` gives the text of tokens, shape (t,).
    """
    spans = []
    rows = torch.stack([ids, valid.bool(), mask], 1).cpu().numpy()
    for tokens, is_valid, marked in rows:  # (T,) each
        own = is_valid > 0
        edges = np.flatnonzero(np.diff(marked[own], prepend=0, append=0))
        lengths = [len(decode(tokens[own][:edge])) for edge in edges]
        starts, ends = lengths[::2], lengths[1::2]
        spans.append([[start, end] for start, end in zip(starts, ends, strict=True)])
    return spans


def cut_off(trainer: Any, ids: Tensor, valid: Tensor) -> list[bool]:
    """Whether each completion, shape (B, T), ends at the length limit, without an end token."""
    end_ids = torch.tensor([*trainer.eos_token_ids, trainer._tokenizer.pad_token_id], device=ids.device)
    lengths = valid.sum(-1, keepdim=True)
    last = ids.gather(1, (lengths - 1).clamp(min=0))[:, 0]
    return (~torch.isin(last, end_ids)).tolist()


def messages(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a row's prompt; None for plain text."""
    turns = row.get("prompt")
    if not isinstance(turns, list):
        return None
    return [{"role": str(turn["role"]), "content": str(turn.get("content") or "")} for turn in turns]


def gold_answer(row: dict[str, Any]) -> str | None:
    """The answer in the data; None where it has none."""
    return None if row.get("answer") is None else str(row["answer"])


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]
