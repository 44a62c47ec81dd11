"""GTPO and GRPO on TRL's GRPOTrainer: the conflict mask of whole groups, and a loss without the (B, T, V) logits.

Overridden methods of TRL's trainer, plain or as Unsloth rewrites it:

* ``_generate_and_score_completions``: the one place where every process sees whole groups. The (B, T) conflict mask
  stays in the batch while TRL shuffles the rows and splits them into micro-batches.
* ``compute_loss``: ``gtpo/hidden_states.py``, ``gtpo/head.py``, then ``gtpo_loss.py``.
* ``_get_per_token_logps_and_entropies``: the same head for the old policy and the reference.
* ``_generate_single_turn``, ``_calculate_rewards``: stop at values that are not finite.
* ``evaluate``, ``get_eval_dataloader``, ``prediction_step``: metrics of held-out rows, each counted once; training
  continues as without an evaluation.
* ``_load_from_checkpoint``: loads the trained adapter beside KL's reference adapter.

GTPO adds its objective, the weights and the filter that enter it, and the initial entropy, measured once.
"""

import copy
import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import torch
import trl
from accelerate.utils import gather_object
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from trl.trainer.utils import RepeatSampler, is_async_callable, pad

from gtpo.arguments import GTPOArguments, check_advantage_weights, check_eval_batch
from gtpo.bars import PHASE, CompletionBar, TokenCounter, phase_bar
from gtpo.entropy_cache import keep_record, path_of, policy_digest, read_record
from gtpo.errors import RunError, UsageError
from gtpo.fault_tolerance import not_finite
from gtpo.files import write_atomically
from gtpo.generation import generate
from gtpo.groups import Group
from gtpo.head import linear_logps_and_entropy
from gtpo.held_out import eval_batches, isolated_rng
from gtpo.hidden_states import (
    are_equal,
    can_encode_prompts_once,
    distinct_prompts,
    hidden_states_by_prompt,
    hidden_states_per_completion,
)
from gtpo.inputs import check_config, check_inputs
from gtpo.models import keep_adapter_in_float32, read_config
from gtpo.processes import any_process, gather_full_parameter, refuse_data_parallel
from gtpo.runs import RunDirectory
from gtpo_loss import (
    IMPORTANCE_MODES,
    LN2,
    LOSS_TYPES,
    completion_entropy,
    conflict_push,
    conflict_runs,
    conflict_weights,
    entropy_filter,
    filter_is_on,
    grpo_loss,
    gtpo_loss,
    importance_ratio,
    token_weights,
    weighted_advantages,
)

logger = logging.getLogger(__name__)

INITIAL_ENTROPY_PROMPTS = 100  # Section 6: "the first 100 samples of the training set"
CPU_SAMPLING_BATCH = 25  # completions at once for the initial entropy: the weights are read once for all of them
NAN_PROBABILITIES = ("probability tensor contains", "device-side assert")  # torch.multinomial on a CPU, on a GPU
ROLLOUT_CHECK_STEPS = 20  # optimizer steps between two checks of the rollouts, which score them twice
MAX_SAMPLER_GAP = 0.3  # nats per token; bfloat16 engines differ by 0.01 to 0.06

