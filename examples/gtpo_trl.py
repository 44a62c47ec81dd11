"""GTPO (arXiv 2508.03772v5) on TRL's GRPOTrainer, in one file: copy it with gtpo_loss.py, which needs only PyTorch.

    from gtpo_trl import GTPOConfig, GTPOTrainer

    trainer = GTPOTrainer(model, reward_funcs, args=GTPOConfig(output_dir="outputs/mine"), train_dataset=data)
    trainer.train()

Overrides three methods of GRPOTrainer: ``_calculate_rewards`` keeps the rewards, ``_generate_and_score_completions``
marks the conflict tokens of whole groups, ``_compute_loss`` has the objective of Eq. 11. Tested with TRL 1.14 to 1.16.
"""

import itertools
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from torch import Tensor
from tqdm.auto import tqdm
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, pad

from gtpo_loss import (
    CONFLICT_SPANS,
    FILTER_MODES,
    LN2,
    completion_entropy,
    conflict_mask,
    conflict_weights,
    entropy_filter,
    filter_is_on,
    gtpo_loss,
    rewards_at_mean,
    tag_mask,
)

logger = logging.getLogger(__name__)

OVERRIDDEN = ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss")  # without them this is GRPO
if missing := [name for name in OVERRIDDEN if not hasattr(GRPOTrainer, name)]:
    raise ImportError(f"TRL {trl.__version__} has no GRPOTrainer.{missing[0]}: install TRL 1.14, 1.15 or 1.16.")
if ".".join(trl.__version__.split(".")[:2]) not in ("1.14", "1.15", "1.16"):
    warnings.warn(f"gtpo_trl.py was tested with TRL 1.14 to 1.16, not with {trl.__version__}.", stacklevel=2)

PROMPTS = 100  # Section 6: <H>_ini is measured on "the first 100 samples of the training set"

# Settings of GRPOConfig that change TRL's loss and are not in Eq. 11, with the only accepted value.
_FIXED = {
    "loss_type": "grpo",
    "beta": 0.0,
    "epsilon": GRPOConfig.epsilon,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None,
    "mask_truncated_completions": False,
}


