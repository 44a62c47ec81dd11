"""Checks of settings that TRL or Transformers would fail on later, and the settings that are derived from others.

Derived are the batch sizes, from whole groups, and the evaluation of held-out rows.
"""

import argparse
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo.arguments import AT_LEAST_1, NOT_NEGATIVE, Check, check_eval_batch, check_fields
from gtpo.errors import UsageError
from gtpo.models.backend import gpu_is_available, is_installed, plans_unsloth

EVALUATIONS = 10  # of a run, unless --eval_steps is given
_SEED: Check = (lambda x: 0 <= x < 2**32, "0 to 4,294,967,295")
_SHARE: Check = (lambda x: 0 <= x <= 1, "0 to 1")
_BELOW_1: Check = (lambda x: 0 <= x < 1, "at least 0 and less than 1")
_ABOVE_0: Check = (lambda x: x > 0, "more than 0")
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "top_k", "beta"), NOT_NEGATIVE),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("top_p", "min_p"), _SHARE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _BELOW_1),
    **dict.fromkeys(("adam_epsilon", "repetition_penalty", "temperature"), _ABOVE_0),
    **dict.fromkeys(("steps_per_generation", "save_total_limit", "num_iterations"), AT_LEAST_1),
    "max_completion_length": AT_LEAST_1,
    **dict.fromkeys(("epsilon", "epsilon_high"), NOT_NEGATIVE),
    "save_steps": _ABOVE_0,
    "logging_steps": NOT_NEGATIVE,
    "output_dir": (lambda x: x.strip(), "a directory"),
    "vllm_mode": (lambda x: x in ("colocate", "server"), "colocate or server"),
    "num_generations": (lambda x: 2 <= x <= 4096, "2 to 4,096"),
    "lora_rank": (lambda x: 0 <= x <= 4096, "0 to 4,096"),
    "dataloader_num_workers": (lambda x: 0 <= x <= 1024, "0 to 1,024"),
    "max_steps": (lambda x: x == -1 or 1 <= x <= 10**9, "1 to 1,000,000,000, or -1 for --num_train_epochs"),
    "eval_steps": (lambda x: x > 0, "at least 1, or a share of the run between 0 and 1"),
    "run_name": (lambda x: x.isprintable() and Path(x).name == x, "a name without slashes and control characters"),
    "resume_from_checkpoint": (lambda x: not x, "--resume RUN, which continues from the last checkpoint"),
    "save_only_model": (lambda x: not x, "false, because --resume needs the complete checkpoint"),
    "load_best_model_at_end": (lambda x: not x, "false, because best/ has the best adapter of every run"),
    "save_strategy": (lambda x: x != "best", "steps or epoch, because best/ has the best adapter of every run"),
}
_ONLY_WITH_ROWS = (  # settings that have no effect without held-out rows
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "num_generations_eval"),
    *("metric_for_best_model", "greater_is_better"),
)


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
    completions = num_generations * (prompts_per_step or 1)
    if batch_size and accumulation_steps and not prompts_per_step:
        completions = batch_size * accumulation_steps * processes
    batch = batch_size or max(1, completions // (processes * (accumulation_steps or 1)))
    steps = accumulation_steps or max(1, completions // (processes * batch))
    found = batch * steps * processes
    if found != completions or found % num_generations:
        is_chosen = batch_size and accumulation_steps and not prompts_per_step
        expected = (
            "a multiple of G" if is_chosen else f"the {completions} completions of a step, G x --prompts_per_step"
        )
        raise UsageError(
            f"the batch does not divide into groups of G = {num_generations}: --per_device_train_batch_size {batch} x "
            f"--gradient_accumulation_steps {steps} x {processes} process(es) = {found}, expected {expected}: change "
            "one of them, or remove the first two."
        )
    return batch, steps


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that TRL or Transformers would fail on later."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}: expected a finite number.")
    check_fields(argparse.Namespace(**values), CHECKS)
    if values["fsdp"] and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise UsageError(
            "--fsdp needs several processes: accelerate launch --config_file configs/accelerate/fsdp2.yaml."
        )
    if values.get("sync_ref_model") and not (values["beta"] and values["lora_rank"] == 0):
        raise UsageError("--sync_ref_model needs a separate reference model: --beta above 0 and --lora_rank 0.")
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
                f"--{flag} {str(values[flag]).lower()} needs {package}, which is not installed: `pip install -r "
                f"requirements.txt`, or --{flag} {other}."
            )
    if values["backend"] == "transformers" and values.get("use_vllm") and values["load_in_4bit"]:
        raise UsageError(  # https://github.com/huggingface/trl/issues/4973
            "TRL cannot sync 4-bit weights to vLLM: use --backend unsloth, --load_in_4bit false or --use_vllm false."
        )
    if values.get("use_vllm") and values["vllm_mode"] == "server" and _trains_with_unsloth(values):
        raise UsageError(
            "--vllm_mode server does not work with the backend unsloth, whose engine is in the training process: use "
            "--vllm_mode colocate, or --backend transformers --load_in_4bit false."
        )
    needs_adapter = values["backend"] == "unsloth" or values["load_in_4bit"] or values["merge"] != "none"
    if values["lora_rank"] == 0 and needs_adapter:
        raise UsageError(
            "--lora_rank 0 trains all weights, without an adapter: set --backend transformers, --load_in_4bit false, "
            "--merge none."
        )
    rewards, weights = values.get("reward"), values.get("reward_weights")
    if rewards is not None and weights is not None and len(weights) != len(rewards):
        raise UsageError(f"--reward_weights has {len(weights)} values for {len(rewards)} rewards: name one for each.")
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


def _trains_with_unsloth(values: Mapping[str, Any]) -> bool:
    """Also for a plan made where there is no GPU."""
    return plans_unsloth(values) and (values["dry_run"] or gpu_is_available())


def _check_reporters(reporters: Sequence[str] | str) -> None:
    from transformers.integrations import get_available_reporting_integrations

    known = [*get_available_reporting_integrations(), "all", "none"]
    for name in [reporters] if isinstance(reporters, str) else reporters or []:
        if name not in known:
            raise UsageError(f"--report_to {name!r} is unknown or not installed: expected one of {', '.join(known)}.")


def evaluation_settings(values: Mapping[str, Any], given: Collection[str], processes: int) -> dict[str, Any]:
    """TRL's settings of the evaluation while training, derived where not given.

    Args:
        values: Every setting; None for ``per_device_eval_batch_size`` that is not given.
        given: Names on the command line.
        processes: Processes of the run.

    Raises:
        UsageError: If a setting has no effect, or groups do not divide.
    """
    if values["eval_dataset"] is None and values["eval_rows"] is None:
        for name in _ONLY_WITH_ROWS:
            if values.get(name) not in (None, False, "no"):
                raise UsageError(f"--{name} has no effect without held-out rows: add --eval_dataset or --eval_rows.")
        return {"per_device_eval_batch_size": values["per_device_eval_batch_size"] or 8}  # TRL's default
    if values["eval_strategy"] == "no" and "eval_strategy" in given:
        raise UsageError("--eval_strategy no never evaluates the held-out rows: remove it, or the held-out rows.")
    strategy, steps = "steps" if values["eval_strategy"] == "no" else str(values["eval_strategy"]), values["eval_steps"]
    if strategy == "epoch" and steps is not None:
        raise UsageError("--eval_steps has no effect with --eval_strategy epoch: remove one of them.")
    derived = {
        "eval_strategy": strategy,
        "eval_steps": steps if strategy == "epoch" or steps is not None else 1 / EVALUATIONS,
    }
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
