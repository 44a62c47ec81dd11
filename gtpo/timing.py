"""The time of a training step on a CPU, measured on its first micro-batches: a part of ``--dry_run``."""

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import SFTTrainer

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.data import drop_long_prompts
from gtpo.hub import is_cached
from gtpo.memory import steps_of
from gtpo.models import load_policy
from gtpo.trainer import GRPOTrainer, GTPOTrainer

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 200  # of the data set, to draw a step from


def describe_time(settings: Settings, rows: "Dataset", rewards: Sequence[Any] = ()) -> str:
    """Seconds per step and hours of the run as a YAML comment, measured where model and rows are on this machine.

    The first micro-batch includes the generation of the whole step; the second one is the rest of the step's.

    Args:
        settings: All settings of the run.
        rows: The training rows; without text where the data set is on the Hub only.
        rewards: The reward functions; none for SFT.

    Returns:
        The comment; nothing for a run on a GPU and for the tiny model, whose steps take less than a second.
    """
    model = MODEL_ALIASES.get(settings.model.model, settings.model.model)
    if not settings.trainer.use_cpu or model == "tiny":
        return ""
    if not (Path(model).is_dir() or is_cached(model)):
        return f"# time per step: not measured, {model} is not on this machine\n"
    if not len(rows) or not rows[0]["prompt"]:
        return "# time per step: not measured, the data set is not on this machine (--data_dir)\n"
    parts = settings.trainer.gradient_accumulation_steps
    with tempfile.TemporaryDirectory() as directory:
        args = copy.copy(settings.trainer)
        args.output_dir, args.report_to, args.eval_strategy = directory, [], "no"
        seconds = _time_micro_batches(settings, args, rows, rewards)
    step = sum(seconds) + (parts - len(seconds)) * seconds[-1]
    total = step * steps_of(settings, len(rows))
    return (
        f"# time per step: {step:.0f} s, measured on {len(seconds)} of {parts} micro-batches; "
        f"the run: {total / 3600:.1f} hours\n"
    )


def _time_micro_batches(settings: Settings, args: Any, rows: "Dataset", rewards: Sequence[Any]) -> list[float]:
    """Seconds of the first micro-batches, at most two."""
    policy, tokenizer = load_policy(settings.model, "transformers", args.seed, prompt=settings.prompt)
    first = rows.select(range(min(len(rows), ROWS)))
    rows = drop_long_prompts(first, tokenizer, settings.data.max_prompt_length, settings.prompt.template_kwargs)
    trainer = _build(settings, rewards)(model=policy, processing_class=tokenizer, args=args, train_dataset=rows)
    trainer.initial_entropy = 0.0  # GTPO would measure it first
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    batches, seconds = iter(trainer.get_train_dataloader()), []
    for _ in range(min(2, args.gradient_accumulation_steps)):
        batch, start = next(batches), time.perf_counter()
        trainer.training_step(trainer.model, batch, None)
        seconds.append(time.perf_counter() - start)
    return seconds


def _build(settings: Settings, rewards: Sequence[Any]) -> Callable[..., Any]:
    """The trainer of the method."""
    if settings.method == "sft":
        return SFTTrainer
    if settings.method == "grpo":
        return partial(GRPOTrainer, reward_funcs=rewards)
    return partial(GTPOTrainer, reward_funcs=rewards, gtpo=settings.gtpo)
