"""What is wrong with a GRPO run, for any trainer on TRL's GRPOTrainer: callbacks that measure and change no weight.

    trainer = trl.GRPOTrainer(...)
    trainer.add_callback(ConflictMetrics(trainer))
    trainer.add_callback(RolloutCheck(trainer))

TRL hands its callbacks neither the batch nor the log-probabilities. Each callback therefore wraps a method of the
trainer object when training begins; the class and other trainers are unchanged.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from gtpo.training.rollout_check import INTERVAL, check_rollouts, next_check
from gtpo.training.tools import policy_mask
from gtpo_loss import (
    LOSS_TYPES,
    completion_entropy,
    conflict_push,
    conflict_spans,
    conflict_weights,
    token_weights,
)


class _Observer(TrainerCallback):
    """Observes methods of the trainer, by name, from the first call of ``train()`` on."""

    def __init__(self, trainer: Any, **observers: Callable[..., None]) -> None:
        self.trainer = trainer
        self.observers = observers

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        while self.observers:
            after(self.trainer, *self.observers.popitem())


def after(trainer: Any, name: str, observe: Callable[..., None]) -> None:
    """Call ``observe(result, *args, **kwargs)`` after each call of a method of this trainer."""
    method = getattr(trainer, name)

    @wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        with torch.no_grad():
            observe(result, *args, **kwargs)
        return result

    setattr(trainer, name, observed)


class RolloutCheck(_Observer):
    """Stop a run whose rollouts do not come from the adapter: a sampler that is out of sync with the policy.

    It compares the sampler's log-probabilities (vLLM's) with the policy's and with the base model's. Without a sampler
    that returns them, and without an adapter, there is nothing to compare, and it does nothing.

    Args:
        trainer: A GRPOTrainer.
        interval: Most optimizer steps between two checks, each of which scores the rollouts twice; the first are at
            steps 0, 1, 2, 4, 8. An untrained adapter is the base model: step 1 is the first one that can fail.

    Raises:
        RunError: From ``train()``, with the step and both distances in nats per token.
    """

    def __init__(self, trainer: Any, interval: int = INTERVAL) -> None:
        super().__init__(trainer, _generate_and_score_completions=self.on_batch)
        self.interval = interval
        self.next = 0

    def on_batch(self, batch: dict[str, Any], *_: Any) -> None:
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

    Tokens of tools are left out: spans, lengths and entropies are those of the policy's tokens. ``docs/metrics.md``
    explains each.

    Args:
        trainer: A GRPOTrainer.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(
            trainer,
            _generate_and_score_completions=self.on_batch,
            _get_per_token_logps_and_entropies=self.on_entropies,
            _compute_loss=self.on_loss,
        )
        self.token_entropy: Tensor | None = None

    def on_batch(self, batch: dict[str, Any], *_: Any) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        ids, valid = (
            accelerator.gather(accelerator.pad_across_processes(part, dim=1))
            for part in (batch["completion_ids"], policy_mask(batch))
        )
        advantages = accelerator.gather(batch["advantages"])
        training = trainer.model.training
        group_size = trainer.num_generations if training else trainer.num_generations_eval
        spans = conflict_spans(ids, valid, advantages, group_size)
        found = conflict_metrics(trainer, ids, valid, spans, advantages, advantages, valid, group_size)
        found["groups_without_variance"] = (advantages.view(-1, group_size) == 0).all(1).float().mean().item()
        self.log(found)

    def on_entropies(self, result: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any) -> None:
        if compute_entropy:  # the forward pass of the loss
            self.token_entropy = result[1]

    def on_loss(self, loss: Tensor, model: Any, inputs: dict[str, Any]) -> None:
        if self.token_entropy is not None:
            entropy = completion_entropy(self.token_entropy, policy_mask(inputs))
            self.log({"completion_entropy": self.trainer.accelerator.gather(entropy).mean().item()})
            self.token_entropy = None

    def log(self, metrics: dict[str, float]) -> None:
        mode = "train" if self.trainer.model.training else "eval"
        for name, value in metrics.items():
            self.trainer._metrics[mode][name].append(value)


def conflict_metrics(
    trainer: Any,
    ids: Tensor,
    valid: Tensor,
    spans: tuple[Tensor, Tensor],
    advantages: Tensor,
    loss_advantages: Tensor,
    loss_mask: Tensor,
    group_size: int,
    positive_weight: float = 2.0,
) -> dict[str, float]:
    """Conflict tokens and the push on them, over the rows of all processes.

    Args:
        trainer: Its ``loss_type`` and ``max_completion_length`` weight a token.
        ids: Completions. Shape (B, T).
        valid: 1 on their tokens. Shape (B, T).
        spans: As :func:`gtpo_loss.conflict_spans` returns them. Shape (B, T) each.
        advantages: A_i. Shape (B,).
        loss_advantages: A_i as in the loss. Shape (B,).
        loss_mask: 1 on the tokens that the loss counts. Shape (B, T).
        group_size: G.
        positive_weight: lambda of a conflict token with A_i > 0.

    Returns:
        Metrics by name; those of the push only where there are conflict tokens.
    """
    mask = spans[0] | spans[1]
    found = {
        "conflict_tokens": (mask.sum() / len(mask)).item(),
        "conflict_fraction": (mask.sum() / valid.sum().clamp(min=1)).item(),
    }
    if mask.any() and trainer.loss_type in LOSS_TYPES:
        strength = loss_advantages * token_weights(loss_mask, trainer.loss_type, trainer.max_completion_length)
        weights = conflict_weights(mask, advantages.float(), positive_weight)
        pushes = torch.stack(conflict_push(ids, valid, spans, strength.float(), weights, group_size))  # (2, 3)
        for span, (push, corrected) in zip(("", "_opening", "_closing"), pushes.T.tolist(), strict=True):
            if not math.isnan(push):
                found |= {f"conflict_push{span}": push, f"conflict_push_corrected{span}": corrected}
    return found
