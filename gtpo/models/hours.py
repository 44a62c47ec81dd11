"""Steps and hours of a run on a GPU, by the rates of configs/experiments.yaml."""

from collections.abc import Mapping
from typing import Any

from gtpo.arguments import Settings, Values
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.memory import SPARE, sampled_bytes, verdict
from gtpo.models.shape import KNOWN, Shape


def steps_of(settings: Settings, rows: int) -> int:
    """Optimizer steps of a run; TRL drops the rows of an epoch that are too few for a generation."""
    trainer = settings.trainer
    if trainer.max_steps > 0:
        return int(trainer.max_steps)
    if settings.method == "sft":
        return int(trainer.num_train_epochs * rows / settings.completions_per_step)
    generations = rows // (trainer.generation_batch_size // settings.group_size)
    return int(trainer.num_train_epochs * generations * updates_per_generation(settings))


def updates_per_generation(settings: Settings) -> float:
    """Optimizer steps on the completions of a generation."""
    trainer = settings.trainer
    return float(trainer.steps_per_generation * trainer.num_iterations / trainer.gradient_accumulation_steps)


def sequences_per_generation(settings: Settings) -> int:
    """Completions that a process generates together."""
    return int(settings.trainer.per_device_train_batch_size * settings.trainer.steps_per_generation)


def hours(settings: Settings, steps: int) -> str:
    """The time of a run by the rates of configs/experiments.yaml, or why it is not known."""
    rates = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    model = settings.source.alias
    group = settings.group_size
    usual = _usual_length(settings, rates)
    if model not in rates["seconds_per_token"] or not usual:
        return (
            "not known; the authors' logs have llama and qwen on gsm8k and math with whole groups of 8 or 12, and "
            f"more than {rates['most_sequences']} sequences are not modelled"
        )
    values = settings.to_dict()
    longest = settings.trainer.max_completion_length
    slow, collapsed = (_hours_at(rates, settings, values, tokens, steps) for tokens in (usual, longest))
    found = (
        f"{slow / rates['speedup'][model]:.1f} to {slow:.1f} on an {rates['gpu']}, an estimate; up to {collapsed:.0f} "
        f"if the policy collapses and writes {longest:,} tokens each"
    )
    if (sequences := sequences_per_generation(settings)) != group:
        slower = token_time(KNOWN[model], values, sequences, _context(rates, usual))
        found += (
            f"; assumed, as 12 sequences were measured: a token of {sequences} takes {slower:.2f} times that of "
            f"{group}, by the bytes of weights and KV cache that it reads, and "
            f"the longest of {sequences} has {usual} tokens too"
        )
    return found


def token_time(shape: Shape, values: Values, sequences: int, context: float) -> float:
    """Time of a token of so many sequences together, over that of the G sequences of one prompt.

    An assumption, as only 12 were measured: a sampler of few sequences waits for memory, so this is the ratio of the
    bytes it reads: weights as they are stored, head, adapter, and the 16-bit KV cache of ``context`` tokens a sequence.
    """
    weights = shape.projections * sampled_bytes(values) + 2 * shape.vocab_size * shape.hidden_size
    weights += 2 * shape.lora(values["lora_rank"], values["lora_target_modules"])
    cache = 2 * shape.cached * context  # of a sequence
    return (weights + sequences * cache) / (weights + values["num_generations"] * cache)


def saved_in_16_bits(settings: Settings, size: float | None, steps: float | None = None) -> str | None:
    """What ``--load_in_4bit false`` would save on a GPU of ``size`` GiB; None without room or without a measured rate.

    The sampler dequantizes 4-bit weights for every token (docs/gpu.md). ``steps``: None for those of all rows.
    """
    rates = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    values = settings.to_dict()
    model = settings.source.alias
    tokens = _usual_length(settings, rates)
    measured = rates["measured"]
    if not (size and tokens and model in measured["4 bits"]["seconds_per_token"] and values["load_in_4bit"]):
        return None
    in_16_bits = values | {"load_in_4bit": False}
    if verdict(KNOWN[model], in_16_bits, size * (1 - SPARE), size):
        return None
    if steps is None:
        steps = steps_of(settings, rates["steps"][settings.data.dataset])
    before = _hours_at(rates | measured["4 bits"], settings, values, tokens, steps)
    after = _hours_at(rates | measured["16 bits"], settings, in_16_bits, tokens, steps)
    return (
        f"--load_in_4bit false fits this GPU and would save {before - after:.1f} of {before:.1f} hours, by the steps "
        f"measured on an {measured['gpu']}"
    )


def _usual_length(settings: Settings, rates: Mapping[str, Any]) -> int | None:
    """Tokens of the longest completion of a group; None where it, or such a generation, has no estimate."""
    group = settings.group_size
    usual: int | None = rates["longest_completion"].get(settings.data.dataset, {}).get(group)
    if not usual:
        return None
    sequences = sequences_per_generation(settings)
    is_modelled = sequences % group == 0 and sequences <= rates["most_sequences"]
    return usual if is_modelled else None


def _context(rates: Mapping[str, Any], tokens: float) -> float:
    """Mean tokens of a sequence while so many are generated."""
    return float(rates["prompt_tokens"] + tokens / 2)


def _hours_at(rates: Mapping[str, Any], settings: Settings, values: Values, tokens: float, steps: float) -> float:
    """:func:`hours_of_steps` of a run whose longest completions have so many tokens."""
    model = settings.source.alias
    slower = token_time(KNOWN[model], values, sequences_per_generation(settings), _context(rates, tokens))
    waited = tokens * slower / updates_per_generation(settings)
    return hours_of_steps(rates, model, settings.completions_per_step, waited, steps)


def hours_of_steps(rates: Mapping[str, Any], model: str, completions: int, tokens: float, steps: float) -> float:
    """Hours of steps, each with so many tokens in sequence, and loss and backward of so many completions."""
    seconds = tokens * rates["seconds_per_token"][model] + completions * rates["seconds_per_micro_batch"][model]
    return steps * seconds / 3600
