"""Every value that is refused, in one place: ranges by setting, then what does not go with other settings.

The ranges of our settings are metadata of their fields (``gtpo/arguments.py``); those of TRL's stand here. torch, TRL
and Transformers refuse others before the first step, or after hours.
"""

import math
import os
import re
from collections.abc import Sequence
from operator import not_
from pathlib import Path

from gtpo.arguments import AT_LEAST_1, NOT_NEGATIVE, Check, Values, check_fields, checks_of
from gtpo.cli.derive import Geometry
from gtpo.cli.flags import Given
from gtpo.cli.resolve import RIVALS, given_of
from gtpo.errors import UsageError

_POSITIVE: Check = (lambda x: 0 < x < math.inf, "more than 0")
_RANGES = {
    NOT_NEGATIVE: "weight_decay max_grad_norm top_k beta epsilon epsilon_high num_completions_to_print",
    (lambda x: 0 <= x <= 1, "0 to 1"): "top_p min_p",
    _POSITIVE: "learning_rate repetition_penalty temperature save_steps num_train_epochs",
    AT_LEAST_1: (
        "max_completion_length per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size "
        "num_generations_eval steps_per_generation num_iterations save_total_limit"
    ),
}
OF_TRL: dict[str, Check] = {name: check for check, names in _RANGES.items() for name in names.split()} | {
    "seed": (lambda x: 0 <= x < 2**32, "0 to 4,294,967,295"),  # of NumPy
    "eval_steps": (_POSITIVE[0], "at least 1, or a share of the run between 0 and 1"),
    "num_generations": (lambda x: 2 <= x <= 4096, "2 to 4,096"),
    "max_steps": (lambda x: x == -1 or 1 <= x <= 10**9, "1 to 1,000,000,000, or -1 for --num_train_epochs"),
    "output_dir": (str.strip, "a directory"),
    "hub_model_id": (re.compile(r"([\w.-]+/)?[\w.-]+").fullmatch, "a name, or owner/name, that the Hub accepts"),
    "model_init_kwargs": (not_, "nothing: --model, --load_in_4bit and --backend load the model"),
    "reward_weights": (
        lambda weights: any(weights) and all(map(math.isfinite, weights)),
        "finite weights, one of them not 0: the rewards would add up to 0",
    ),
    "run_name": (lambda x: x.isprintable() and Path(x).name == x, "a name without slashes and control characters"),
    "resume_from_checkpoint": (not_, "--resume RUN, which continues from the last checkpoint"),
    "save_only_model": (not_, "false, because --resume needs the complete checkpoint"),
    "load_best_model_at_end": (not_, "false, because best/ has the best adapter of every run"),
    "trust_remote_code": (not_, "false: code of a model's author never runs, pick a model of Transformers"),
    "hub_strategy": ("every_save".__eq__, "every_save or nothing: --push_to_hub uploads once, at the end"),
    "hub_always_push": (not_, "false: --push_to_hub uploads once, at the end"),
    "hub_revision": (not_, "nothing: --push_to_hub uploads to the main branch"),
    "save_strategy": ("best".__ne__, "steps or epoch, because best/ has the best adapter of every run"),
}
# Settings that have no effect without held-out rows.
_ONLY_WITH_ROWS = (
    "do_eval eval_split eval_strategy eval_steps eval_delay eval_on_start num_generations_eval metric_for_best_model "
    "greater_is_better"
)


def check_given(
    method: str, classes: Sequence[type], given: Given, file: Given, path: str | None, adapter: Path | None
) -> None:
    """Refuse a value that the command line or a file gives, and two that exclude each other.

    Args:
        method: gtpo, grpo or sft.
        classes: Our dataclasses of settings.
        given: What the command line has.
        file: What the file has.
        path: The file; None for one that has stored every setting, rivals too.
        adapter: From which the training starts.
    """
    values = file.values | given.values
    check_fields(values, checks_of(classes) | OF_TRL)
    refuse_infinite(values)
    if method == "gtpo" and values.get("beta"):
        raise UsageError(f"--beta is {values['beta']}: expected 0, because GTPO has no KL term: train_grpo.py has one.")
    if method != "grpo" and (name := values.get("objective") or "".join(given.late.get("objective", ()))):
        raise UsageError(f"train_{method}.py has its own objective: --objective {name} is for train_grpo.py.")
    for place, settings in ((path, file.values), ("the command line", given.values)):
        for pair in RIVALS if place else ():
            if len(given_of(pair, settings)) > 1:
                raise UsageError(f"{place} has {pair[0]} and {pair[1]}, which exclude each other: remove one of them.")
    for name in ("lora_rank", "lora_target_modules") if adapter else ():
        if name in given.values:
            raise UsageError(f"--{name} is that of the adapter {adapter}: remove it.")


