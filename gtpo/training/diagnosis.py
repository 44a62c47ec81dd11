"""What is wrong with a GRPO run, for any trainer on TRL's GRPOTrainer: callbacks that measure and change no weight.

``trainer.add_callback(ConflictMetrics(trainer))``, and so on, before ``trainer.train()``. TRL hands its callbacks no
batch and no log-probabilities: each wraps a method of its trainer when training begins.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from gtpo.training.batch import Batch, Metrics, Rollouts, Spans, gather_rollouts, log_metrics
from gtpo.training.checks import INTERVAL, check_rollouts, next_check, probe_sampler
from gtpo_loss import LOSS_TYPES, completion_entropy, conflict_weights, token_places


class _Observer(TrainerCallback):
    """Calls ``observe(result, *args, **kwargs)`` after methods of the trainer, from the first ``train()`` on."""

    def __init__(self, trainer: Any, **observers: Callable[..., None]) -> None:
        self.trainer = trainer
        self.observers = observers

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        while self.observers:
            self._observe(*self.observers.popitem())

    def _observe(self, name: str, observe: Callable[..., None]) -> None:
        method = getattr(self.trainer, name)

        @wraps(method)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            with torch.no_grad():
                observe(result, *args, **kwargs)
            return result

        setattr(self.trainer, name, observed)


class SamplerProbe(TrainerCallback):
    """Stop a run whose sampler (vLLM) ignores the adapter, before its first step; about ten seconds.

    Noise in ``lora_B`` moves the policy, the sampler is handed the adapter, both score one completion, and the adapter
    is restored: the learning rate does not matter. Without vLLM or an adapter it does nothing. ``train()`` raises
    RunError with the distance to the policy and to the base model in nats per token.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.trainer.use_vllm:
            probe_sampler(self.trainer)


class RolloutCheck(_Observer):
    """Stop a run whose rollouts do not come from the adapter: a sampler that is out of sync with the policy.

    It compares the sampler's log-probabilities (vLLM's) with the policy's and with the base model's; without them, and
    without an adapter, it does nothing. ``train()`` raises RunError with both distances in nats per token.

    ``interval``: most optimizer steps between two checks; the first are at steps 0, 1, 2, 4, 8.
    """

    def __init__(self, trainer: Any, interval: int = INTERVAL) -> None:
        super().__init__(trainer, _generate_and_score_completions=self.on_batch)
        self.interval = interval
        self.next = 0

    def on_batch(self, batch: Batch, *_: Any) -> None:
        step = self.trainer.state.global_step
        if batch.get("sampling_per_token_logps") is not None and step >= self.next:
            self.next = next_check(step, self.interval)
            model = self.trainer.model
            training = model.training
            model.eval()  # dropout draws random numbers, and the sampler has none
            check_rollouts(self.trainer, batch)
            model.train(training)


