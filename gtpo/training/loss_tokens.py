"""The tokens that the loss of a micro-batch counts, what it divides by, and TRL's entropy bonus on them."""

from typing import Any

import torch
from torch import Tensor

from gtpo.training.tools import policy_mask


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """1 on the tokens that the loss counts: the policy's, or what :func:`leave_out_truncated` left of them."""
    return batch["loss_mask"] if "loss_mask" in batch else policy_mask(batch)


def leave_out_truncated(trainer: Any, batch: dict[str, Any]) -> None:
    """``mask_truncated_completions`` for a batch: no token of a truncated completion counts, in the divisors either.

    Its ``completion_mask`` stays: the completion has its part in the advantages, the conflict mask and the metrics.
    """
    mask = batch["completion_mask"]
    truncated = torch.tensor(trainer._cut_off(batch["completion_ids"], mask), device=mask.device)
    batch["loss_mask"] = policy_mask(batch).masked_fill(truncated[:, None], 0)
    batch["num_items_in_batch"] = trainer.accelerator.gather(batch["loss_mask"].sum()).sum()


def normalizer(trainer: Any, inputs: dict[str, Any]) -> Tensor | int | None:
    """The count that ``loss_type`` divides by, per micro-batch and process: their losses are averaged."""
    mask = loss_mask(inputs)
    if trainer.loss_type == "dr_grpo":
        return len(mask) * int(trainer.max_completion_length)
    if trainer.loss_type == "bnpo":  # of this micro-batch alone
        return mask.sum().clamp(min=1)
    if trainer.loss_type == "dapo":
        micro_batches = trainer.args.steps_per_generation if trainer.model.training else 1
        count: Tensor = inputs["num_items_in_batch"].clamp(min=1)
        return count / (trainer.accelerator.num_processes * micro_batches)
    return None


def entropy_bonus(trainer: Any, token_entropy: Tensor, mask: Tensor) -> Tensor:
    """What TRL subtracts from the loss of a micro-batch: ``entropy_coef`` times the mean entropy of the tokens.

    With ``use_adaptive_entropy`` (Skywork-OR1, arXiv 2505.22312) the coefficient counts only if the entropy of the last
    step was at most ``entropy_target``, and each step moves it by ``entropy_coef_delta``. The state is in TRL's
    attributes, which TRL's trainer writes into checkpoints and reads back.

    Args:
        trainer: TRL's GRPOTrainer or one of ours.
        token_entropy: H_it, with gradient. Shape (B, T).
        mask: 1 on the tokens that the loss counts. Shape (B, T).
    """
    args, is_adaptive = trainer.args, trainer.use_adaptive_entropy
    total, count = (token_entropy * mask).sum(), mask.sum()
    is_low = not is_adaptive or trainer._last_world_entropy <= args.entropy_target
    bonus = (trainer.entropy_coef if is_low else 0.0) * total / count.clamp(min=1)
    if not trainer.model.training:
        return bonus
    if is_adaptive:
        window = torch.stack([total.detach(), count.to(total.dtype)])
        before = trainer._entropy_window_stats  # of the earlier micro-batches of this step
        trainer._entropy_window_stats = window if before is None else before + window
    if trainer.accelerator.sync_gradients:  # the last micro-batch of a step
        if is_adaptive:
            of_step, tokens = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum").tolist()
            trainer._last_world_entropy, trainer._entropy_window_stats = of_step / max(tokens, 1.0), None
            if trainer._last_world_entropy <= args.entropy_target:
                trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
            else:
                trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
        trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)
    return bonus
