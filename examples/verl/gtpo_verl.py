"""GTPO (arXiv 2508.03772v5) on verl 0.9: a trainer and a policy loss, registered by name; verl itself is not changed.

    export VERL_USE_EXTERNAL_MODULES=gtpo_verl PYTHONPATH=examples/verl:.     # on every machine
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=gtpo +trainer.gtpo.gamma=0.1 ...

Copy it with ``gtpo_loss.py``: besides verl and PyTorch they need nothing. The settings in ``trainer.gtpo`` are those of
:class:`Settings`. The trainer is verl's synchronous one: to each token it gives the advantage
delta_i (A_i - gamma <H>_i) lambda_it, from the token ids and the entropies that verl has stored by then.

It differs from the trainer for TRL in two values: A_i = (R_i - mean) / (std + 1e-6), TRL has 1e-4; and a completion
that failed counts as one with loss 0, since verl divides by the number that was asked for.

Deliberately absent, each refused by name: clipping, a KL term, an entropy bonus, several updates for a generation
(<H>_i is that of the policy that sampled), old log-probabilities of the sampler (they come without entropies),
rejection sampling, several trajectories a completion, distillation.
"""

import itertools
import json
import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.utils.padding import response_to_nested

import gtpo_loss as gtpo

PROMPTS = 100  # Section 6: <H>_ini is measured on "the first 100 samples of the training set"
STATE = "gtpo.json"  # in a checkpoint's directory

# What a GTPO run has, the default first. None: not set.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "algorithm.adv_estimator": ("grpo",),
    "algorithm.use_kl_in_reward": (False,),
    "algorithm.rollout_correction.bypass_mode": (False,),
    "algorithm.rollout_correction.rollout_rs": (None,),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("vanilla", "unclipped"),  # the trainer sets the latter
    "actor_rollout_ref.actor.loss_agg_mode": ("seq-mean-token-mean", "token-mean"),  # --loss_type grpo, dapo
    "actor_rollout_ref.actor.clip_ratio": (0.2,),  # verl's defaults, which nothing reads
    "actor_rollout_ref.actor.clip_ratio_low": (0.2,),
    "actor_rollout_ref.actor.clip_ratio_high": (0.2,),
    "actor_rollout_ref.actor.clip_ratio_c": (3.0,),
    "actor_rollout_ref.actor.use_kl_loss": (False,),
    "actor_rollout_ref.actor.entropy_coeff": (0,),
    "actor_rollout_ref.actor.ppo_epochs": (1,),
    "actor_rollout_ref.rollout.multi_turn.enable": (False,),
    "distillation.enabled": (False,),
}


@dataclass
class Settings:
    """``trainer.gtpo``: names, defaults and meaning as of the flags of train_gtpo.py."""

    gamma: float = 0.1
    zero_advantage: str = "entropy"
    entropy_threshold: float = gtpo.LN2
    entropy_filter: str = "auto"
    conflict_correction: bool = True
    conflict_positive_weight: float = 2.0
    conflict_span: str = "anchored"
    initial_entropy: float | None = None

    def __post_init__(self) -> None:
        choices = {
            "zero_advantage": ("entropy", "skip"),
            "entropy_filter": gtpo.FILTER_MODES,
            "conflict_correction": (True, False),
            "conflict_span": gtpo.CONFLICT_SPANS,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"trainer.gtpo.{name} = {value!r}: expected one of {known}.")
        for name in ("gamma", "entropy_threshold", "conflict_positive_weight", "initial_entropy"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            if not is_number and not (name == "initial_entropy" and value is None):
                raise ValueError(f"trainer.gtpo.{name} = {value!r}: expected a finite number >= 0.")


def read_settings(config: Any) -> Settings:
    """The settings of ``trainer.gtpo``; ValueError for an unknown name, or for a setting of verl that GTPO lacks."""
    given = dict(config.trainer.get("gtpo") or {})
    known = [field.name for field in fields(Settings)]
    for name in given:
        if name not in known:
            raise ValueError(f"trainer.gtpo.{name} is unknown here: pick {', '.join(known)}.")
    for name, accepted in SUPPORTED.items():
        value = OmegaConf.select(config, name)
        if value not in accepted:
            raise ValueError(f"{name} = {value!r}: GTPO on verl does not carry it, expected one of {accepted}.")
    settings = Settings(**given)
    prompts, in_update = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts != in_update:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size = {in_update}, data.train_batch_size = {prompts}: <H>_i is "
            "not measured again between the updates of a generation, expected equal numbers."
        )
    if settings.initial_entropy is None and config.algorithm.filter_groups.enable:
        raise ValueError(
            "algorithm.filter_groups.enable = True would drop the single completions that <H>_ini is measured on: set "
            "trainer.gtpo.initial_entropy."
        )
    return settings