class ConflictMetrics(_Observer):
    """Log what GTPO corrects, for a run of GRPO, among TRL's metrics; the trainers of gtpo log most of it themselves.

    * ``conflict_tokens``, ``conflict_fraction``: conflict tokens per completion, and their share of all tokens.
    * ``conflict_push``, ``conflict_push_corrected`` (and by span, ``_opening`` and ``_closing``): the weight with which
      the objective pushes a conflict token, and what lambda of Eq. 9 would make of it; for grpo, dr_grpo, dapo, bnpo.
    * ``groups_without_variance``: share of groups whose advantages are all 0, which teach nothing.
    * ``completion_entropy``: <H>, the mean over completions of their mean token entropy, in nats.

    ``docs/metrics.md`` explains each.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(
            trainer,
            _generate_and_score_completions=self.on_batch,
            _get_per_token_logps_and_entropies=self.on_entropies,
            _compute_loss=self.on_loss,
        )
        self.token_entropy: Tensor | None = None

    def on_batch(self, batch: Batch, *_: Any) -> None:
        trainer = self.trainer
        advantages = trainer.accelerator.gather(batch["advantages"])
        whole = gather_rollouts(trainer, batch, advantages)
        found = conflict_counts(whole)
        if found["conflict_tokens"] and trainer.loss_type in LOSS_TYPES:
            weights = token_weights(whole.valid, trainer.loss_type, trainer.max_completion_length)
            found |= push_metrics(whole, weights)
        is_flat = (advantages.view(-1, whole.group_size) == 0).all(1)
        found["groups_without_variance"] = is_flat.float().mean().item()
        log_metrics(trainer, found)

    def on_entropies(self, result: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any) -> None:
        if compute_entropy:  # the forward pass of the loss
            self.token_entropy = result[1]

    def on_loss(self, loss: Tensor, model: Any, inputs: Batch) -> None:
        if self.token_entropy is not None:
            entropy = completion_entropy(self.token_entropy, inputs["completion_mask"])
            log_metrics(self.trainer, {"completion_entropy": self.trainer.accelerator.gather(entropy).mean().item()})
            self.token_entropy = None


def conflict_counts(whole: Rollouts) -> dict[str, float]:
    """Conflict tokens per completion and their share."""
    forward, backward = whole.spans
    conflicts = (forward | backward).sum()
    return {
        "conflict_tokens": (conflicts / len(whole.ids)).item(),
        "conflict_fraction": (conflicts / whole.valid.sum().clamp(min=1)).item(),
    }


def push_metrics(whole: Rollouts, weights_of_rows: Tensor, positive_weight: float = 2.0) -> dict[str, float]:
    """The push on conflict tokens by name; a span without one has none.

    ``weights_of_rows``: w_i, shape (B,). With A_i > 0 lambda is ``positive_weight``.
    """
    forward, backward = whole.spans
    strength = (whole.advantages * weights_of_rows).float()
    weights = conflict_weights(forward | backward, whole.advantages.float(), positive_weight)
    pushes = torch.stack(conflict_push(whole.ids, whole.valid, whole.spans, strength, weights, whole.group_size))
    found: dict[str, float] = {}
    for span, (push, corrected) in zip(("", "_opening", "_closing"), pushes.T.tolist(), strict=True):
        if not math.isnan(push):
            found |= {f"conflict_push{span}": push, f"conflict_push_corrected{span}": corrected}
    return found


def token_weights(completion_mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """w_i, the weight that ``loss_type`` gives to a token of completion i in a step of these B rows. Shape (B,).

    "bnpo" has that of "dapo", which it equals with one micro-batch. Summed over all tokens it is 1, for dr_grpo the
    share of T_max, ``max_completion_length``, that is used; 0 for a completion without tokens. ValueError for another
    ``loss_type``, whose w_i is not known.
    """
    tokens = completion_mask.bool().sum()
    match loss_type:
        case "grpo":
            return weights_of_rows(completion_mask, None)
        case "dr_grpo":
            return weights_of_rows(completion_mask, len(completion_mask) * max_completion_length)
        case "dapo" | "bnpo":
            return weights_of_rows(completion_mask, tokens)
    raise ValueError(f"loss_type {loss_type!r} has no known token weights: expected one of {', '.join(LOSS_TYPES)}")


def weights_of_rows(completion_mask: Tensor, normalizer: Tensor | float | None) -> Tensor:
    """1 / ``normalizer`` for each of B rows, without one 1 / (B |o_i|); 0 for a row without tokens. Shape (B,)."""
    lengths = completion_mask.bool().sum(-1).float()  # |o_i|
    if normalizer is None:
        normalizer = (len(lengths) * lengths).clamp(min=1)
    return (lengths > 0) / torch.as_tensor(normalizer, device=lengths.device).clamp(min=1)


def clip_ratios(
    ratio: Tensor, completion_mask: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Metrics:
    """Shares of tokens that GRPO's clipping cuts, as TRL's ``clip_ratio/*``. 0-d tensors.

    ``ratio``: r_it, shape (B, T); ``advantages``: A_i, shape (B,). ``low_min`` and ``high_max`` are over completions.
    """
    valid, sign = completion_mask.bool(), advantages[:, None]
    low = (ratio < 1 - epsilon_low) & (sign < 0) & valid  # (B, T)
    high = (ratio > 1 + epsilon_high) & (sign > 0) & valid
    lengths, tokens = valid.sum(1), valid.sum().clamp(min=1)
    return {
        "clip_ratio/low_mean": low.sum() / tokens,
        "clip_ratio/high_mean": high.sum() / tokens,
        "clip_ratio/region_mean": (low | high).sum() / tokens,
        "clip_ratio/low_min": (low.sum(1) / lengths).nan_to_num(nan=1.0).amin(),
        "clip_ratio/high_max": (high.sum(1) / lengths).nan_to_num(nan=0.0).amax(),
    }


def conflict_push(
    completion_ids: Tensor,
    completion_mask: Tensor,
    spans: Spans,
    strength: Tensor,
    weights: Tensor,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """The net weight with which a group pushes its conflict tokens, before and after lambda.

        push = sum_i w_i A_i,    corrected = sum_i w_i lambda_ip A_i,    over the i that have token v at position p

    Positive raises the probability of a token that G+ and G- share, negative lowers it, and 0 is a conflict that
    cancels. A token (p, v) of a span counts once, however many completions have it; positions are counted from the
    first token in the forward span, from the last one in the backward span. Without delta and gamma.

    Args:
        completion_ids, completion_mask, group_size: As for :func:`gtpo_loss.conflict_spans`. Shape (B, T).
        spans: M_fw and M_bw. Bool, shape (B, T) each.
        strength: w_i A_i: :func:`token_weights` times A_i. Shape (B,).
        weights: lambda_it of :func:`conflict_weights`. Shape (B, T).

    Returns:
        push and corrected: means over the conflict tokens of all groups, over those of the forward spans, and over
        those of the backward spans; NaN where there are none. Shape (3,) each.
    """
    valid = completion_mask.bool()
    groups = torch.arange(len(valid), device=valid.device)[:, None] // group_size  # (B, 1)
    before = strength[:, None].expand_as(weights)
    after = strength[:, None] * weights
    totals = []
    counts = []
    for span, places in zip(spans, token_places(valid), strict=True):
        slots = groups * (valid.shape[1] + 1) + places
        tokens = slots * (completion_ids.max() + 1) + completion_ids  # equal for the same token, place and group
        distinct, which = tokens.unique(return_inverse=True)
        values = torch.stack([before, after, span.to(before.dtype)]) * valid  # (3, B, T)
        sums = values.new_zeros(3, len(distinct)).index_add(1, which.flatten(), values.flatten(1))
        is_conflict = sums[2] > 0
        totals.append((sums[:2] * is_conflict).sum(1))
        counts.append(is_conflict.sum())
    total = torch.stack([sum(totals), *totals], 1)
    push, corrected = total / torch.stack([sum(counts), *counts])
    return push, corrected
