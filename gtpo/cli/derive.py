"""What follows from other settings: sizes of batches, the evaluation while training, the run directory.

Pure: nothing is read or refused here.
"""

import math
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from gtpo.arguments import Values
from gtpo.files import OUTPUTS

EVALUATIONS = 10  # of a run, unless --eval_steps is given
OF_VLLM = {"vllm_gpu_memory_utilization": "gpu_memory_utilization", "vllm_max_model_length": "max_seq_length"}
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
DERIVED = ("output_dir", *SIZES, "per_device_eval_batch_size", *OF_VLLM)  # unless given


class Earlier(NamedTuple):
    """A run that is resumed."""

    path: Path
    settings: Values
    completions: int  # of a step, in all of its processes
    processes: int


class Facts(NamedTuple):
    """What is not a setting, and settings follow from."""

    method: str  # gtpo, grpo or sft
    model: str
    processes: int  # of this start
    earlier: Earlier | None  # the run that is resumed
    now: str  # the name of a run without one
    fit: Callable[[Values], int | None]  # the largest micro-batch for some settings on this machine, where it is known


class Geometry(NamedTuple):
    """The sizes of a step."""

    batch: int  # per_device_train_batch_size
    steps: int  # gradient_accumulation_steps
    completions: int  # that it should have, in all processes


def derive(values: Values, named: Set[str], facts: Facts) -> tuple[Values, Geometry]:
    """The settings that follow from ``values``, of which the command line has ``named``; the sizes of a step."""
    earlier, processes = facts.earlier, facts.processes
    derived = sizes_elsewhere(earlier, values, processes, named) if earlier else prompts_of(values, processes, named)
    values = values | derived
    geometry = _step(values, named, facts)
    derived |= dict(zip(SIZES, geometry, strict=False))
    derived |= evaluation_settings(values | derived, processes)
    if earlier:
        derived["resume"] = place = str(earlier.path)
    else:
        place = str(run_directory(facts.method, facts.model, values, named, facts.now))
    derived |= {"output_dir": place, "run_name": values["run_name"] or Path(place).name}
    if values.get("use_vllm") and values["vllm_mode"] == "colocate":  # TRL's names for two settings of ours
        derived |= {name: values[name] or values[ours] for name, ours in OF_VLLM.items()}
    return derived, geometry


def _step(values: Values, named: Set[str], facts: Facts) -> Geometry:
    """The sizes of a step; those of a file or preset go where the command line has other groups."""
    batch, steps = map(values.get, SIZES)
    group = values.get("num_generations", 1)
    prompts = values["prompts_per_step"]
    if named & {"num_generations", "prompts_per_step"} and not named & {*SIZES}:
        steps = None  # that of a file is for its groups
        if batch and group * (prompts or 1) / facts.processes % batch:
            batch = None
    if not batch and not steps:
        batch = facts.fit(values)
    return batch_geometry(group, prompts, batch, steps, facts.processes)


def batch_geometry(
    num_generations: int,
    prompts_per_step: int | None = None,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    processes: int = 1,
) -> Geometry:
    """The sizes of a step of whole groups, where there are such: batch * steps * processes = G * prompts per step.

    What is not given is derived; with nothing given a step is one prompt in one micro-batch.
    """
    completions = num_generations * (prompts_per_step or 1)
    if batch_size and accumulation_steps and not prompts_per_step:
        completions = batch_size * accumulation_steps * processes
    batch = batch_size or max(1, completions // (processes * (accumulation_steps or 1)))
    return Geometry(batch, accumulation_steps or max(1, completions // (processes * batch)), completions)


def prompts_of(values: Values, processes: int, named: Set[str]) -> Values:
    """The prompts of a step whose sizes are ``named``: they count, not the prompts of a file or preset."""
    if not values["prompts_per_step"] or not {*SIZES} <= named or "prompts_per_step" in named:
        return {}
    completions = math.prod(values[size] for size in SIZES) * processes
    return {"prompts_per_step": completions // values.get("num_generations", 1) or None}


def sizes_elsewhere(earlier: Earlier, values: Values, processes: int, named: Set[str]) -> Values:
    """The sizes of a run that is resumed with another number of processes, but for those that are ``named``.

    A step and a generation keep their completions, no micro-batch is larger than it was.
    """
    batch = earlier.settings.get("per_device_train_batch_size")
    if earlier.processes == processes or not batch or named & {"num_generations", "prompts_per_step"}:
        return {}
    of_process = earlier.completions // processes
    rows = max(n for n in range(1, batch + 1) if of_process % n == 0)
    if "per_device_train_batch_size" in named:
        rows = values["per_device_train_batch_size"]
    elif "gradient_accumulation_steps" in named:
        rows = max(1, of_process // values["gradient_accumulation_steps"])
    sizes = {
        "prompts_per_step": earlier.completions // values.get("num_generations", 1),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": None,
        "per_device_eval_batch_size": None,
    }
    if steps := earlier.settings.get("steps_per_generation"):
        sizes["steps_per_generation"] = max(1, steps * batch * earlier.processes // (rows * processes))
    return {name: value for name, value in sizes.items() if name not in named}


def evaluation_settings(values: Values, processes: int) -> Values:
    """TRL's settings of the evaluation while training, derived where not given."""
    if values["eval_dataset"] is None and values["eval_rows"] is None:
        return {"per_device_eval_batch_size": values["per_device_eval_batch_size"] or 8}  # TRL's default
    strategy = values["eval_strategy"]
    derived = {"eval_strategy": "steps" if strategy == "no" else strategy}
    if values["eval_steps"] is None and derived["eval_strategy"] == "steps":
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


def run_directory(method: str, model: str, values: Values, named: Set[str], name: str | None = None) -> str | None:
    """The directory of a new run: the given one, or that of its ``run_name``, by default ``name``; None without."""
    other = "run_name" in named and "output_dir" not in named  # than that of the --config
    if values.get("output_dir") and not other:
        return str(values["output_dir"])
    name = values.get("run_name") or name
    if not name:
        return None
    label = (values.get("objective") or method).rpartition(":")[2]
    data = Path(values["dataset"]).name.partition(".")[0]
    return str(OUTPUTS / f"{label}-{Path(model).name}-{data}-{name}")
