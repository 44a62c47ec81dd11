"""What ``--dry_run`` prints: the plan of a run, and its first row."""

from typing import Any

import yaml

from gtpo.arguments import Settings, Values
from gtpo.data.preview import look
from gtpo.errors import UsageError, counted
from gtpo.models.hours import hours, saved_in_16_bits, sequences_per_generation, steps_of, updates_per_generation
from gtpo.models.load import load_tokenizer
from gtpo.models.memory import PLANNED, estimate, memory_here, verdict
from gtpo.models.shape import Shape, shape_of


def dry_run(settings: Settings, rows: Any) -> str:
    """What ``--dry_run`` prints: the plan, and the first row."""
    return describe_plan(settings, len(rows)) + _describe_first_row(settings, rows)


def _describe_first_row(settings: Settings, rows: Any) -> str:
    """As comments: the first prompt as rendered, and a completion of it with its scores."""
    if not rows.column_names or not rows[0]["prompt"]:
        return "# The rows are on the Hub, and a dry run does not read them.\n"
    try:
        tokenizer = load_tokenizer(settings.source, settings.prompt, only_cached=True)
    except UsageError:
        return f"# The tokenizer of {settings.source.base} is not on this machine, so no prompt is shown.\n"
    row = rows[0]
    seen = look(tokenizer, row["prompt"], row.get("answer"), settings.prompt, settings.scored)
    return "".join(f"# {line}".rstrip() + "\n" for line in ["", *seen.lines()])


def describe_plan(settings: Settings, rows: int) -> str:
    """Steps, memory and hours of the run as YAML comments, then the changed settings: what ``--dry_run`` prints.

    With ``--config`` the text gives the same settings again. ``rows`` is 0 if they are not known before a download.
    """
    values = settings.to_dict()
    trainer = settings.trainer
    shape = shape_of(settings.source)
    prompts = max(1, settings.completions_per_step // settings.group_size)
    steps = steps_of(settings, rows)
    known_rows = f"{rows:,}" if rows else "not yet known"
    known_steps = counted(steps, "step") if steps else "steps"
    size = f"{counted(prompts, 'prompt')} x {counted(settings.group_size, 'completion')} per process"
    if settings.method != "sft" and (updates := updates_per_generation(settings)) != 1:
        size += f", {updates:g} on each generation of {sequences_per_generation(settings)}"
    lines = [
        f"{settings.method.upper()} of {settings.model.model} on {settings.data.dataset}: {settings.output_dir}",
        f"{known_rows} training rows, {known_steps} of {size}",
        settings.optimization,
        *settings.without_effect(),
        f"micro-batch: {trainer.per_device_train_batch_size} of {settings.completions_per_step}",
        *_memory_lines(shape, values),
    ]
    if not values["use_cpu"] and steps:
        lines.append(f"hours: {hours(settings, steps)}")
        if saved := saved_in_16_bits(settings, memory_here(use_cpu=False), steps):
            lines.append(saved)
    lines.append("changed settings; all: config.yaml of a run")
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(settings.changed_settings(), sort_keys=True)


def _memory_lines(shape: Shape, values: Values) -> list[str]:
    """The memory by part, and whether the run fits this machine, or a GPU of ``PLANNED``."""
    parts = estimate(shape, values)
    large = [f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05]
    known = memory_here(values["use_cpu"])
    where = "this machine" if known else "an A100 or H100 of 80 GB"
    size = known or PLANNED
    fault = verdict(shape, values, size, size)
    return [
        f"memory: {sum(parts.values()):.1f} GiB at the maximum lengths, an estimate: {', '.join(large)}",
        f"{where}, {size:.1f} GiB: {fault or 'fits'}",
    ]