@register_policy_loss("unclipped")
def unclipped_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """-J of Eq. 11, without clipping: :class:`GTPOTrainer` has put all but the ratio r_it into the advantages.

    Not under the name ``gtpo``: with another trainer it would be GRPO without clipping. Shapes (b, T).
    """
    ratio = (log_prob - old_log_prob).masked_fill(~response_mask.bool(), 0.0).exp()
    losses = -advantages * ratio
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def groups_by_size(groups: np.ndarray) -> Iterator[tuple[int, Tensor]]:
    """(G, rows) of all groups with G rows, those of a group adjacent; ``groups`` (B,) names the group of each row."""
    _, number, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    sizes = counts[number[order]]
    for size in np.unique(counts).tolist():
        yield size, torch.as_tensor(order[sizes == size])


def token_advantages(
    responses: Tensor,
    mask: Tensor,
    advantages: Tensor,
    rewards: Tensor,
    token_entropy: Tensor,
    groups: np.ndarray,
    initial_entropy: float,
    settings: Settings,
) -> tuple[Tensor, dict[str, float]]:
    """delta_i (A_i - gamma <H>_i) lambda_it, and metrics, for rows in any order.

    Args:
        responses: Token ids. Shape (B, T).
        mask: 1 on the tokens that the policy sampled. Shape (B, T).
        advantages: A_i. Shape (B,).
        rewards: R_i; where it is the mean of its group, A_i is 0 and not a rounding error. Shape (B,).
        token_entropy: H_it in nats. Shape (B, T).
        groups: Names the prompt of each row; a group may have fewer rows than were asked for. Shape (B,).
        initial_entropy: <H>_ini in nats.
        settings: Of the method.

    Returns:
        Shape (B, T), 0 off the mask.
    """
    weights = torch.ones_like(token_entropy)
    conflicts = torch.zeros_like(mask, dtype=torch.bool)
    advantages = advantages.clone()
    for size, rows in groups_by_size(groups):
        A = advantages[rows].masked_fill(gtpo.rewards_at_mean(rewards[rows], size), 0.0)
        advantages[rows] = A
        conflicts[rows] = gtpo.conflict_mask(responses[rows], mask[rows], A, size, settings.conflict_span)
    if settings.conflict_correction:  # GTPO change 1: lambda of Eq. 9
        weights = gtpo.conflict_weights(conflicts, advantages, settings.conflict_positive_weight)
    # GTPO change 2: delta of Eq. 10 and the penalty gamma <H>_i of Eq. 11
    entropy = gtpo.completion_entropy(token_entropy, mask)
    keep = gtpo.entropy_filter(
        entropy, advantages, initial_entropy, settings.entropy_threshold, settings.entropy_filter
    )
    gamma = settings.gamma * torch.ones_like(advantages)
    if settings.zero_advantage == "skip":  # Eq. 27 and 28
        gamma = gamma * (advantages != 0)
    strength = keep * (advantages - gamma * entropy)  # (B,)
    real = mask.any(1)
    metrics = {
        "gtpo/entropy": entropy[real].mean().item(),
        "gtpo/filtered_fraction": (keep[real] == 0).float().mean().item(),
        "gtpo/conflict_fraction": (conflicts & mask.bool()).sum().item() / max(int(mask.sum()), 1),
        "gtpo/initial_entropy": initial_entropy,
    }
    return strength[:, None] * weights * mask, metrics