def refuse_infinite(values: Values) -> None:
    """UsageError for the first number that is infinite, or none."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}: expected a finite number.")


def check(values: Values, geometry: Geometry, processes: int, has_gpu: bool, with_unsloth: bool) -> None:
    """Refuse settings that do not go together, that are wrong in silence or that a library would fail on after hours.

    Args:
        values: Every setting.
        geometry: The sizes of a step.
        processes: Of this start.
        has_gpu: Whether the machine of the run has a GPU.
        with_unsloth: Whether Unsloth trains.
    """
    refuse_infinite(values)
    for fault, is_there in (_faults(values, has_gpu, with_unsloth) | _faults_of_method(values)).items():
        if is_there:
            raise UsageError(fault)
    prompt = values["max_prompt_length"]
    completion = values.get("max_completion_length", 0)
    if prompt + completion > values["max_seq_length"]:
        raise UsageError(
            f"prompts of up to {prompt} and completions of up to {completion} tokens exceed --max_seq_length "
            f"{values['max_seq_length']}: lower --max_prompt_length or --max_completion_length, or raise it."
        )
    if values["eval_dataset"] is None and values["eval_rows"] is None:
        for name in _ONLY_WITH_ROWS.split():
            if values.get(name) not in (None, False, "no"):
                raise UsageError(f"--{name} has no effect without held-out rows: add --eval_dataset or --eval_rows.")
    check_batch(geometry, values.get("num_generations", 1), processes)


def check_batch(geometry: Geometry, group: int, processes: int) -> None:
    """Refuse a step that does not consist of whole groups, or has other completions than it should have."""
    batch, steps, completions = geometry
    found = batch * steps * processes
    if found != completions or found % group:
        raise UsageError(
            f"the batch does not divide into groups of G = {group}: --per_device_train_batch_size {batch} x "
            f"--gradient_accumulation_steps {steps} x {processes} process(es) = {found}, expected a multiple of G, and "
            "G x --prompts_per_step where that is given: change one of them, or remove the first two."
        )


def _faults(values: Values, has_gpu: bool, with_unsloth: bool) -> Values:
    """What is wrong with the settings of any method -> whether it is."""
    no_gpu = values["use_cpu"] or not has_gpu
    merges = values["merge"] != "none"
    needs_adapter = values["backend"] == "unsloth" or values["load_in_4bit"] or merges
    return {
        "--packing true packs rows for the attention of a GPU, a CPU would need memory for all of them: remove it.": (
            values.get("packing") and no_gpu
        ),
        "--fp16 needs a GPU, and a CPU would train in float32: remove it, or set --bf16 true.": (
            values["fp16"] and no_gpu
        ),
        "--vllm_mode server needs --backend transformers: Unsloth's engine is in its own process.": (
            values.get("use_vllm") and values["vllm_mode"] == "server" and with_unsloth
        ),
        "--lora_rank 0 has no adapter: set --backend transformers, --load_in_4bit false, --merge none.": (
            values["lora_rank"] == 0 and needs_adapter
        ),
        "--merge does not support DeepSpeed: merge afterwards, --resume RUN --merge 16bit on one GPU.": (
            merges and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        ),
    }


def _faults_of_method(values: Values) -> Values:
    """What is wrong with the settings of GTPO and GRPO -> whether it is."""
    if "num_generations" not in values:
        return {}
    rewards = values["reward"]
    weights = values["reward_weights"] or rewards
    return {
        f"--reward_weights has {len(weights)} weights and --reward {len(rewards)} functions: give each one weight.": (
            len(weights) != len(rewards)
        ),
        "--auto_find_batch_size is for SFT: remove it, the micro-batch is derived from the memory of the GPU.": (
            values["auto_find_batch_size"]
        ),
        "--remove_unused_columns is True: expected false, because the rewards read the columns.": (
            values["remove_unused_columns"]
        ),
    }
