"""Checks of settings that TRL or Transformers would fail on later, and the settings that are derived from others.

Derived are the batch sizes, from whole groups, and the evaluation of held-out rows.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo.arguments import ModelArguments, check_eval_batch
from gtpo.errors import UsageError, nearest
from gtpo.machine.backend import is_installed

MOST_STEPS = 10**9
RANGES: dict[str, tuple[float, float]] = {  # inclusive
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "seed": (0, 2**32 - 1),
    "data_seed": (0, 2**32 - 1),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "lora_rank": (0, 4096),
    "num_generations": (2, 4096),
    "steps_per_generation": (1, math.inf),
    "logging_steps": (0, math.inf),
    "save_total_limit": (1, math.inf),
    "dataloader_num_workers": (0, 1024),
}
EVALUATIONS = 10  # of a run, unless --eval_steps is given
_ONLY_WITH_ROWS = {  # setting -> its value without held-out rows
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_delay": 0,
    "eval_on_start": False,
    "num_generations_eval": None,
    "per_device_eval_batch_size": 8,  # TRL's default
    "metric_for_best_model": None,
    "greater_is_better": None,
    "early_stopping_patience": None,
}


def batch_geometry(
    num_generations: int,
    prompts_per_step: int | None = None,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    processes: int = 1,
) -> tuple[int, int]:
    """(per_device_train_batch_size, gradient_accumulation_steps) of steps that consist of whole groups.

    batch size * accumulation * processes = G * prompts per step. What is not given is derived; with nothing given a
    step is one prompt in one micro-batch.

    Raises:
        UsageError: If a number is below 1, or they do not divide.
    """
    given = {
        "prompts_per_step": prompts_per_step,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: expected at least 1.")
    if batch_size and accumulation_steps and not prompts_per_step:
        completions = batch_size * accumulation_steps * processes
    else:
        completions = num_generations * (prompts_per_step or 1)
    batch = batch_size or max(1, completions // (processes * (accumulation_steps or 1)))
    steps = accumulation_steps or max(1, completions // (processes * batch))
    if completions % num_generations:
        raise UsageError(
            f"the batch does not divide into groups: a step has {completions} completions (batch size {batch} x "
            f"accumulation {steps} x {processes} process(es)) and needs a multiple of G = {num_generations}: change "
            "--per_device_train_batch_size or --gradient_accumulation_steps, or remove both."
        )
    if batch * steps * processes != completions:
        sizes = [size for size in range(1, completions + 1) if completions % (size * processes) == 0]
        if not sizes:
            raise UsageError(
                f"the batch does not divide into groups: {processes} processes cannot share the {completions} "
                "completions of a step: change --prompts_per_step."
            )
        raise UsageError(
            f"the batch does not divide into groups: a step has {completions} completions (G = {num_generations}) in "
            f"{processes} process(es), so --per_device_train_batch_size is one of {', '.join(map(str, sizes))}"
            + (f", not {batch}." if accumulation_steps is None else f", not {batch} x accumulation {steps}.")
        )
    return batch, steps


def typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that TRL or Transformers would fail on later."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}: expected a finite number.")
    for name, (least, most) in RANGES.items():
        given = values.get(name)
        if given is not None and not least <= given <= most:
            expected = f"at least {least:,}" if most == math.inf else f"{least:,} to {most:,}"
            raise UsageError(f"--{'G' if name == 'num_generations' else name} is {given}: expected {expected}.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            raise UsageError(f"--{name} is {values[name]}: expected at least 0 and less than 1.")
    for name in ("adam_epsilon", "repetition_penalty"):
        if values.get(name) is not None and values[name] <= 0:
            raise UsageError(f"--{name} is {values[name]}: expected more than 0.")
    if values["resume_from_checkpoint"]:
        raise UsageError("--resume_from_checkpoint is not supported: --resume RUN continues from the last checkpoint.")
    if values["save_only_model"]:
        raise UsageError("--save_only_model leaves out of a checkpoint what --resume needs: remove it.")
    if values["fsdp"] and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise UsageError(
            "--fsdp needs several processes: accelerate launch --config_file configs/accelerate/fsdp2.yaml."
        )
    if values.get("sync_ref_model") and not (values["beta"] and values["lora_rank"] == 0):
        raise UsageError("--sync_ref_model needs a reference model of its own: --beta above 0 and --lora_rank 0.")
    if values["max_steps"] != -1 and not 1 <= values["max_steps"] <= MOST_STEPS:
        raise UsageError(
            f"--max_steps is {values['max_steps']}: expected 1 to {MOST_STEPS:,}, or -1 for the steps of "
            "--num_train_epochs."
        )
    if values["max_steps"] == -1 and values["num_train_epochs"] <= 0:
        raise UsageError(f"--num_train_epochs is {values['num_train_epochs']}: expected more than 0.")
    optim = str(values["optim"])
    needed = {
        ("optim", "bitsandbytes", "adamw_torch"): not optim.startswith("adamw_torch")  # adamw_torch_8bit is torchao's
        and bool({"bnb", "8bit", "paged"} & set(optim.split("_"))),
        ("use_vllm", "vllm", "false"): values.get("use_vllm", False),
    }
    for (flag, package, other), is_needed in needed.items():
        if is_needed and not values["dry_run"] and not is_installed(package):
            raise UsageError(
                f"--{flag} {typed(values[flag])} needs {package}, which is not installed: `pip install -r "
                f"requirements.txt`, or --{flag} {other}."
            )
    if values["backend"] == "transformers" and values.get("use_vllm") and values["load_in_4bit"]:
        raise UsageError(  # https://github.com/huggingface/trl/issues/4973
            "TRL cannot sync 4-bit weights to vLLM: use --backend unsloth, --load_in_4bit false or --use_vllm false."
        )
    if values["lora_rank"] == 0:
        for name, conflicts, other in (
            ("backend", "unsloth", "transformers"),
            ("load_in_4bit", True, "false"),
            ("merge", "16bit", "none"),
        ):
            if values[name] == conflicts:
                raise UsageError(f"--lora_rank 0 trains all weights, without an adapter: set --{name} {other}.")
        if values["lora_target_modules"] != ModelArguments().lora_target_modules:
            raise UsageError("--lora_rank 0 trains all weights, without an adapter: remove --lora_target_modules.")
    rewards, weights = values.get("reward"), values.get("reward_weights")
    if rewards is not None and weights is not None and len(weights) != len(rewards):
        raise UsageError(f"--reward_weights has {len(weights)} values for {len(rewards)} rewards: name one for each.")
    name = values["run_name"]
    if name and not (name.isprintable() and Path(name).name == name):
        raise UsageError(f"--run_name is {name!r}: expected a name without slashes and control characters.")
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # set by accelerate launch
    if (deepspeed or values["deepspeed"]) and not is_installed("deepspeed"):
        raise UsageError("DeepSpeed is not installed: pip install deepspeed, or use configs/accelerate/fsdp2.yaml.")
    if values["merge"] != "none" and deepspeed:
        raise UsageError("--merge does not support DeepSpeed: merge afterwards, --resume RUN --merge 16bit on one GPU.")
    lengths = [values[name] for name in ("max_prompt_length", "max_completion_length") if name in values]
    if sum(lengths) > values["max_seq_length"]:
        raise UsageError(
            f"prompts of up to {lengths[0]} tokens and completions of up to {sum(lengths[1:])} exceed max_seq_length "
            f"{values['max_seq_length']}: lower --max_prompt_length or --max_completion_length, or raise "
            "--max_seq_length."
        )
    _check_reporters(values["report_to"])
    if values["push_to_hub"] and not values["hub_token"]:
        from huggingface_hub import get_token

        if get_token() is None:
            raise UsageError("--push_to_hub needs a token of the Hugging Face Hub: `hf auth login` or set HF_TOKEN.")


def _check_reporters(reporters: Sequence[str] | str) -> None:
    from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

    known = {*INTEGRATION_TO_CALLBACK, "all", "none"}
    for name in [reporters] if isinstance(reporters, str) else reporters or []:
        if name not in known:
            raise UsageError(f"--report_to {name!r} is unknown{nearest(name, known)}: wandb, tensorboard, none, ...")
        if name not in {*get_available_reporting_integrations(), "all", "none"}:
            raise UsageError(
                f"--report_to {name} needs a package that is not installed: `pip install {name}`, or none."
            )


def evaluation_settings(values: Mapping[str, Any], given: Collection[str], processes: int) -> dict[str, Any]:
    """TRL's settings of the evaluation while training, derived where not given.

    Args:
        values: Every setting; None for ``per_device_eval_batch_size`` that is not given.
        given: Names on the command line.
        processes: Processes of the run.

    Raises:
        UsageError: If a setting has no effect, or groups do not divide.
    """
    if values["load_best_model_at_end"] or values["save_strategy"] == "best":
        name = "load_best_model_at_end" if values["load_best_model_at_end"] else "save_strategy best"
        raise UsageError(f"--{name} is not supported: best/ has the best adapter of every run; remove it.")
    if values["eval_dataset"] is None and values["eval_rows"] is None:
        for name, default in _ONLY_WITH_ROWS.items():
            if values.get(name) not in (None, default):
                raise UsageError(f"--{name} has no effect without held-out rows: add --eval_dataset or --eval_rows.")
        return {"per_device_eval_batch_size": _ONLY_WITH_ROWS["per_device_eval_batch_size"]}
    derived = _evaluation_schedule(values, given)
    batch = values["per_device_eval_batch_size"]
    if "num_generations" in values:
        group = 1 if values["num_generations_eval"] is None else values["num_generations_eval"]
        unit = group // math.gcd(group, processes) if group > 0 else 1
        batch = batch or -(-values["per_device_train_batch_size"] // unit) * unit
        check_eval_batch(batch, group, processes)
        derived["num_generations_eval"] = group
        metric = "eval_accuracy" if "accuracy" in values.get("reward", ()) else "eval_reward"
    else:
        metric = "eval_loss"
    return derived | {
        "per_device_eval_batch_size": batch or values["per_device_train_batch_size"],
        "metric_for_best_model": values["metric_for_best_model"] or metric,
    }


def _evaluation_schedule(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """``eval_strategy`` and ``eval_steps``, derived where not given.

    Raises:
        UsageError: For values that contradict each other or are out of range.
    """
    if values["eval_strategy"] == "no" and "eval_strategy" in given:
        raise UsageError("--eval_strategy no never evaluates the held-out rows: remove it, or the held-out rows.")
    strategy = "steps" if values["eval_strategy"] == "no" else str(values["eval_strategy"])
    steps, patience = values["eval_steps"], values["early_stopping_patience"]
    if strategy == "epoch" and steps is not None:
        raise UsageError("--eval_steps has no effect with --eval_strategy epoch: remove one of them.")
    if steps is not None and steps <= 0:
        raise UsageError(f"--eval_steps is {steps:g}: expected at least 1, or a share of the run between 0 and 1.")
    if patience is not None and patience < 1:
        raise UsageError(f"--early_stopping_patience is {patience}: expected at least 1 evaluation.")
    return {
        "eval_strategy": strategy,
        "eval_steps": steps if strategy == "epoch" or steps is not None else 1 / EVALUATIONS,
    }
