"""The evaluation of held-out rows while training: its settings and its batches."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from gtpo.errors import UsageError

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
    derived = _checked(values, given)
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


def _checked(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
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


def check_eval_batch(batch_size: int, group_size: int, processes: int) -> None:
    """Refuse batches that are not made of whole groups.

    Raises:
        UsageError: If a number is below 1, or the groups do not divide the batch.
    """
    if min(batch_size, group_size) < 1:
        name, value = (
            ("per_device_eval_batch_size", batch_size) if batch_size < 1 else ("num_generations_eval", group_size)
        )
        raise UsageError(f"--{name} is {value}: expected at least 1.")
    if batch_size * processes % group_size:
        raise UsageError(
            f"an evaluation has batches of whole groups: --per_device_eval_batch_size {batch_size} x {processes} "
            f"process(es) = {batch_size * processes} is no multiple of --num_generations_eval {group_size}."
        )


def eval_batches(rows: int, group_size: int, batch_size: int, processes: int, rank: int) -> list[tuple[list[int], int]]:
    """The rows that one process evaluates, G times each, batch by batch; with each batch its prompts in all processes.

    A batch consists of whole groups, split evenly and in rank order. Prompts that are left over and cannot be split
    evenly go to every process: these have a group in each, and count once.
    """
    unit = processes // math.gcd(group_size, processes)  # prompts whose completions divide evenly
    even, prompts = rows - rows % unit, batch_size * processes // group_size
    batches = []
    for start in range(0, even, prompts):
        stop = min(start + prompts, even)
        repeated = [row for row in range(start, stop) for _ in range(group_size)]
        share = len(repeated) // processes
        batches.append((repeated[rank * share : (rank + 1) * share], stop - start))
    if rows > even:
        batches.append(([row for row in range(even, rows) for _ in range(group_size)], rows - even))
    return batches
