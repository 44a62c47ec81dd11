"""Checks by log-probabilities: the loss against the model's own logits, the sampler (vLLM) against the policy.

Some families scale or cut their logits in ways that no config names; a sampler may ignore the adapter that is trained.
No other metric shows either.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gtpo.errors import RunError
from gtpo.forward.hidden_states import hidden_states_and_logits
from gtpo.processes import any_process
from gtpo.training.batch import Batch, Metrics, isolated_rng, padded_batch
from gtpo.training.callbacks import non_finite_error

HEAD_TOKENS = 64  # of one completion
TF32 = 2**-10  # its rounding, of float32 products on a GPU
INTERVAL = 20  # most optimizer steps between two checks, each of which scores the rollouts twice
ENOUGH = 256  # tokens of a process, whose mean gap is known to a tenth
NOISE = 0.7  # nats per token by which the probe moves the policy
PROBE_TOKENS = 48
MAX_GAP = 0.3  # nats per token; bfloat16 engines differ by 0.01 to 0.06


@torch.no_grad()
def check_head(trainer: Any, batch: Batch) -> None:
    """Raise RunError if ln pi of the loss is not that of the model's logits, beyond the rounding of their dtype.

    ``batch`` has ``prompt_ids``, ``completion_ids`` and their masks, of this process.
    """
    row = int(batch["completion_mask"].sum(1).argmax())  # the longest completion
    prompt = _tokens(batch, "prompt", row)
    completion = _tokens(batch, "completion", row)[:HEAD_TOKENS]
    ids = torch.cat([prompt, completion])
    causal_lm = trainer._causal_lm(trainer.model)
    hidden, logits = hidden_states_and_logits(trainer.model_wrapped, causal_lm.get_decoder(), ids)
    dtype = logits.dtype
    predicts = slice(len(prompt) - 1, len(ids) - 1)  # the completion
    hidden, logits = hidden[predicts], logits[predicts].float()  # (T, H), (T, V)
    logps, _ = trainer._head(causal_lm, hidden, completion)
    log_pi = (logits / trainer.temperature).log_softmax(-1)
    own = log_pi.gather(-1, completion[:, None]).squeeze(-1)
    difference = (logps.float() - own).abs().mean()
    rounding = _rounding(trainer, dtype, hidden)
    bound = 1e-3 + rounding * logits.abs().amax() / trainer.temperature
    if any_process(not bool(difference <= bound), logits.device):  # NaN too
        kind = trainer.model.config.model_type
        raise RunError(
            f"the loss does not know how {kind} models compute their logits: ln pi of {len(own)} tokens is "
            f"{logps.mean():.3g} on average in the loss and {own.mean():.3g} by the model's logits (difference "
            f"{difference:.2g} nats): train it with TRL's GRPOTrainer and gtpo_trl.py, or pick another model."
        )


def _tokens(batch: Batch, part: str, row: int) -> Tensor:
    """The ids of a prompt or completion without padding. Shape (t,)."""
    ids = batch[f"{part}_ids"][row]
    return ids[batch[f"{part}_mask"][row].bool()]


def _rounding(trainer: Any, of_logits: torch.dtype, hidden: Tensor) -> float:
    """The relative rounding of logits: that of the coarsest dtype on their way."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = autocast.get(trainer.accelerator.mixed_precision, hidden.dtype)
    rounding = max(torch.finfo(dtype).eps for dtype in (of_logits, hidden.dtype, precision))
    return max(rounding, TF32) if hidden.is_cuda else rounding


def next_check(step: int, interval: int = INTERVAL) -> int:
    """The step of the next check: 0, 1, 2, 4, 8, 16 and then every ``interval`` steps. At 0 the adapter is the base."""
    return step + min(max(step, 1), interval)


def sampler_metrics(trainer: Any, logps: Tensor, batch: Batch) -> Metrics:
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


