"""What a step leaves in the metrics and in the table of completions; nothing here changes the loss."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gtpo.training.completions_table import gold_answer, messages, spans_in_text
from gtpo.training.diagnosis import conflict_metrics
from gtpo.training.fault_tolerance import non_finite_error
from gtpo.training.rollout_check import sampler_gap
from gtpo.training.tag_logps import TAG_METRICS, tag_logps


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
        "cut_off": trainer.cut_off(ids, valid),
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
