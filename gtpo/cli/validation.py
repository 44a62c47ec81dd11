"""Checks of settings that TRL or Transformers would fail on later, and the settings that are derived from others.

Derived are the batch sizes, from whole groups, and the evaluation of held-out rows.
"""

import math
import os
from collections.abc import Collection, Mapping
from typing import Any

from gtpo.arguments import ModelArguments, check_eval_batch
from gtpo.errors import UsageError
from gtpo.machine.backend import is_installed

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
    if batch * steps * processes != completions or completions % num_generations:
        raise UsageError(
            f"the batch does not divide into groups: batch size {batch} x accumulation {steps} x {processes} "
            f"process(es) = {batch * steps * processes} completions, and a step needs a multiple of G = "
            f"{num_generations}"
            + (f", {completions} for {prompts_per_step} prompt(s)" if prompts_per_step else "")
            + ": change --per_device_train_batch_size or --gradient_accumulation_steps, or remove both."
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
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
        if values[name] is not None and values[name] < 0:
            raise UsageError(f"--{name} is {values[name]}: expected at least 0.")
    if values["adam_epsilon"] == 0:
        raise UsageError("--adam_epsilon is 0: expected more, or a zero second moment divides 0 by 0.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            raise UsageError(f"--{name} is {values[name]}: expected at least 0 and less than 1.")
    for name in ("seed", "data_seed"):
        if values.get(name) is not None and not 0 <= values[name] < 2**32:
            raise UsageError(f"--{name} is {values[name]}: expected 0 to 4294967295.")
    if values["max_steps"] != -1 and values["max_steps"] < 1:
        raise UsageError(
            f"--max_steps is {values['max_steps']}, which trains nothing: expected at least 1, or -1 for the steps of "
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
    if values["save_total_limit"] is not None and values["save_total_limit"] < 1:
        raise UsageError(f"--save_total_limit is {values['save_total_limit']}: expected at least 1, or nothing.")
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
    if values["push_to_hub"] and not values["hub_token"]:
        from huggingface_hub import get_token

        if get_token() is None:
            raise UsageError("--push_to_hub needs a token of the Hugging Face Hub: `hf auth login` or set HF_TOKEN.")


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