# Settings of TRL that change its loss, and the values that ours implements, the paper's first: others are refused.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "loss_type": LOSS_TYPES,
    "scale_rewards": ("group", "batch", "none"),  # A_i = (R_i - mean) / std: of the group, of the step, or undivided
    "importance_sampling_level": ("token",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "top_entropy_quantile": (1.0,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "delta": (None,),
    "off_policy_mask_threshold": (None,),
    "use_bias_correction_kl": (False,),
    "mask_truncated_completions": (False,),  # hides completions from the conflict mask
    "use_liger_kernel": (False,),
    "vllm_importance_sampling_mode": IMPORTANCE_MODES,
}
_OF_THE_PAPER = {"loss_type": "grpo", "scale_rewards": "group", "vllm_importance_sampling_correction": False}


_OF_GROUPS = ("conflict_tokens", "conflict_fraction", "frac_reward_zero_std")  # metrics that compare completions

# State that a training step changes, besides the policy; inspect_group restores it.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check")


class GRPOTrainer(trl.GRPOTrainer):
    """GRPO (Eq. 1 and 2) with the conflict and entropy metrics of the paper.

    Args:
        model, reward_funcs, args, kwargs: As for TRL's GRPOTrainer; the paper has ``args`` with ``loss_type="grpo"``.
        positive_advantage_weight: Factor of A_i > 0 in the loss; W-REINFORCE (arXiv 2506.01347) has 0.1.
        negative_advantage_weight: Factor of A_i < 0 in the loss.

    Raises:
        UsageError: For settings that change the loss and are not implemented, each named.
    """

    reward_funcs: list[Any]  # these three are TRL's
    log_completions: bool
    _logs: dict[str, Any]
    _next_rollout_check = 0
    _by_prompt: bool | None = None  # prompts are encoded once; None until the model's first batch has shown it
    _bar: CompletionBar | None = None  # of the phase that generates, if it has one
    conflict_span = "anchored"  # of the conflict metrics; a GTPOTrainer takes it from its settings

    @classmethod
    def check_settings(cls, args: trl.GRPOConfig) -> None:
        """Refuse settings that the objective does not implement; needs no model.

        Raises:
            UsageError: As for the class.
        """
        for name, values in _SUPPORTED.items():
            if getattr(args, name) not in values and not (name == "use_bias_correction_kl" and args.beta == 0):
                expected = " or ".join(map(repr, values))
                raise UsageError(f"{name} = {getattr(args, name)!r} is not supported: expected {expected}.")
        least_values = {"num_iterations": 1, "max_completion_length": 1, "beta": 0, "epsilon": 0, "epsilon_high": 0}
        for name, least in least_values.items():
            if getattr(args, name) is not None and not getattr(args, name) >= least:
                raise UsageError(f"{name} is {getattr(args, name)}: expected at least {least}.")
        if not args.temperature > 0:
            raise UsageError(f"temperature is {args.temperature}: expected a value above 0, groups are sampled.")

    @classmethod
    def check_model(cls, model: Any, args: trl.GRPOConfig, has_tokenizer: bool = True) -> None:
        """Refuse a model whose loss or logits are not implemented, by its config: weights are not loaded.

        Args:
            model: The model, a Hub id or a directory. One whose config cannot be read passes: loading it says why.
            args: The trainer's.
            has_tokenizer: As for :func:`gtpo.inputs.check_config`.

        Raises:
            UsageError: If the model adds a loss of its own, or scales its logits in another way.
        """
        config = read_config(model, args) if isinstance(model, str) else model.config
        if config is not None:
            check_config(config, args.router_aux_loss_coef, has_tokenizer)
            _logit_options(config.get_text_config())

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: trl.GRPOConfig,
        *,
        positive_advantage_weight: float = 1.0,
        negative_advantage_weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.check_settings(args)
        check_advantage_weights(positive_advantage_weight, negative_advantage_weight)
        self.advantage_weights = positive_advantage_weight, negative_advantage_weight
        check_inputs({"model": model, **kwargs})
        if not trl.GRPOTrainer.__name__.startswith("Unsloth"):  # it uses one GPU
            refuse_data_parallel(args)
        self.check_model(model, args, has_tokenizer=kwargs.get("processing_class") is not None)
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        self.check_model(self.model, args)  # again, for a name whose config could not be read
        keep_adapter_in_float32(self.model)
        causal_lm = self._causal_lm(self.model)
        head = causal_lm.get_output_embeddings()
        if isinstance(head, BaseTunerLayer):
            raise UsageError("LoRA on lm_head is not supported: remove 'lm_head' from target_modules.")
        self._logit_options = _logit_options(causal_lm.config.get_text_config())
        other = {name: getattr(args, name) for name, value in _OF_THE_PAPER.items() if getattr(args, name) != value}
        if not args.use_vllm:
            other.pop("vllm_importance_sampling_correction", None)
        if other and self.accelerator.is_main_process:
            text = ", ".join(f"{name} {value} (the paper: {_OF_THE_PAPER[name]})" for name, value in other.items())
            logger.warning("Not the paper's objective: %s", text)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None in the run directory; gtpo/card.py writes that of the trained adapter."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self._check_rollouts(batch)
        mode = "train" if self.model.training else "eval"
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        rows, width = batch["completion_ids"].shape
        ids, valid = self._gather_rows(batch["completion_ids"]), self._gather_rows(batch["completion_mask"])
        advantages = self.accelerator.gather(batch["advantages"])
        runs = conflict_runs(ids, valid, advantages, group_size, self.conflict_span)
        mask = runs[0] | runs[1]
        tokens = valid.sum()
        first = self.accelerator.process_index * rows
        batch["conflict_mask"] = mask[first : first + rows, :width]
        if mode == "train" and self.log_completions:
            batch["row"] = torch.arange(first, first + rows, device=mask.device)  # follows TRL's shuffle
            table = self._logs["extra"]
            table["conflicts"].extend(self._spans(*row) for row in zip(ids, valid, mask, strict=True))
            table["cut_off"].extend(self._cut_off(ids, valid))
            for column, value in (("messages", _messages), ("gold_answer", _gold_answer)):
                table[column].extend(gather_object([value(row) for row in inputs]))
            for column in ("entropy", "delta"):
                table[column].extend([None] * len(mask))  # filled in by compute_loss

        metrics = self._metrics[mode]
        metrics["conflict_tokens"].append((mask.sum() / len(mask)).item())
        metrics["conflict_fraction"].append((mask.sum() / tokens.clamp(min=1)).item())
        metrics["completion_length"].append((tokens / len(mask)).item())
        if mask.any():
            strength = self._weighted(advantages) * token_weights(valid, self.loss_type, self.max_completion_length)
            weights = conflict_weights(mask, advantages.float())
            push, corrected = conflict_push(ids, valid, runs, strength.float(), weights, group_size)
            metrics["conflict_push"].append(push.item())
            metrics["conflict_push_corrected"].append(corrected.item())
        if self.use_vllm and self.vllm_importance_sampling_correction:
            # TRL's has this already; Unsloth takes it out of TRL's method
            batch["importance_sampling_ratio"] = importance_ratio(
                batch["old_per_token_logps"],
                batch["sampling_per_token_logps"],
                batch["completion_mask"],
                mode=self.vllm_importance_sampling_mode,
                clip_min=self.vllm_importance_sampling_clip_min,
                clip_max=self.vllm_importance_sampling_clip_max,
            )
        return batch

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        completion_ids, logprobs, failure = None, None, None
        try:
            with self._fast_generation(len(prompt_ids)):
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in NAN_PROBABILITIES):
                raise
            failure = error
        # vLLM samples from NaN without an error; TRL then has None for the log-probability
        unscored = any(row and all(logp is None for logp in row) for row in logprobs or ())
        is_lost = failure is not None and "device-side assert" in str(failure)  # no collective works after it
        if is_lost or any_process(failure is not None or unscored, self.accelerator.device):
            rows = [{"prompt": text} for text in self.processing_class.batch_decode(prompt_ids)]
            raise not_finite("the probability of a sampled token", self, rows=rows) from failure
        return completion_ids, logprobs

    @contextmanager
    def _fast_generation(self, completions: int) -> Iterator[None]:
        """Inside, ``gtpo/generation.py`` generates, and its tokens move the open bar, or one of their own."""
        beams = (self.args.generation_kwargs or {}).get("num_beams", 1) > 1
        if beams or trl.GRPOTrainer.__name__.startswith("Unsloth"):
            yield  # no streamer there
            return
        model = self._causal_lm(self.model)
        with ExitStack() as stack:
            bar = self._bar or stack.enter_context(self._completion_bar("generating", completions))
            counter = TokenCounter([True] * completions, self.eos_token_ids, bar.count_tokens)
            stack.enter_context(mock.patch.object(model, "generate", partial(generate, model, streamer=counter)))
            yield

    @contextmanager
    def _open_bar(self, title: str, completions: int) -> Iterator[CompletionBar]:
        """A bar over several calls that generate."""
        with self._completion_bar(title, completions) as self._bar:
            try:
                yield self._bar
            finally:
                self._bar = None

    def _completion_bar(self, title: str, completions: int) -> CompletionBar:
        shown = self.accelerator.is_main_process
        return CompletionBar(title, completions, 0, self.max_completion_length, disable=not shown, **PHASE)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        names, functions = self.reward_func_names, self.reward_funcs
        returned: list[list[Any]] = [[] for _ in names]  # TRL reads NaN as None: no reward for this completion
        self.reward_funcs = [_noting(function, into) for function, into in zip(functions, returned, strict=True)]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        for column, function in enumerate(functions):
            if isinstance(function, torch.nn.Module):
                returned[column] = rewards[:, column].tolist()
        flat = ((name, float(v)) for name, values in zip(names, returned, strict=True) for v in values if v is not None)
        wrong = next((f"the reward {name} = {value}" for name, value in flat if not math.isfinite(value)), None)
        wrong = next(filter(None, gather_object([wrong])), None)
        if wrong is None and not (rewards * self.reward_weights.to(rewards.device)).nansum(1).square().sum().isfinite():
            wrong = f"the advantage for a reward of {rewards.nan_to_num().abs().max():.3g}"  # the group's std overflows
        if wrong is not None:
            columns = ["prompt", "completion", *names]
            rows = [dict(zip(columns, row, strict=True)) for row in zip(prompts, completions, *returned, strict=False)]
            raise not_finite(wrong, self, rows=rows, mend="a reward function that returns numbers, or None")
        return rewards

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's evaluation, after which training continues as without it, bit for bit.

        Each evaluation draws the same random numbers, its own. TRL's table stays that of training: TRL would add the
        rows to the step's and write them over the file.
        """
        training, shown = copy.deepcopy(self._logs), self.log_completions
        self.log_completions = False
        try:
            with isolated_rng(self.args.seed + self.accelerator.process_index, self.accelerator.device):
                return super().evaluate(*args, **kwargs)
        finally:
            self._logs, self.log_completions = training, shown

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Whole groups, split evenly over the processes, batch by batch; with each batch the number of its prompts.

        The last batch may be smaller. Accelerate would fill it with rows that then count twice.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        size, ranks = self.args.per_device_eval_batch_size, self.accelerator.num_processes
        check_eval_batch(size, self.num_generations_eval, ranks)
        batches = eval_batches(len(rows), self.num_generations_eval, size, ranks, self.accelerator.process_index)
        prompts = iter([count for _, count in batches])
        return DataLoader(
            rows, batch_sampler=[indices for indices, _ in batches], collate_fn=lambda batch: (batch, next(prompts))
        )

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        """Generate and score one batch; each of its metrics counts once per prompt in TRL's mean."""
        rows, prompts = inputs
        metrics = self._metrics["eval"]
        before = {name: len(values) for name, values in metrics.items()}
        loss, _, _ = super().prediction_step(model, rows, *args, **kwargs)
        metrics["loss"].append(self.accelerator.gather(loss).mean().item())
        for name, values in metrics.items():
            values[before.get(name, 0) :] *= prompts
        for name in ("num_tokens", *(_OF_GROUPS if self.num_generations_eval == 1 else ())):
            metrics.pop(name, None)  # num_tokens is that of training
        return None, None, None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if return_outputs:
            raise UsageError("return_outputs is not supported: the loss is computed without the logits.")
        mode = "train" if self.model.training else "eval"
        weights = self._weights(inputs)  # lambda, (B, T)
        logps, token_entropy = self._logps_and_entropy(model, inputs, self._grad_tokens(weights, inputs))
        entropy = completion_entropy(token_entropy, inputs["completion_mask"])  # <H>_i, (B,)
        keep = self._keep(entropy, inputs)  # delta, (B,)
        loss, metrics = self._objective(logps, entropy, weights, keep, inputs)
        finite = loss.detach().isfinite() & entropy.isfinite().all()
        if not self.accelerator.gather(finite).all():  # every process raises, or the others would hang
            what = "the loss" if entropy.isfinite().all() else "the entropy"
            raise not_finite(what, self, [inputs | {"logps": logps, "token_entropy": token_entropy}])
        if "row" in inputs:
            self._fill_in(inputs["row"], entropy=entropy, delta=keep)
        if inputs.get("sampling_per_token_logps") is not None:
            drawn = inputs.get("old_per_token_logps", logps.detach())  # under the weights that vLLM sampled with
            metrics["sampler_logp_gap"] = self._sampler_gap(drawn, inputs)
        if "kl" in metrics:  # a mean over tokens: weight each process and micro-batch by its tokens
            share = inputs["completion_mask"].sum() / inputs["num_items_in_batch"]
            micro_batches = self.args.steps_per_generation if mode == "train" else 1
            metrics["kl"] = metrics["kl"] * share * self.accelerator.num_processes * micro_batches
        for name, value in metrics.items():
            self._metrics[mode][name].append(self.accelerator.gather(value).mean().item())
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        with _parquet_written_atomically():  # the table of completions
            super().log(logs, start_time)

    def _sampler_gap(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Mean |ln pi - ln pi of the sampler| over the completion tokens, in nats."""
        gap = (logps - inputs["sampling_per_token_logps"]).abs()
        return gap[inputs["completion_mask"].bool() & gap.isfinite()].mean()  # NaN: a token without a score of vLLM

    def _check_rollouts(self, batch: dict[str, Any]) -> None:
        """Stop a run whose rollouts do not come from the adapter; no other metric shows it.

        Rounding separates the sampler from the policy as much as from the base model, so a threshold in nats cannot
        tell the two apart. Instead, rollouts that are twice as close to the base model (adapter disabled) as to the
        policy count as sampled without the adapter.

        Raises:
            RunError: If the rollouts do not come from the adapter, or the sampler is far from both.
        """
        step = self.state.global_step
        if batch.get("sampling_per_token_logps") is None or step < self._next_rollout_check:
            return
        policy = self.accelerator.unwrap_model(self.model)
        if not hasattr(policy, "disable_adapter"):
            return
        self._next_rollout_check = step + ROLLOUT_CHECK_STEPS
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        score = partial(
            self._get_per_token_logps_and_entropies, self.model, ids, mask, batch["completion_ids"].shape[1]
        )
        with torch.no_grad():
            logps = score(self.args.per_device_train_batch_size)[0]
            if any_process(not bool(logps.isfinite().all()), self.accelerator.device):
                raise not_finite("a log-probability of the policy", self, [batch | {"logps": logps}])
            policy_gap = self._sampler_gap(logps, batch)
            with policy.disable_adapter():
                base_gap = self._sampler_gap(score(self.args.per_device_train_batch_size)[0], batch)
        policy_gap, base_gap = (self.accelerator.gather(gap).mean().item() for gap in (policy_gap, base_gap))
        if not policy_gap <= min(2 * base_gap, MAX_SAMPLER_GAP):  # NaN too
            raise RunError(
                f"rollouts do not come from the adapter at step {step}: vLLM's log-probabilities differ from the "
                f"policy's by {policy_gap:.2g} nats per token and from the base model's by {base_gap:.2g}: install the "
                "versions in requirements.txt and delete unsloth_compiled_cache/, or set --use_vllm false."
            )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """ln pi and H under the old policy or the reference, with the head of the loss. Shape (B, T) each.

        TRL's method computes the logits; Unsloth's packs rows by the pad id, and shifts them where the prompts of a
        step differ in length.
        """
        start = input_ids.shape[1] - logits_to_keep
        rows = batch_size or len(input_ids)
        batches = list(zip(input_ids.split(rows), attention_mask.split(rows), strict=True))
        parts = []
        with phase_bar("scoring", len(batches), self.accelerator.is_main_process) as bar:
            for ids, mask in batches:
                inputs = {
                    "prompt_ids": ids[:, :start],
                    "prompt_mask": mask[:, :start],
                    "completion_ids": ids[:, start:],
                    "completion_mask": mask[:, start:],
                }
                parts.append(self._logps_and_entropy(model, inputs))
                bar.update()
        logps, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return logps, entropy, None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model)
        if model is None and len(getattr(policy, "peft_config", ())) > 1:
            # With KL's adapter "ref" in a subdirectory, Transformers does not load the trained one.
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def inspect_group(self, row: int) -> Group:
        """Generate and score G completions of one training prompt as a training step does, without training on them.

        Nothing is logged or counted, and the state of the random generators is restored: a run is the same with and
        without the call, and a second call returns the same completions. GTPO measures its initial entropy if it has
        not yet.

        Args:
            row: Index into ``train_dataset``.

        Raises:
            UsageError: If several processes are running.
        """
        if self.accelerator.num_processes > 1:
            raise UsageError(f"inspect_group needs one process, and {self.accelerator.num_processes} are running.")
        logged = copy.deepcopy({name: getattr(self, name) for name in _LOGGED})
        tokens_seen = self.state.num_input_tokens_seen
        was_training = self.model.training
        self.model.train()  # groups of training mode; there is no dropout
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad():
                batch = self._generate_and_score_completions([self.train_dataset[row]] * self.num_generations)
                table = self._logs["rewards"]
                rewards = {name: list(table[name])[-self.num_generations :] for name in self.reward_func_names}
                entropy = self._mean_entropies(batch)
        finally:
            self.model.train(was_training)
            self.__dict__.update(logged)
            self.state.num_input_tokens_seen = tokens_seen
        valid, weights = batch["completion_mask"].bool(), self._weights(batch)
        tokenizer = self.processing_class
        rows = range(self.num_generations)
        return Group(
            prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
            tokens=[_token_texts(tokenizer, batch["completion_ids"][i][valid[i]].tolist()) for i in rows],
            rewards=rewards,
            advantages=batch["advantages"].tolist(),
            weights=[weights[i][valid[i]].tolist() for i in rows],
            entropy=entropy.tolist(),
            keep=self._keep(entropy, batch).tolist(),
            messages=_messages(self.train_dataset[row]),
            gold_answer=_gold_answer(self.train_dataset[row]),
            cut_off=self._cut_off(batch["completion_ids"], batch["completion_mask"]),
        )

    def _mean_entropies(self, batch: dict[str, Tensor]) -> Tensor:
        """<H>_i, in micro-batches of the training size. Shape (B,)."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        parts = zip(*(batch[name].split(self.args.per_device_train_batch_size) for name in names), strict=True)
        entropies = []
        for part in parts:
            inputs = dict(zip(names, part, strict=True))
            _, token_entropy = self._logps_and_entropy(self.model_wrapped, inputs)
            entropies.append(completion_entropy(token_entropy, inputs["completion_mask"]))
        return torch.cat(entropies)

    def _fill_in(self, rows: Tensor, **columns: Tensor) -> None:
        """Write values that compute_loss knows, shape (B,) each, into the table of completions."""
        rows = self.accelerator.gather(rows)
        for column, local in columns.items():
            for row, value in zip(rows.tolist(), self.accelerator.gather(local).tolist(), strict=True):
                self._logs["extra"][column][row] = value

    def _spans(self, ids: Tensor, valid: Tensor, mask: Tensor) -> list[list[int]]:
        """The conflict spans of one completion as [start, end) in the characters of its text."""
        ids, mask = ids[valid.bool()], mask[valid.bool()]
        edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int()).nonzero()[:, 0]
        texts = [self.processing_class.decode(ids[:edge], skip_special_tokens=True) for edge in edges.tolist()]
        return [[len(start), len(end)] for start, end in zip(texts[::2], texts[1::2], strict=True)]

    def _cut_off(self, ids: Tensor, valid: Tensor) -> list[bool]:
        """Whether each completion ends without an end token: it was cut off at max_completion_length."""
        last = ids.gather(1, (valid.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]
        ends = torch.tensor([*self.eos_token_ids, self._tokenizer.pad_token_id], device=ids.device)
        return (~torch.isin(last, ends)).tolist()

    def _weighted(self, advantages: Tensor) -> Tensor:
        """A_i as in the loss: times the weight of its sign. Shape (B,)."""
        return weighted_advantages(advantages, *self.advantage_weights)

    def _normalizer(self, inputs: dict[str, Any]) -> Tensor | int | None:
        """The count that ``loss_type`` divides by, per micro-batch and process: their losses are averaged."""
        completion_mask = inputs["completion_mask"]
        if self.loss_type == "dr_grpo":
            return len(completion_mask) * self.max_completion_length
        if self.loss_type == "bnpo":  # of this micro-batch alone
            return completion_mask.sum().clamp(min=1)
        if self.loss_type == "dapo":
            micro_batches = self.args.steps_per_generation if self.model.training else 1
            return inputs["num_items_in_batch"].clamp(min=1) / (self.accelerator.num_processes * micro_batches)
        return None

    def _keep(self, entropy: Tensor, inputs: dict[str, Any]) -> Tensor:
        """delta of the rows: 1 everywhere in GRPO. Shape (B,)."""
        return torch.ones_like(entropy)

    def _weights(self, inputs: dict[str, Any]) -> Tensor:
        """lambda of the rows: 1 everywhere in GRPO. Shape (B, T)."""
        return torch.ones_like(inputs["completion_mask"], dtype=torch.float32)

    def _grad_tokens(self, weights: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The tokens that may have a gradient. Bool, shape (B, T)."""
        learns = (self._weighted(inputs["advantages"]) != 0) | (self.beta != 0)
        return learns[:, None].expand_as(weights)

    def _objective(
        self, logps: Tensor, entropy: Tensor, weights: Tensor, keep: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = grpo_loss(
            logps,
            inputs["completion_mask"],
            self._weighted(inputs["advantages"]),
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            loss_type=self.loss_type,
            normalizer=self._normalizer(inputs),
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
            old_per_token_logps=inputs.get("old_per_token_logps"),
            importance_weights=inputs.get("importance_sampling_ratio"),
        )
        return loss, metrics | {"entropy": entropy.mean()}

    def _logps_and_entropy(
        self, model: Any, inputs: dict[str, Any], grad_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ln pi and H of the completion tokens at the sampling temperature, 0 on padding. Shape (B, T) each."""
        completion_mask = inputs["completion_mask"].bool()
        causal_lm = self._causal_lm(model)
        forward = partial(model, **self._last_logit_only())
        by_prompt = self._encodes_prompts_once(forward, causal_lm, inputs)
        hidden_states = hidden_states_by_prompt if by_prompt else hidden_states_per_completion
        hidden = hidden_states(forward, causal_lm.base_model, inputs)  # (N, H), each predicts its token
        head = causal_lm.get_output_embeddings()
        logps, entropy = linear_logps_and_entropy(
            hidden,
            gather_full_parameter(head.weight),
            inputs["completion_ids"][completion_mask],
            temperature=self.temperature,
            bias=gather_full_parameter(getattr(head, "bias", None)),
            grad_rows=None if grad_rows is None else grad_rows[completion_mask],
            **self._logit_options,
        )
        blank = torch.zeros(completion_mask.shape, dtype=logps.dtype, device=logps.device)
        return blank.masked_scatter(completion_mask, logps), blank.masked_scatter(completion_mask, entropy)

    def _encodes_prompts_once(self, forward: Any, causal_lm: Any, inputs: dict[str, Any]) -> bool:
        """Whether the rows of a micro-batch share prompts, and the model gives the same hidden states by prompt."""
        # Unsloth, FSDP and DeepSpeed have one forward per call; gradient checkpointing may be enabled at any time.
        if (
            trl.GRPOTrainer.__name__.startswith("Unsloth")
            or self.accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU")
            or not can_encode_prompts_once(causal_lm, self.model_kwarg_keys)
            or self._by_prompt is False
        ):
            return False
        shared = len(distinct_prompts(inputs)[0]) < len(inputs["prompt_ids"])
        if not any_process(shared, self.accelerator.device):  # all call the model as often
            return False
        if self._by_prompt is None:
            self._by_prompt = are_equal(forward, causal_lm.base_model, inputs)
        return self._by_prompt

    def _last_logit_only(self) -> dict[str, int]:
        return {"logits_to_keep": 1} if "logits_to_keep" in self.model_kwarg_keys else {}

    def _causal_lm(self, model: Any) -> Any:
        """The CausalLM without the wrappers of DDP and PEFT."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, zero-padded to the longest. Shape (b, t) -> (B, T); rank order is group order."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=1))


class GTPOTrainer(GRPOTrainer):
    """GTPO (arXiv 2508.03772): the objective of Eq. 11; no KL term, no reference model, no clipping.

    Args:
        gtpo: Settings of the method; the paper's by default.
        model, reward_funcs, args, kwargs: As for :class:`GRPOTrainer`; ``args`` with ``beta=0``.

    Raises:
        UsageError: If ``beta`` is not 0, or as for :class:`GRPOTrainer`.
    """

    _tag_names = ["trl", "gtpo"]  # of PEFT's card in a checkpoint

    @classmethod
    def check_settings(cls, args: trl.GRPOConfig) -> None:
        if args.beta != 0.0:
            raise UsageError(f"beta = {args.beta}: expected 0, because GTPO has no KL term and no reference model.")
        if args.epsilon != trl.GRPOConfig.epsilon or args.epsilon_high is not None:
            raise UsageError("epsilon and epsilon_high clip the ratio, and GTPO has no clipping: remove them.")
        super().check_settings(args)

    def __init__(
        self, model: Any, reward_funcs: Any, args: trl.GRPOConfig, gtpo: GTPOArguments | None = None, **kwargs: Any
    ) -> None:
        self.gtpo = gtpo or GTPOArguments()
        self.conflict_span = self.gtpo.conflict_span
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        self.initial_entropy: float | None = None  # set before the first batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.initial_entropy is None:
            self.initial_entropy = self._read_or_measure_initial_entropy()
        return super()._generate_and_score_completions(inputs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.initial_entropy is None:  # before the random numbers of the evaluation
            self.initial_entropy = self._read_or_measure_initial_entropy()
        return super().evaluate(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if self.initial_entropy is None:  # resumed between two steps on the same completions
            self.initial_entropy = self._read_or_measure_initial_entropy()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _weights(self, inputs: dict[str, Any]) -> Tensor:
        if not self.gtpo.conflict_correction:
            return super()._weights(inputs)
        return conflict_weights(inputs["conflict_mask"], inputs["advantages"].float())

    def _keep(self, entropy: Tensor, inputs: dict[str, Any]) -> Tensor:
        return entropy_filter(
            entropy,
            inputs["advantages"],
            self.initial_entropy,
            threshold=self.gtpo.entropy_threshold,
            mode=self.gtpo.entropy_filter,
        )

    def _grad_tokens(self, weights: Tensor, inputs: dict[str, Any]) -> Tensor:
        return weights != 0

    def _objective(
        self, logps: Tensor, entropy: Tensor, weights: Tensor, keep: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return gtpo_loss(
            logps,
            entropy,
            inputs["completion_mask"],
            self._weighted(inputs["advantages"]),
            weights,
            keep,
            gamma=self.gtpo.gamma,
            loss_type=self.loss_type,
            normalizer=self._normalizer(inputs),
            old_per_token_logps=inputs.get("old_per_token_logps"),
            importance_weights=inputs.get("importance_sampling_ratio"),
        )

    def _read_or_measure_initial_entropy(self) -> float:
        """<H>_ini of Section 5.2: given, or measured before step 0, never on a trained policy; stored with the run.

        Raises:
            UsageError: If a resumed run has no readable record of it.
        """
        path = RunDirectory(self.args.output_dir).initial_entropy
        record: dict[str, Any]
        kept_in: Path | None = None
        if self.gtpo.initial_entropy is not None:
            record = {"initial_entropy": self.gtpo.initial_entropy, "given": True}
        elif self.state.global_step > 0:  # resumed
            record = _read_initial_entropy(path, self.state.global_step)
        else:
            record, kept_in = self._find_or_measure_initial_entropy()
        value = float(record["initial_entropy"])
        if not math.isfinite(value):
            raise not_finite("the initial entropy", self)
        record["filter_on"] = filter_is_on(value, self.gtpo.entropy_filter)
        if self.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record, indent=2))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            source = f" over {record['prompts']} prompts" if "prompts" in record else ", given"
            source += f", of an earlier run ({kept_in})" if kept_in else ""
            mode = self.gtpo.entropy_filter
            side = f"{'below' if value < LN2 else 'not below'} ln 2" if mode == "auto" else f"--entropy_filter {mode}"
            with logging_redirect_tqdm():  # above the bar
                state = "on" if record["filter_on"] else "off"
                logger.warning("<H>_ini %.2f nats%s: %s, entropy filter %s", value, source, side, state)
        return value

    def _find_or_measure_initial_entropy(self) -> tuple[dict[str, Any], Path | None]:
        """The record of the untrained policy, and the file that an earlier run of the same base has kept it in."""
        # the order of training: TRL's sampler, with the run's seed
        order = RepeatSampler(self.train_dataset, 1, shuffle=self.shuffle_dataset, seed=self.args.seed)
        first = self.train_dataset.select(list(itertools.islice(order, INITIAL_ENTROPY_PROMPTS)))
        prompts = list(first["prompt"])
        directory = None if self.gtpo.initial_entropy_dir is None else Path(self.gtpo.initial_entropy_dir)
        key = None if directory is None else self._initial_entropy_key(prompts)
        if directory is not None and key is not None:
            is_main = self.accelerator.is_main_process
            kept = gather_object([read_record(directory, key) if is_main else None])[0]  # one reads, all agree
            if kept is not None:
                return kept, path_of(directory, key)
        entropies = self._sampled_entropies(prompts)
        record = {
            "initial_entropy": sum(entropies) / len(entropies),
            "prompts": len(entropies),
            "temperature": self.temperature,
            "per_prompt": entropies,
        }
        if directory is not None and key is not None and self.accelerator.is_main_process:
            keep_record(directory, key, record)
        return record, None

    def _initial_entropy_key(self, prompts: list[Any]) -> dict[str, Any] | None:
        """Everything that determines the sampled entropies; None where the weights are spread over processes."""
        digest = policy_digest(self.accelerator.unwrap_model(self.model))
        if digest is None:
            return None
        prompt_ids = self._tokenize_prompts(prompts)[0]
        sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "use_vllm")
        precision = ("bf16", "fp16", "per_device_train_batch_size", "seed")
        return {
            "policy": digest,
            "prompts": hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest(),
            "max_completion_length": self.max_completion_length,
            "end_tokens": sorted(self.eos_token_ids),
            "device": self.accelerator.device.type,
            "completions_at_once": self._sampling_batch(),
            "processes": self.accelerator.num_processes,
        } | {name: getattr(self.args, name) for name in sampling + precision}

    def _sampled_entropies(self, prompts: list[Any]) -> list[float]:
        """<H>_i of one completion per prompt, in the order of the prompts, which are split over the processes.

        The state of the random generators is restored: a run samples the same groups as with a given value.
        """
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-len(prompts) // ranks)
        first = rank * share
        mine = [prompts[min(i, len(prompts) - 1)] for i in range(first, first + share)]  # the same number on each
        chunk = self._sampling_batch()
        entropies: list[float] = []
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), self._open_bar("initial entropy", len(mine)) as bar:
            for start in range(0, len(mine), chunk):
                prompt_ids, images, fields = self._tokenize_prompts(mine[start : start + chunk])
                completion_ids, _ = self._generate_single_turn(prompt_ids, images, fields, num_generations=1)
                batch = self._padded(prompt_ids, completion_ids)
                entropies += self._mean_entropies(batch).tolist()
                bar.count_completions([{"tokens": len(ids)} for ids in completion_ids])
        return gather_object(entropies)[: len(prompts)]

    def _sampling_batch(self) -> int:
        """Completions that one process samples at once for the initial entropy."""
        least = CPU_SAMPLING_BATCH if self.accelerator.device.type == "cpu" else 1
        return max(least, self.args.generation_batch_size // self.accelerator.num_processes)

    def _padded(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> dict[str, Tensor]:
        """TRL's layout: prompts padded to the left, completions to the right."""
        batch = {}
        for name, lists, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
            ids = [torch.tensor(row, dtype=torch.long) for row in lists]
            ones = [torch.ones_like(row) for row in ids]
            batch[f"{name}_ids"] = pad(ids, padding_value=self._tokenizer.pad_token_id, padding_side=side)
            batch[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
        return {key: tensor.to(self.accelerator.device) for key, tensor in batch.items()}


def _read_initial_entropy(path: Path, step: int) -> dict[str, Any]:
    """The record of the initial entropy that a run has stored.

    Raises:
        UsageError: If the file is missing, cut off, or has no finite number in it.
    """
    try:
        record = json.loads(path.read_text())
        if math.isfinite(record["initial_entropy"]):
            return dict(record)
        what = f"contains {record['initial_entropy']}, expected a number"
    except FileNotFoundError:
        what = "is missing"
    except (OSError, ValueError, KeyError, TypeError):
        what = "cannot be read"
    raise UsageError(
        f"{path} {what}: the initial entropy can only be measured before training, and the policy is at step {step}. "
        "Set --initial_entropy."
    )


def _messages(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a row's prompt; None for a prompt that is plain text."""
    if isinstance(row["prompt"], str):
        return None
    return [{"role": str(turn["role"]), "content": str(turn.get("content") or "")} for turn in row["prompt"]]


def _gold_answer(row: dict[str, Any]) -> str | None:
    return None if row.get("answer") is None else str(row["answer"])


def _noting(function: Any, returned: list[Any]) -> Any:
    """A reward function that also notes what it returns; a reward model as it is."""
    if isinstance(function, torch.nn.Module):
        return function

    def note(rewards: Any) -> list[Any]:
        returned[:] = rewards
        return returned

    async def noting_async(**columns: Any) -> list[Any]:
        return note(await function(**columns))

    return noting_async if is_async_callable(function) else lambda **columns: note(function(**columns))


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]


def _logit_options(config: Any) -> dict[str, Any]:
    """How a model scales its logits in Transformers: Gemma caps, Cohere multiplies, Granite divides.

    Raises:
        UsageError: For other scalings.
    """
    for name in ("output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UsageError(f"{config.model_type} models have {name} = {getattr(config, name)}: not supported.")
    scale = getattr(config, "logit_scale", None) or 1.0
    return {
        "logit_scale": scale / (getattr(config, "logits_scaling", None) or 1.0),
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


@contextmanager
def _parquet_written_atomically() -> Iterator[None]:
    """Inside, a DataFrame is written to a temporary name and renamed: a kill leaves no truncated Parquet file."""
    write = pandas.DataFrame.to_parquet

    def write_then_rename(table: pandas.DataFrame, path: str, *args: Any, **kwargs: Any) -> None:
        write(table, f"{path}.tmp", *args, **kwargs)
        os.replace(f"{path}.tmp", path)

    with mock.patch.object(pandas.DataFrame, "to_parquet", write_then_rename):
        yield
