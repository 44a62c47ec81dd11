"""Checks of settings that TRL or Transformers would fail on later; batch sizes and evaluation, from other settings."""

import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from operator import not_
from pathlib import Path

from gtpo.arguments import Check, Values, check_fields
from gtpo.errors import UsageError
from gtpo.files import read_yaml

LARGEST = sys.float_info.max
EVALUATIONS = 10  # of a run, unless --eval_steps is given


def _is_within(
    value: float,
    at_least: float = -LARGEST,
    at_most: float = LARGEST,
    above: float = -math.inf,
    also: float | None = None,
) -> bool:
    return value == also or (at_least <= value <= at_most and value > above)


CHECKS: dict[str, Check] = {  # and the ranges of checks.yaml
    "output_dir": (lambda x: x.strip(), "a directory"),
    "hub_model_id": (
        re.compile(r"([\w.-]+/)?[\w.-]+").fullmatch,
        "a name, or owner/name, that the Hub accepts",
    ),  # of the upload at the end
    "lora_target_modules": (
        lambda names: names == ["all-linear"] or (names and not {"all-linear", "lm_head"} & set(names)),
        "modules such as q_proj, without lm_head, or all-linear alone",
    ),
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
    "save_strategy": (lambda x: x != "best", "steps or epoch, because best/ has the best adapter of every run"),
}
for _expected, _rule in read_yaml(Path(__file__).with_name("checks.yaml")).items():
    _names = _rule.pop("settings")
    CHECKS |= dict.fromkeys(_names, (partial(_is_within, **_rule), _expected))
RIVALS = (  # settings that exclude each other
    ("max_steps", "num_train_epochs"),
    ("generation_batch_size", "steps_per_generation"),
)
LEAVES_IT = {"max_steps": -1}  # the value of a setting that leaves it to its rival; of the others that of the preset
# Settings that have no effect without held-out rows.
_ONLY_WITH_ROWS = (
    "do_eval eval_split eval_strategy eval_steps eval_delay eval_on_start num_generations_eval metric_for_best_model "
    "greater_is_better"
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
    """
    completions = num_generations * (prompts_per_step or 1)
    if batch_size and accumulation_steps and not prompts_per_step:
        completions = batch_size * accumulation_steps * processes
    batch = batch_size or max(1, completions // (processes * (accumulation_steps or 1)))
    steps = accumulation_steps or max(1, completions // (processes * batch))
    found = batch * steps * processes
    if found != completions or found % num_generations:
        raise UsageError(
            f"the batch does not divide into groups of G = {num_generations}: --per_device_train_batch_size {batch} x "
            f"--gradient_accumulation_steps {steps} x {processes} process(es) = {found}, expected a multiple of G, and "
            "G x --prompts_per_step where that is given: change one of them, or remove the first two."
        )
    return batch, steps


def settle_rivals(of_file: Values, of_line: Values, plain: Values, file: str | None) -> None:
    """Unset, in ``of_file``, the rival of each setting that the command line, or else the file, gives.

    Args:
        of_file: The settings of a file.
        of_line: Those of the command line; the values may be words.
        plain: The values of all settings without both.
        file: The name of the file; None for the settings that a run has stored, which have both.

    Raises:
        UsageError: If one of the two gives settings that exclude each other.
    """
    for pair in RIVALS:
        in_file, on_line = (_given_of(pair, settings) for settings in (of_file, of_line))
        for place, names in ((file, in_file), ("the command line", on_line)):
            if place and len(names) > 1:
                raise UsageError(f"{place} has {pair[0]} and {pair[1]}, which exclude each other: remove one of them.")
        counts = on_line or in_file
        for rival in {*pair} - {*counts} if counts else ():
            of_file[rival] = LEAVES_IT.get(rival, plain[rival])


def _given_of(names: Sequence[str], settings: Values) -> list[str]:
    """Those of some settings that have a value, and do not leave it to their rival."""
    found = []
    for name in names:
        value = settings.get(name)
        if value is not None and str(value) != str(LEAVES_IT.get(name)):
            found.append(name)
    return found


def check_values(values: Values, has_gpu: bool, with_unsloth: bool) -> None:
    """Refuse values that are wrong in silence, or that TRL and Transformers would fail on after hours."""
    check_fields(values, CHECKS)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}: expected a finite number.")
    no_gpu = values["use_cpu"] or not has_gpu
    merges = values["merge"] != "none"
    needs_adapter = values["backend"] == "unsloth" or values["load_in_4bit"] or merges
    faults = _of_method(values) | {
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
    for fault, is_there in faults.items():
        if is_there:
            raise UsageError(fault)
    prompt = values["max_prompt_length"]
    completion = values.get("max_completion_length", 0)
    if prompt + completion > values["max_seq_length"]:
        raise UsageError(
            f"prompts of up to {prompt} and completions of up to {completion} tokens exceed --max_seq_length "
            f"{values['max_seq_length']}: lower --max_prompt_length or --max_completion_length, or raise it."
        )


def _of_method(values: Values) -> Values:
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


def evaluation_settings(values: Values, processes: int) -> Values:
    """TRL's settings of the evaluation while training, derived where not given."""
    if values["eval_dataset"] is None and values["eval_rows"] is None:
        for name in _ONLY_WITH_ROWS.split():
            if values.get(name) not in (None, False, "no"):
                raise UsageError(f"--{name} has no effect without held-out rows: add --eval_dataset or --eval_rows.")
        return {"per_device_eval_batch_size": values["per_device_eval_batch_size"] or 8}  # TRL's default
    strategy = values["eval_strategy"]
    derived = {"eval_strategy": "steps" if strategy == "no" else strategy}
    if values["eval_steps"] is None and str(derived["eval_strategy"]) == "steps":
        derived["eval_steps"] = 1 / EVALUATIONS
    batch = values["per_device_train_batch_size"]
    metric = "eval_loss"
    if "num_generations" in values:
        group = values["num_generations_eval"] or 1
        unit = group // math.gcd(group, processes)
        batch = math.ceil(batch / unit) * unit
        derived["num_generations_eval"] = group
        metric = "eval_reward"
        if "accuracy" in values.get("reward", ()):
            metric = "eval_accuracy"
    derived["per_device_eval_batch_size"] = values["per_device_eval_batch_size"] or batch
    derived["metric_for_best_model"] = values["metric_for_best_model"] or metric
    return derived
