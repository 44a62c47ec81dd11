"""What a step leaves in the metrics and in the table of completions: not the loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from gtpo.training.batch import Batch, Ids, Metrics, Rollouts, Row, Trainer, log_metrics
from gtpo.training.checks import sampler_metrics
from gtpo.training.diagnosis import conflict_counts
from gtpo.training.faults import non_finite_error

LOSS = "the loss"  # in a message
TOKEN_MEANS = {"kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
OVER_PROCESSES = {"clip_ratio/low_min": np.min, "clip_ratio/high_max": np.max}  # of the others the mean


class Measured(NamedTuple):
    """What an objective used for a micro-batch of b rows, for metrics and the table of completions; no gradient.

    Only ``entropy`` is needed.
    """

    entropy: Tensor  # <H>_i, (b,)
    weights: Tensor | None = None  # lambda, (b, T); None: 1
    keep: Tensor | None = None  # delta, (b,); None: 1
    metrics: Mapping[str, Tensor] | None = None  # 0-d, by name


class MicroBatch(NamedTuple):
    """What a micro-batch of b rows has measured, on the device until its step is complete."""

    scalars: Metrics  # the loss and metrics, by name; 0-d
    rows: Metrics  # place among the rollouts, <H>_i and delta, by name; (b,)
    inputs: Batch  # and what was computed from them: saved if the step fails
    generation: int  # its number


class Recorder:
    """Writes the metrics of a trainer and its table of completions."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.unread: list[MicroBatch] = []  # of the current step, until the last one
        self.inputs: list[Batch] = []  # of the last step
        self.finished: tuple[int, dict[str, int]] = (0, {})  # of finished steps: tokens, and values of each metric

    def step_ended(self) -> None:
        """Note what belongs to the finished steps."""
        trainer = self.trainer
        counts = {name: len(values) for name, values in trainer._metrics["train"].items()}
        self.finished = trainer.state.num_input_tokens_seen, counts

    def drop_unfinished(self) -> None:
        """Forget the completions of a step that failed, which TRL has counted: they are sampled again."""
        trainer = self.trainer
        trainer.state.num_input_tokens_seen, counts = self.finished
        for name, values in trainer._metrics["train"].items():
            del values[counts.get(name, 0) :]

    @property
    def has_table(self) -> bool:
        """Whether the completions of this batch are in the table."""
        return bool(self.trainer.model.training and self.trainer.log_completions)

    @property
    def table_is_complete(self) -> bool:
        """Whether the loss has used every completion of the table."""
        return None not in self.trainer._logs["extra"].get("entropy", ())

    def rollouts(self, inputs: list[Row], whole: Rollouts) -> None:
        """The conflict metrics of a generation, and its rows of the table; ``inputs`` are of this process."""
        found = conflict_counts(whole)
        found["completion_length"] = (whole.valid.sum() / len(whole.ids)).item()
        log_metrics(self.trainer, found)
        if self.has_table:
            self._add_rows(inputs, whole)

    def _add_rows(self, inputs: list[Row], whole: Rollouts) -> None:
        trainer, (forward, backward) = self.trainer, whole.spans
        unknown = [None] * len(whole.ids)  # filled in with the loss
        columns = {
            "conflicts": spans_in_text(trainer.processing_class, whole.ids, whole.valid, forward | backward),
            "cut_off": cut_off(trainer, whole.ids, whole.valid),
            "messages": gather_object([messages(row) for row in inputs]),
            "gold_answer": gather_object([gold_answer(row) for row in inputs]),
            "entropy": unknown,
            "delta": unknown,
        }
        for column, values in columns.items():
            trainer._logs["extra"][column].extend(values)

    def loss(self, loss: Tensor, measured: Measured, logps: Tensor, token_entropy: Tensor, inputs: Batch) -> None:
        """Keep what a micro-batch has measured; with the last one of a step all are read, at once."""
        trainer = self.trainer
        logps = logps.detach()
        entropy = measured.entropy
        keep = torch.ones_like(entropy) if measured.keep is None else measured.keep
        rows = {"place": inputs["row"], "entropy": entropy, "delta": keep}
        scalars = {LOSS: loss.detach()} | self._metrics_of(measured, logps, inputs)
        saved = inputs | {"logps": logps, "token_entropy": token_entropy}
        self.unread.append(MicroBatch(scalars, rows, saved, trainer.generation))
        if trainer.accelerator.sync_gradients or not trainer.model.training:
            self._read()

    def _metrics_of(self, measured: Measured, logps: Tensor, inputs: Batch) -> Metrics:
        trainer = self.trainer
        metrics = {"entropy": measured.entropy.mean(), **(measured.metrics or {})}
        if inputs.get("sampling_per_token_logps") is not None:
            drawn = inputs.get("old_per_token_logps", logps)  # under the weights that vLLM sampled with
            metrics |= sampler_metrics(trainer, drawn, inputs)
        tokens = inputs["completion_mask"].sum()
        share = tokens / inputs["num_items_in_batch"].clamp(min=1)
        for name in TOKEN_MEANS & metrics.keys():  # weight each process and micro-batch by its tokens
            metrics[name] = metrics[name] * share * trainer.losses()
        return metrics

    def _read(self) -> None:
        """Log the R M micro-batches of a step; every one of the R processes has to call it."""
        unread, self.unread = self.unread, []
        self.inputs = [part.inputs for part in unread]
        scalars = {name: self._gathered([part.scalars[name] for part in unread]) for name in unread[0].scalars}
        rows = {name: self._gathered([part.rows[name] for part in unread]) for name in unread[0].rows}
        self._check_finite(scalars.pop(LOSS), rows["entropy"], unread)
        newest = [part.generation == unread[-1].generation for part in unread]  # a step may end one and begin another
        self._complete_table({name: values[:, newest] for name, values in rows.items()})
        for name, values in scalars.items():
            reduce = OVER_PROCESSES.get(name, np.mean)
            for of_processes in values.T:
                measured = of_processes[~np.isnan(of_processes)]  # NaN: not measured there
                if len(measured):
                    log_metrics(self.trainer, {name: float(reduce(measured))})

    def _gathered(self, parts: list[Tensor]) -> np.ndarray:
        """One value, or one for each row, of the M micro-batches of all R processes. Shape (R, M) or (R, M, b)."""
        return self.trainer.accelerator.gather(torch.stack(parts)[None].float()).cpu().numpy()

    def _complete_table(self, rows: dict[str, np.ndarray]) -> None:
        """Fill in what the loss has used; ``rows`` as those of a MicroBatch, (R, M, b) each."""
        extra = self.trainer._logs["extra"]
        if not self.has_table or not extra["entropy"]:  # of a checkpoint that an earlier revision wrote
            return
        places = rows["place"].astype(int).flatten()
        for name in ("entropy", "delta"):
            for place, value in zip(places, rows[name].flatten().tolist(), strict=True):
                extra[name][place] = value

    def _check_finite(self, losses: np.ndarray, entropies: np.ndarray, unread: list[MicroBatch]) -> None:
        """RunError on every process, or the others would hang, if a loss or an entropy is NaN or infinite.

        ``losses``: (R, M); ``entropies``: (R, M, b).
        """
        of_rows = np.isfinite(entropies).all(2)
        is_finite = (np.isfinite(losses) & of_rows).all(0)  # (M,)
        if is_finite.all():
            return
        part = unread[int(is_finite.argmin())]
        what = LOSS if part.rows["entropy"].isfinite().all() else "the entropy"
        raise non_finite_error(what, self.trainer, [part.inputs])