def score(trainer: Any, batch: Batch) -> Tensor:
    """ln pi of the completion tokens, with dropout as the model has it. Shape (B, T)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    rows = trainer.args.per_device_train_batch_size
    scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, batch_size=rows)
    return scores[0]


@torch.no_grad()
def probe_sampler(trainer: Any) -> None:
    """Raise RunError if the sampler (vLLM) does not generate with the adapter that it is handed.

    The check of the rollouts sees it once the adapter has moved by more than rounding, hundreds of steps later at the
    paper's learning rate. Here noise in ``lora_B`` moves the policy at once; the adapter and the random numbers are
    restored. For any GRPOTrainer of TRL, before a step; about ten seconds. A model without an adapter passes, and a
    sharded one.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(policy, "disable_adapter") or trainer.accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
        return
    weights = [weight for name, weight in policy.named_parameters() if "lora_B" in name]
    before = [weight.clone() for weight in weights]
    training = policy.training
    device = trainer.accelerator.device
    sampler = getattr(trainer, "vllm_generation", None) or SimpleNamespace()
    length = getattr(sampler, "max_completion_length", None)
    prompt = next(iter(trainer.train_dataset))["prompt"]
    prompt_ids, images, fields = trainer._tokenize_prompts([prompt])

    try:
        policy.eval()
        if length is not None:
            sampler.max_completion_length = min(length, PROBE_TOKENS)
        with isolated_rng(0, device):
            question = padded_batch([prompt_ids[0][:1]], [prompt_ids[0][1:]], 0, device)
            _move(trainer, question, weights, before)
            trainer._last_loaded_step = -1  # TRL hands the weights over again
            completions, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, num_generations=1)
        if logprobs is not None:
            scored = [math.nan if logp is None else logp for logp in logprobs[0]]
            rollout = padded_batch(prompt_ids, completions, 0, device)
            rollout["sampling_per_token_logps"] = torch.tensor([scored], device=device)
            check_rollouts(trainer, rollout)
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        policy.train(training)
        trainer._last_loaded_step = -1
        if length is not None:
            sampler.max_completion_length = length


def _move(trainer: Any, question: Batch, weights: list[Tensor], before: list[Tensor]) -> None:
    """Add noise to the weights until ln pi of a question is ``NOISE`` nats per token from the base model's."""
    with trainer.accelerator.unwrap_model(trainer.model).disable_adapter():
        base = score(trainer, question)
    size = 1e-3
    while (score(trainer, question) - base).abs().mean() < NOISE and size < 100:
        size *= 2
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old + size * torch.randn_like(weight))


@torch.no_grad()
def check_rollouts(trainer: Any, batch: Batch) -> None:
    """Raise RunError if rollouts do not come from the adapter, or the sampler is far from policy and base model.

    Rounding separates the sampler from the policy as much as from the base model, so a threshold in nats cannot
    separate the two. Instead, rollouts that are twice as close to the base model (adapter disabled) as to the policy
    count as sampled without the adapter. A model without an adapter passes.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(policy, "disable_adapter"):
        return
    tokens = batch["completion_mask"].sum(1).cumsum(0)
    rows = int((tokens < ENOUGH).sum()) + 1  # as few as have enough tokens
    batch = {name: part[:rows] for name, part in batch.items() if isinstance(part, Tensor) and part.dim()}
    logps = score(trainer, batch)
    if any_process(not bool(logps.isfinite().all()), trainer.accelerator.device):
        raise non_finite_error("a log-probability of the policy", trainer, [batch | {"logps": logps}])
    with policy.disable_adapter():
        of_base = score(trainer, batch)
    gaps = [sampler_metrics(trainer, each, batch)["sampler_logp_gap"] for each in (logps, of_base)]
    policy_gap, base_gap = (trainer.accelerator.gather(gap).mean().item() for gap in gaps)
    if not policy_gap <= min(2 * base_gap, MAX_GAP):  # NaN too
        raise RunError(
            f"rollouts do not come from the adapter at step {trainer.state.global_step}: vLLM's log-probabilities "
            f"differ from the policy's by {policy_gap:.2g} nats per token and from the base model's by {base_gap:.2g}: "
            "install the versions in requirements.txt and delete unsloth_compiled_cache/, or set --use_vllm false."
        )
