"""Checks of settings that TRL or Transformers would fail on later, and the batch sizes of whole groups."""

import math
import os
from collections.abc import Mapping
from typing import Any

from gtpo.arguments import ModelArguments
from gtpo.backend import is_installed
from gtpo.errors import UsageError


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