def spans_in_text(tokenizer: Any, ids: Tensor, valid: Tensor, mask: Tensor) -> list[Ids]:
    """The conflict spans of each completion as [start, end) in the characters of its text. Shape (B, T) each."""
    spans = []
    rows = torch.stack([ids, valid.bool(), mask], 1)
    for tokens, is_valid, marked in rows.cpu().numpy():  # (T,) each
        own = is_valid > 0
        changes = np.diff(marked[own], prepend=0, append=0)
        lengths = []
        for edge in np.flatnonzero(changes):
            text = tokenizer.decode(tokens[own][:edge], skip_special_tokens=True)
            lengths.append(len(text))
        spans.append(np.reshape(lengths, (-1, 2)).tolist())  # starts and ends
    return spans


def cut_off(trainer: Trainer, ids: Tensor, valid: Tensor) -> list[bool]:
    """Whether each completion, shape (B, T), ends at the length limit, without an end token."""
    end_ids = [*trainer.eos_token_ids, trainer.processing_class.pad_token_id]
    last = valid.sum(-1, keepdim=True) - 1
    last_ids = ids.gather(1, last.clamp(min=0))[:, 0]
    return (~torch.isin(last_ids, torch.tensor(end_ids, device=ids.device))).tolist()


def messages(row: Row) -> list[Row] | None:
    """The turns of a row's prompt; None for plain text."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return None
    return [{"role": str(turn["role"]), "content": str(turn.get("content") or "")} for turn in prompt]


def gold_answer(row: Row) -> str | None:
    """The answer in the data; None where it has none."""
    return None if row.get("answer") is None else str(row["answer"])
