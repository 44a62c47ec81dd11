"""Whether the rollouts of a sampler such as vLLM come from the adapter that is trained; no other metric shows it."""

from typing import Any

import torch
from torch import Tensor

from gtpo.errors import RunError
from gtpo.processes import any_process
from gtpo.training.fault_tolerance import non_finite_error

INTERVAL = 20  # most optimizer steps between two checks, each of which scores the rollouts twice
ENOUGH = 256  # tokens of a process, whose mean gap is known to a tenth
MAX_GAP = 0.3  # nats per token; bfloat16 engines differ by 0.01 to 0.06


def next_check(step: int, interval: int = INTERVAL) -> int:
    """The step of the next check: 0, 1, 2, 4, 8, 16 and then every ``interval`` steps. At 0 the adapter is the base."""
    return step + min(max(step, 1), interval)


def sampler_gap(logps: Tensor, batch: dict[str, Any]) -> Tensor:
    """Mean |ln pi - ln pi of the sampler| over the completion tokens, in nats; NaN where the sampler scored none."""
    gap = (logps - batch["sampling_per_token_logps"]).abs()
    return gap[batch["completion_mask"].bool() & gap.isfinite()].mean()


@torch.no_grad()
def check_rollouts(trainer: Any, batch: dict[str, Any]) -> None:
    """Raise RunError if rollouts do not come from the adapter, or the sampler is far from policy and base model.

    Rounding separates the sampler from the policy as much as from the base model, so a threshold in nats cannot
    separate the two. Instead, rollouts that are twice as close to the base model (adapter disabled) as to the policy
    count as sampled without the adapter. A model without an adapter passes.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(policy, "disable_adapter"):
        return

    rows = int((batch["completion_mask"].sum(1).cumsum(0) < ENOUGH).sum()) + 1  # as few as have enough tokens
    batch = {name: part[:rows] for name, part in batch.items() if isinstance(part, Tensor) and part.dim()}

    def score() -> Tensor:
        ids, mask = (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in ("ids", "mask"))
        width, at_once = batch["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
        scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, batch_size=at_once)
        logps: Tensor = scores[0]
        return logps

    logps = score()
    if any_process(not bool(logps.isfinite().all()), trainer.accelerator.device):
        raise non_finite_error("a log-probability of the policy", trainer, [batch | {"logps": logps}])
    with policy.disable_adapter():
        of_base = score()
    policy_gap, base_gap = (
        trainer.accelerator.gather(sampler_gap(each, batch)).mean().item() for each in (logps, of_base)
    )
    if not policy_gap <= min(2 * base_gap, MAX_GAP):  # NaN too
        raise RunError(
            f"rollouts do not come from the adapter at step {trainer.state.global_step}: vLLM's log-probabilities "
            f"differ from the policy's by {policy_gap:.2g} nats per token and from the base model's by {base_gap:.2g}: "
            "install the versions in requirements.txt and delete unsloth_compiled_cache/, or set --use_vllm false."
        )
