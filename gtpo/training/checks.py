"""Checks by log-probabilities: the loss against the model's own logits, the sampler (vLLM) against the policy.

Some families scale or cut their logits in ways that no config names; a sampler may ignore the adapter that is trained.
No other metric shows either.
"""

import torch
from torch import Tensor

from gtpo.errors import RunError
from gtpo.forward.hidden_states import hidden_states_and_logits
from gtpo.processes import any_process
from gtpo.training.batch import Batch, Metrics, Trainer
from gtpo.training.faults import non_finite_error

HEAD_TOKENS = 64  # of one completion
TF32 = 2**-10  # its rounding, of float32 products on a GPU
INTERVAL = 20  # most optimizer steps between two checks, each of which scores the rollouts twice
ENOUGH = 256  # tokens of a process, whose mean gap is known to a tenth
MAX_GAP = 0.3  # nats per token; bfloat16 engines differ by 0.01 to 0.06


@torch.no_grad()
def check_head(trainer: Trainer, batch: Batch) -> None:
    """Raise RunError if ln pi of the loss is not that of the model's logits, beyond the rounding of their dtype.

    ``batch`` has ``prompt_ids``, ``completion_ids`` and their masks, of this process.
    """
    row = int(batch["completion_mask"].sum(1).argmax())  # the longest completion
    prompt = _tokens(batch, "prompt", row)
    completion = _tokens(batch, "completion", row)[:HEAD_TOKENS]
    causal_lm = trainer.causal_lm(trainer.model)
    ids = torch.cat([prompt, completion])
    hidden, logits = hidden_states_and_logits(trainer.model_wrapped, causal_lm.get_decoder(), ids)
    predicts = slice(len(prompt) - 1, -1)  # each predicts its token
    hidden = hidden[predicts]  # (T, H)
    rounding = _rounding(trainer, logits.dtype, hidden)
    logits = logits[predicts].float() / trainer.temperature  # (T, V)
    log_pi = logits.log_softmax(-1)
    own = log_pi.gather(-1, completion[:, None])[:, 0]
    logps, _ = trainer.head(causal_lm, hidden, completion)
    difference = (logps.float() - own).abs().mean()
    bound = 1e-3 + rounding * logits.abs().amax()
    if any_process(not difference <= bound, logits.device):  # NaN too
        raise RunError(
            f"the loss does not know how {trainer.model.config.model_type} models compute their logits: ln pi of "
            f"{len(own)} tokens is {logps.mean():.3g} on average in the loss and {own.mean():.3g} by the model's "
            f"logits (difference {difference:.2g} nats): train it with TRL's GRPOTrainer and gtpo_trl.py, or pick "
            "another model."
        )


def _tokens(batch: Batch, part: str, row: int) -> Tensor:
    """The ids of a prompt or completion without padding. Shape (t,)."""
    ids = batch[f"{part}_ids"][row]
    return ids[batch[f"{part}_mask"][row].bool()]


def _rounding(trainer: Trainer, of_logits: torch.dtype, hidden: Tensor) -> float:
    """The relative rounding of logits: that of the coarsest dtype on their way."""
    precision = trainer.accelerator.mixed_precision
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, hidden.dtype)
    rounding = max(torch.finfo(dtype).eps for dtype in (of_logits, hidden.dtype, autocast))
    return max(rounding, TF32) if hidden.is_cuda else rounding


def next_check(step: int) -> int:
    """The step of the next check: 0, 1, 2, 4, 8, 16 and then every ``INTERVAL`` steps. At 0 the adapter is the base."""
    return step + min(max(step, 1), INTERVAL)


def sampler_metrics(trainer: Trainer, logps: Tensor, batch: Batch) -> Metrics:
    """Of |ln pi - ln pi of the sampler| the mean, median and 99 % quantile, in nats, and the kept mass. 0-d tensors.

    NaN where the sampler scored no token; without truncated sampling there is no kept mass.

    TRL's vLLM normalizes over the tokens that ``top_p``, ``top_k`` or ``min_p`` keep, the trainer over all, so the
    ratio of the probabilities is the kept mass (huggingface/trl#7269).
    """
    log_ratio = logps - batch["sampling_per_token_logps"]
    is_scored = batch["completion_mask"].bool() & log_ratio.isfinite()
    log_ratio = torch.where(is_scored, log_ratio, torch.nan)
    gap = log_ratio.abs()
    median, highest = gap.nanquantile(gap.new_tensor([0.5, 0.99]))
    metrics = {
        "sampler_logp_gap": gap.nanmean(),
        "sampler_logp_gap_median": median,
        "sampler_logp_gap_p99": highest,
    }
    if trainer.top_p < 1 or trainer.top_k or trainer.min_p:
        metrics["sampler_kept_mass"] = log_ratio.exp().nanmean()
    return metrics


def score(trainer: Trainer, batch: Batch) -> Tensor:
    """ln pi of the completion tokens, with dropout as the model has it. Shape (B, T)."""
    logps, _ = trainer.scores(trainer.model, batch, trainer.args.per_device_train_batch_size)
    return logps


@torch.no_grad()
def check_rollouts(trainer: Trainer, batch: Batch) -> None:
    """Raise RunError if rollouts do not come from the adapter, or the sampler is far from policy and base model.

    Rounding separates the sampler from the policy as much as from the base model, so a threshold in nats cannot
    separate the two. Instead, rollouts that are twice as close to the base model (adapter disabled) as to the policy
    count as sampled without the adapter, once it has moved by more than rounding. A model without an adapter passes.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(policy, "disable_adapter"):
        return
    tokens = batch["completion_mask"].sum(1).cumsum(0)
    rows = int((tokens < ENOUGH).sum()) + 1  # as few as have enough tokens
    few = {name: part[:rows] for name, part in batch.items() if isinstance(part, Tensor) and part.dim()}
    logps = score(trainer, few)
    if any_process(not logps.isfinite().all(), trainer.accelerator.device):
        raise non_finite_error("a log-probability of the policy", trainer, [few | {"logps": logps}])
    with policy.disable_adapter():
        of_base = score(trainer, few)
    policy_gap = _gap(trainer, logps, few)
    base_gap = _gap(trainer, of_base, few)
    if not policy_gap <= min(2 * base_gap, MAX_GAP):  # NaN too
        raise RunError(
            f"rollouts do not come from the adapter at step {trainer.state.global_step}: vLLM's log-probabilities "
            f"differ from the policy's by {policy_gap:.2g} nats per token and from the base model's by {base_gap:.2g}: "
            "install the versions in requirements.txt and delete unsloth_compiled_cache/, or set --use_vllm false."
        )


def _gap(trainer: Trainer, logps: Tensor, batch: Batch) -> float:
    """The mean distance to the sampler, over all processes, in nats per token."""
    return float(trainer.accelerator.gather(sampler_metrics(trainer, logps, batch)["sampler_logp_gap"]).mean())