@register_trainer("gtpo")
class GTPOTrainer(PPOTrainerSync):
    """verl's synchronous trainer with the token advantages of GTPO, and <H>_ini measured once, before the first update.

    Overrides ``_compute_advantage``, which has whole groups; ``on_train_begin``, ``_save_checkpoint`` and
    ``_load_checkpoint`` for <H>_ini. ValueError for settings that it does not carry, before anything is loaded.
    """

    def __init__(self, config: Any) -> None:
        self.gtpo = read_settings(config)
        self.initial_entropy = self.gtpo.initial_entropy
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # under another name verl takes its asynchronous replay buffer
            config.actor_rollout_ref.actor.policy_loss.loss_mode = "unclipped"
        super().__init__(config)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        if self.initial_entropy is None:
            self.initial_entropy = self._measure_initial_entropy()

    def _measure_initial_entropy(self) -> float:
        """<H>_ini in nats: the mean <H>_i of a completion of each of the first prompts in the order of training."""
        order = itertools.islice(create_rl_sampler(self.config.data, self.train_dataset), PROMPTS)
        rows = collate_fn([self.train_dataset[i] for i in order])
        count = len(rows["raw_prompt"])
        rows["uid"] = np.array([str(uuid.uuid4()) for _ in range(count)], dtype=object)
        rows["__rollout_n__"] = np.array([1] * count, dtype=object)
        prompts = tu.get_tensordict(rows)
        tu.assign_non_tensor_data(prompts, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(prompts)
        self.on_sample_begin()
        batch, _ = self.replay_buffer.sample(self.global_steps, "train", count)
        self.on_sample_end()
        batch = self._compute_old_log_prob(self._balance_batch(batch, {}), {})
        stored = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["response_mask", "entropy"])
        data = stored.to_padded_tensor()
        real = real_rows(batch)
        found = gtpo.completion_entropy(data["entropy"], data["response_mask"])[real].mean().item()
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        self.checkpoint_manager.update_weights(self.global_steps - 1)  # wakes the engines that sample
        if not math.isfinite(found):
            raise ValueError(f"the initial entropy is {found}: the policy gives no finite probabilities.")
        print(f"Initial entropy {found:.4f} nats, {int(real.sum())} completions")
        return found

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        several = [key for key in batch.keys if not key.endswith("_0")]
        if several:
            raise ValueError(f"{several[0]}: a completion of several trajectories, GTPO on verl takes one.")
        batch = super()._compute_advantage(batch, metrics)  # A_i of algorithm.adv_estimator=grpo, on all tokens
        names = ["uid", "responses", "response_mask", "rm_scores", "advantages", "entropy"]
        stored = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=names)
        data = DataProto(batch=stored.to_padded_tensor()).batch
        mask = data["response_mask"] * real_rows(batch)[:, None]
        rewards = data["rm_scores"].sum(1)
        assert self.initial_entropy is not None  # on_train_begin has it
        if not rewards.isfinite().all():
            raise ValueError("a reward is NaN or infinite.")
        found, of_gtpo = token_advantages(
            data["responses"],
            mask,
            data["advantages"].gather(1, mask.argmax(1, keepdim=True))[:, 0],
            rewards,
            data["entropy"],
            np.array(data.pop("uid").tolist(), dtype=object).astype(str),
            self.initial_entropy,
            self.gtpo,
        )
        metrics.update(of_gtpo)
        stored["advantages"] = response_to_nested(found, stored["response_mask"])
        return tq.kv_batch_put(batch.keys, batch.partition_id, fields=stored.select("advantages"))

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).write_text(json.dumps({"initial_entropy": self.initial_entropy}))
        super()._save_checkpoint()  # names the checkpoint last: one that is named has the file

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        if self.global_steps == 0:
            return
        of_mode = {"resume_path": trainer.resume_from_path}
        folder = of_mode.get(trainer.resume_mode) or f"{trainer.default_local_dir}/global_step_{self.global_steps}"
        path = Path(folder, STATE)
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint is not one of GTPO, whose <H>_ini it would store.")
        stored = json.loads(path.read_text(encoding="utf-8"))["initial_entropy"]
        if self.initial_entropy not in (None, stored):
            raise ValueError(f"trainer.gtpo.initial_entropy = {self.initial_entropy}: {path} has {stored}.")
        self.initial_entropy = stored


def real_rows(batch: Any) -> Tensor:
    """Whether a row was sampled: verl fills a batch up with others. Bool, shape (B,)."""
    return torch.tensor([not tag.get("is_padding", False) for tag in batch.tags])
