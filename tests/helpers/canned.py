"""Trainers on canned completions: the same groups for any batch size, process count and trainer class.

torchrun also runs this file as a script: it trains and saves the trained weights of rank 0.
"""

import argparse
import copy
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from helpers.files import write_json
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import gtpo_trl
from examples.objectives.rloo import RLOO
from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, RunArguments, Settings
from gtpo.processes import leave
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

GROUP = 12
FILTER = {"entropy_threshold": 5.22}  # of GTPO: among the entropies of the model with one layer
PREFIX = [300, 301, 302]
SUFFIX = [310, 311, 2]  # 2 is </s>


def canned_group(step: int, size: int = GROUP) -> list[list[int]]:
    """Completions of very different lengths that share prefixes and suffixes, some only in part."""
    generator = random.Random(step)
    group = []
    for row in range(size):
        middle = [generator.randrange(300, 320) for _ in range(generator.choice([0, 1, 3, 9, 17]))]
        prefix = PREFIX[: 3 if row % 3 else generator.randrange(3)]
        suffix = SUFFIX if row % 4 else [generator.randrange(300, 320), *SUFFIX[1:]]
        group.append([*prefix, *middle, *suffix])
    return group


def reward_parity(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward with both signs and ties, computed from the token ids only."""
    return [float(sum(ids) % 3) for ids in completion_ids]


def canned_advantages() -> torch.Tensor:
    """A_i of the first canned group by ``reward_parity``."""
    rewards = torch.tensor(reward_parity(None, canned_group(0)))
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


class _Canned:
    """Mixin: ``_generate_single_turn`` returns the step's canned group; each process gets its share."""

    def _generate_single_turn(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_generations") == 1:  # the measurement of the initial entropy
            return [canned_group(step=1000, size=len(prompt_ids))[i] for i in range(len(prompt_ids))], None
        if not self.model.training and self.eval_dataset:  # held-out rows: a completion for each prompt
            return [canned_group(step=sum(ids), size=1)[0] for ids in prompt_ids], None
        group = canned_group(self.state.global_step)
        first = self.accelerator.process_index * len(prompt_ids)
        return group[first : first + len(prompt_ids)], None


class CannedGTPO(_Canned, GTPOTrainer):
    pass


class CannedGRPO(_Canned, GRPOTrainer):
    pass


class CannedTRL(_Canned, trl.GRPOTrainer):
    pass


class CannedExample(_Canned, gtpo_trl.GTPOTrainer):
    pass


class CannedRLOO(CannedGRPO, RLOO):
    """Other advantages, by their hook."""


TRAINERS = {"rloo": CannedRLOO, "gtpo": CannedGTPO, "grpo": CannedGRPO, "trl": CannedTRL, "gtpo_trl": CannedExample}


@lru_cache(4)
def _load(model_dir: str | Path, *written: int) -> Any:
    """The model, which is to be copied: a quarter of the time; ``written``: when its files were."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def make_trainer(
    method: str,
    model_dir: str | Path,
    output_dir: str | Path,
    gtpo: dict[str, Any] | None = None,
    target_modules: Sequence[str] | str | None = ("q_proj", "v_proj"),
    trainer_settings: dict[str, Any] | None = None,
    held_out: int = 0,
    rewards: Sequence[Any] = (reward_parity,),
    **settings: Any,
) -> Any:
    """A trainer with one prompt per step and plain SGD: a weight's update is the learning rate times its gradient.

    Args:
        method: gtpo, grpo, trl or gtpo_trl.
        model_dir, output_dir: The tiny model, and the run directory.
        gtpo: Fields of GTPOArguments; other methods ignore it.
        target_modules: Modules that get a LoRA adapter; None trains the full model.
        trainer_settings: Further arguments of the trainer.
        held_out: Number of held-out rows, whose completions depend on the prompt only.
        rewards: The reward functions.
        settings: Fields of GRPOConfig.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    written = sorted(path.stat().st_mtime_ns for path in Path(model_dir).iterdir())
    model = copy.deepcopy(_load(model_dir, *written))
    with torch.no_grad():
        model.lm_head.weight *= 6  # an untrained policy is almost uniform; this spreads the entropies
    if target_modules is not None:
        names = target_modules if isinstance(target_modules, str) else list(target_modules)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "shuffle_dataset": False,
        "max_steps": 1,
        "learning_rate": 0.03,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "max_completion_length": 32,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    # The entropies of the first two groups lie on both sides of this threshold, none within 0.01 nats.
    method_settings = {"initial_entropy": 0.1, "entropy_threshold": 5.05} | (gtpo or {})
    extra = dict(trainer_settings or {})
    prompts: list[Any] = [f"Question {i}?" + " Why?" * (i % 3) for i in range(8)]
    held_out_prompts: list[Any] = [f"Held out {i}?" for i in range(held_out)]
    if method == "gtpo":
        extra["gtpo"] = GTPOArguments(**method_settings)
    if method == "gtpo_trl":
        defaults |= method_settings
    config = gtpo_trl.GTPOConfig if method == "gtpo_trl" else trl.GRPOConfig
    return TRAINERS[method](
        model=model,
        reward_funcs=list(rewards),
        args=config(output_dir=str(output_dir), **(defaults | settings)),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": held_out_prompts}) if held_out else None,
        **extra,
    )


def batch_of(trainer: Any, *prompts: int, size: int = GROUP, training: bool = True) -> dict[str, torch.Tensor]:
    """The scored batch of a step on these rows of the data, equally many completions each, before TRL shuffles it."""
    trainer.model.train(training)
    trainer.current_gradient_accumulation_steps = 1
    prompts = prompts or (0,)
    rows = [trainer.train_dataset[prompt] for prompt in prompts for _ in range(size // len(prompts))]
    return trainer._generate_and_score_completions(rows)


def settings_of(trainer: Any) -> Settings:
    """The settings of a canned trainer, for ``attach_callbacks``."""
    return Settings("gtpo", DataArguments(dataset="own"), ModelArguments(), RunArguments(), trainer=trainer.args)


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Train, and return the adapter's weights by name, gathered where FSDP2 cut them."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for name, w in trained.items()}


def weight_changes(trainer: Any) -> torch.Tensor:
    """What training adds to the trained weights, all of them in one vector."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return torch.cat([(weight - before[name]).flatten() for name, weight in trained_weights(trainer).items()])


def assert_same(left: torch.Tensor, right: torch.Tensor, differs: bool = False) -> None:
    """The same changes of weights, up to the rounding of three steps; or others."""
    gap = ((left - right).norm() / right.norm()).item()
    tolerance = 3 * 100 * torch.finfo(torch.float32).eps  # three steps, each a float32 sum over some 100 tokens
    assert (gap > 10 * tolerance) if differs else (gap <= tolerance), gap


def sharded_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """The gradient of the first step with the model sharded by FSDP2; each process has its rows of the group.

    Accelerate supports FSDP only on accelerators, so this calls PyTorch's ``fully_shard``, as Accelerate does.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (trainer.accelerator.num_processes,))
    for layer in trainer.model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    batch = batch_of(trainer, size=trainer.args.per_device_train_batch_size)
    trainer.compute_loss(trainer.model, batch).backward()
    head = trainer.model.get_base_model().lm_head.weight
    assert type(head).__name__ == "DTensor" and len(head.to_local()) < len(head), "the head was not cut"
    return {name: w.grad.full_tensor() for name, w in trainer.model.named_parameters() if w.requires_grad}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("runs", type=json.loads, help="a list of name, method, settings and whether it is sharded")
    arguments = parser.parse_args()
    out = arguments.output_dir
    for each in arguments.runs:  # trained one after the other
        trainer = make_trainer(each["method"], arguments.model_dir, out, **each["settings"])
        weights = (sharded_gradients if each["is_sharded"] else trained_weights)(trainer)
        if trainer.accelerator.is_main_process:
            assert trainer.accelerator.num_processes > 1, "torchrun started one process only"
            save_file(weights, out / f"weights-{each['name']}.safetensors")
            write_json(out / f"log-{each['name']}.json", trainer.state.log_history)
            kinds = {name: type(weight).__name__ for name, weight in trainer.model.named_parameters()}
            write_json(out / f"parameters-{each['name']}.json", kinds)
    leave(0)