@dataclass
class GTPOConfig(GRPOConfig):
    """GRPOConfig with the settings of GTPO; the defaults are the paper's.

    Args:
        loss_type: "grpo", the 1/|o_i| of Eq. 11.
        conflict_correction: Whether lambda of Eq. 9 weights the conflict tokens.
        conflict_positive_weight: lambda of a conflict token where A_i > 0.
        conflict_span: Which run of conflict tokens counts: anchored, first_run or common.
        conflict_tokens: all tokens of the span, or those of tags alone, which is ours and not the paper's.
        tags: Tags of a completion, for conflict_tokens "tags".
        gamma: Weight of the entropy penalty.
        zero_advantage: entropy (A_i = 0 trains on entropy alone, Eq. 11) or skip (Eq. 27 and 28).
        entropy_threshold: Completions with <H>_i above it are filtered, in nats.
        entropy_filter: auto (on if <H>_ini < ln 2), on, off or negative_only.
        initial_entropy: <H>_ini in nats; None measures it before the first step.

    Raises:
        ValueError: For a setting of GRPOConfig that would change the objective, or a value out of range.
    """

    loss_type: str = field(default="grpo", metadata={"help": "The 1/|o_i| of Eq. 11."})
    conflict_correction: bool = field(default=True, metadata={"help": "Weight conflict tokens by lambda of Eq. 9."})
    conflict_positive_weight: float = field(default=2.0, metadata={"help": "lambda of a conflict token with A_i > 0."})
    conflict_span: str = field(default="anchored", metadata={"help": "anchored, first_run or common."})
    conflict_tokens: str = field(default="all", metadata={"help": "all tokens of the span, or those of tags."})
    tags: str = field(
        default="<reasoning> </reasoning> <answer> </answer>", metadata={"help": "Of conflict_tokens tags."}
    )
    gamma: float = field(default=0.1, metadata={"help": "Weight of the entropy penalty."})
    zero_advantage: str = field(default="entropy", metadata={"help": "entropy or skip: a completion with A_i = 0."})
    entropy_threshold: float = field(default=LN2, metadata={"help": "Completions above it are filtered, in nats."})
    entropy_filter: str = field(default="auto", metadata={"help": "auto, on, off or negative_only."})
    initial_entropy: float | None = field(default=None, metadata={"help": "<H>_ini in nats; None measures it."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _FIXED.items():
            if getattr(self, name) != value:
                raise ValueError(f"GTPO has no {name} = {getattr(self, name)!r}: expected {value!r}.")
        known = {
            "conflict_span": CONFLICT_SPANS,
            "conflict_tokens": ("all", "tags"),
            "entropy_filter": FILTER_MODES,
            "zero_advantage": ("entropy", "skip"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown: pick one of {', '.join(values)}.")


class GTPOTrainer(GRPOTrainer):
    """Group-relative Trajectory-based Policy Optimization.

    GTPO (https://huggingface.co/papers/2508.03772) protects the tokens that rewarded and penalized completions share at
    their beginning and end: they are not penalized, and count double in rewarded completions. It filters completions
    of high entropy and penalizes entropy. It has no KL term, no reference model and no clipping. Single-turn text only:
    tools, environments, images and a router loss raise ValueError. ``args`` is a GTPOConfig, all else as GRPOTrainer.
    """

    _tag_names = ["trl", "gtpo"]

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GTPOConfig | None = None, *more: Any, **kwargs: Any
    ) -> None:
        if kwargs.get("environment_factory"):
            raise ValueError("GTPOTrainer does not support environments: use GRPOTrainer.")
        if args is None:
            source = model if isinstance(model, str) else model.config._name_or_path
            args = GTPOConfig(f"{source.rpartition('/')[2]}-GTPO")
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        if self.aux_loss_enabled:
            raise ValueError("GTPOTrainer does not support the router loss: set router_aux_loss_coef to 0.")

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # of all processes, (B, functions)
        sums = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        self._rewards = sums.masked_fill(rewards.isnan().all(1), torch.nan)  # no function has a reward for it
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._initial_entropy() is None:  # log_history is in trainer_state.json, which a resumed run reads
            entropy = self._measure_initial_entropy()
            self.state.log_history.append({"initial_entropy": entropy, "step": 0})
            if self.accelerator.is_main_process:
                state = "on" if filter_is_on(entropy, self.args.entropy_filter) else "off"
                logger.warning("Initial entropy %.2f nats, entropy filter %s", entropy, state)
        batch = super()._generate_and_score_completions(inputs)
        if unsupported := batch.keys() & {"tool_mask", "pixel_values"}:
            raise ValueError(f"GTPOTrainer does not support {', '.join(sorted(unsupported))}: use text and no tools.")
        mode = "train" if self.model.training else "eval"
        ids, mask = self._gather(batch["completion_ids"]), self._gather(batch["completion_mask"])  # whole groups
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        advantages = self.accelerator.gather(batch["advantages"])
        if self.args.multi_objective_aggregation == "sum_then_normalize":  # A = 0 at the mean, without rounding
            advantages = advantages.masked_fill(rewards_at_mean(self._rewards, group_size), 0.0)
        conflicts = conflict_mask(ids, mask, advantages, group_size, self.args.conflict_span)  # (B, T)
        if self.args.conflict_tokens == "tags":
            rows = [row[is_token].tolist() for row, is_token in zip(ids, mask.bool(), strict=True)]
            pieces = [self._tokenizer.convert_ids_to_tokens(row) for row in rows]
            conflicts &= tag_mask(pieces, self.args.tags.split(), ids.shape[1]).to(ids.device)
        rows, width = batch["completion_ids"].shape
        first = self.accelerator.process_index * rows
        batch["advantages"] = advantages[first : first + rows]
        batch["conflict_mask"] = conflicts[first : first + rows, :width]  # TRL shuffles and splits it with the rows
        batch["has_reward"] = ~self._rewards[first : first + rows].isnan()
        self._metrics[mode]["conflict_tokens"].append(conflicts.sum().item() / len(conflicts))
        self._metrics[mode]["conflict_fraction"].append((conflicts.sum() / mask.sum().clamp(min=1)).item())
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        args, mask, advantages = self.args, inputs["completion_mask"], inputs["advantages"]
        logps, token_entropy = self._logps_and_entropy(model, inputs)  # (B, T) each
        entropy = completion_entropy(token_entropy, mask)  # <H>_i, (B,)
        keep = entropy_filter(  # delta, (B,)
            entropy, advantages, self._initial_entropy(), args.entropy_threshold, args.entropy_filter
        )
        conflicts = inputs["conflict_mask"] & args.conflict_correction
        has_penalty = inputs["has_reward"] & ((args.zero_advantage == "entropy") | (advantages != 0))  # (B,)
        loss, metrics = gtpo_loss(
            logps,
            entropy,
            mask,
            advantages,
            conflict_weights(conflicts, advantages, args.conflict_positive_weight),  # lambda, (B, T)
            keep,
            gamma=args.gamma * has_penalty,
            old_per_token_logps=inputs.get("old_per_token_logps"),
            importance_weights=inputs.get("importance_sampling_ratio"),
        )
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            self._metrics[mode][name].append(self.accelerator.gather(value).mean().item())
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _logps_and_entropy(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """ln pi and H of the completion tokens. Shape (B, T) each."""
        logps, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            compute_entropy=True,
        )
        return logps, entropy

    def _initial_entropy(self) -> float | None:
        """<H>_ini, given or else measured; None before it is measured."""
        measured = (row["initial_entropy"] for row in self.state.log_history if "initial_entropy" in row)
        return next(measured, None) if self.args.initial_entropy is None else self.args.initial_entropy

    def _measure_initial_entropy(self) -> float:
        """Mean <H>_i of one completion for each of the first prompts, under the untrained policy, in nats."""
        if self.state.global_step > 0:
            raise ValueError("the checkpoint has no initial entropy, and the policy is trained: set initial_entropy.")
        rows, seed = self.train_dataset, self.args.seed
        if hasattr(rows, "__len__"):  # in the order of training: the first 100 of MATH are all algebra
            rows = map(rows.__getitem__, RepeatSampler(rows, 1, shuffle=self.shuffle_dataset, seed=seed))
        elif self.shuffle_dataset:
            rows = rows.shuffle(seed=seed)
        prompts = [row["prompt"] for row in itertools.islice(rows, PROMPTS)]
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-len(prompts) // ranks)  # the same number for each process, the last prompt repeated
        mine = [prompts[min(i, len(prompts) - 1)] for i in range(rank * share, (rank + 1) * share)]
        rows, means = self.args.per_device_train_batch_size, []
        with torch.no_grad(), torch.random.fork_rng():
            is_hidden = self.args.disable_tqdm or rank > 0
            for start in tqdm(range(0, share, rows), desc="initial entropy", disable=is_hidden):
                prompt_ids, images, fields = self._tokenize_prompts(mine[start : start + rows])
                completion_ids, _ = self._generate_single_turn(prompt_ids, images, fields, num_generations=1)
                batch = {}
                for name, lists, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
                    ids = [torch.tensor(row, device=self.accelerator.device) for row in lists]
                    batch[f"{name}_ids"] = pad(ids, self._tokenizer.pad_token_id, side)
                    batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], 0, side)
                _, token_entropy = self._logps_and_entropy(self.model, batch)
                means.append(completion_entropy(token_entropy, batch["completion_mask"]))
        return self.accelerator.gather(torch.cat(means))[: len(prompts)].mean().item()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, zero-padded to the longest. Shape (b, t) -> (B, T)."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=1))
