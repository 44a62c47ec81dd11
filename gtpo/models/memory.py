"""Memory and hours of a run on one GPU, or memory on a CPU, estimated from the shape of the model and the settings.

Memory of the parts that grow with model and batch: neither the CUDA context nor what the allocators reserve unused.
"""

import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gtpo.arguments import Settings, Values
from gtpo.errors import UsageError, counted, first_line
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.backend import backend_of, gpu_is_available
from gtpo.models.source import ModelSource
from gtpo.processes import local_rank

Parts = dict[str, float]  # name of a part -> its bytes, or GiB
GIB = 2**30
PLANNED = 79.1  # GiB of an A100 or H100 of 80 GB: where a run is planned without a GPU
SPARE = 0.1  # share of a GPU that stays free beside the estimate
OFFLOADED_FROM = 512  # tokens: Unsloth keeps the hidden states of shorter sequences on the GPU (models/_utils.py)
VLLM_BATCH = 8192  # most tokens of a forward pass of vLLM: TRL sets 4,096, Unsloth 2,048 to 8,192 by the free memory
VLLM_GRAPHS = 0.5 * 2**30  # CUDA graphs of an 8B model, up to what vLLM logs when it has captured them
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a 4-bit parameter with its share of the double-quantized block scales


@dataclass(frozen=True)
class Shape:
    """The numbers that determine the size of a Llama-like decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @property
    def projections(self) -> int:
        """Parameters of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear().values())

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def outputs(self) -> int:
        """Outputs of all projections of a layer."""
        return sum(outputs for _, outputs in self.linear().values())

    @property
    def cached(self) -> int:
        """Numbers of the KV cache per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def lora(self, rank: int, modules: Collection[str]) -> int:
        """Parameters of an adapter on these projections, or on ``all-linear``."""
        size = 0
        for name, (inputs, outputs) in self.linear().items():
            if name in modules or "all-linear" in modules:
                size += inputs + outputs
        return self.layers * rank * size

    def linear(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the seven projections of a layer."""
        hidden = self.hidden_size
        wide = self.intermediate_size
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        return {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }


KNOWN = {alias: Shape(**sizes) for alias, sizes in read_yaml(Path(__file__).with_name("sizes.yaml")).items()}


def shape_of(source: ModelSource) -> Shape:
    """The shape of a base; of one without an alias its config.json is read."""
    if source.alias:
        return KNOWN[source.alias]
    return _shape_in(_read_config(source), source.name)


def scale_of(source: ModelSource) -> tuple[float, float]:
    """(parameters without embeddings, tokens of the context) of a base; infinite where not known."""
    parameters = context = math.inf
    with suppress(UsageError):
        config = _read_config(source)
        context = getattr(config, "max_position_embeddings", None) or context
        parameters = _shape_in(config, source.name).projections
    return parameters, context


def _read_config(source: ModelSource) -> Any:
    """The config.json of a base, that of its language model."""
    try:
        return source.config.get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config.json of {source.name!r}: {first_line(error)}") from error


def _shape_in(config: Any, model: str) -> Shape:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts or not hasattr(config, "intermediate_size") or not hasattr(config, "num_key_value_heads"):
        raise UsageError(f"{model} ({config.model_type}) has no estimate: expected a dense Llama-like model.")
    heads = config.num_attention_heads
    return Shape(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.tie_word_embeddings,
    )


def known_shape(source: ModelSource) -> Shape | None:
    """:func:`shape_of`; None where it is not known."""
    with suppress(UsageError):
        return shape_of(source)
    return None


def estimate(shape: Shape, values: Values) -> Parts:
    """Peak memory in GiB by part, at the longest prompts and completions of the settings (:meth:`Settings.to_dict`).

    Activations are those of a training micro-batch. With Unsloth the hidden states between the layers wait in host
    memory, and two of them are on the GPU (unsloth_zoo/gradient_checkpointing.py).
    """
    from gtpo.forward.head import MAX_LOGITS, TILES  # imports torch

    full = values["lora_rank"] == 0
    width = 2 if values["bf16"] or values["fp16"] else 4  # bytes of an activation
    lora = shape.lora(values["lora_rank"], values["lora_target_modules"])
    trained = shape.projections + shape.embeddings if full else lora
    length, completion = _lengths(values)
    rows = values["per_device_train_batch_size"]
    hidden = rows * length * shape.hidden_size * width
    one_layer = 2 * hidden + rows * length * width * shape.outputs
    layers_kept = shape.layers * (hidden if values["gradient_checkpointing"] else one_layer)
    if _plans_unsloth(values) and values["gradient_checkpointing"] and values["max_seq_length"] >= OFFLOADED_FROM:
        layers_kept = 2 * hidden
    kv_cache = _generated(values) * length * shape.cached * width
    base_width = 4 if full else width  # as load_policy
    weight = NF4_BYTES if values["load_in_4bit"] else base_width
    tokens, (tile_rows, tile_columns) = rows * completion, TILES["cpu" if values["use_cpu"] else "cuda"]
    logits = 3 * min(tile_rows, tokens) * min(tile_columns, shape.vocab_size)
    if full:
        logits = 5 * min(MAX_LOGITS, tokens * shape.vocab_size)
    parts = {
        "weights": shape.projections * weight + shape.embeddings * base_width,
        "LoRA": lora * 4,
        "gradients": trained * 4,
        "optimizer": trained * (2 if "8bit" in values["optim"] else 8),
        "KV cache": kv_cache if values.get("num_generations") else 0,
        "activations": layers_kept + 2 * one_layer,
        "head": 2 * tokens * shape.hidden_size * width + 4 * logits,  # hidden states, their gradient, logits
    }
    if full and values.get("beta"):
        parts["reference"] = trained * 4
    if _shares_with_vllm(values):
        parts |= _of_vllm(shape, values, lora)
    return {name: size / GIB for name, size in parts.items()}


def _of_vllm(shape: Shape, values: Values, lora: int) -> Parts:
    """Bytes of an engine on the same GPU, besides the KV cache; Unsloth trains on its weights.

    It holds LoRA slots (one A and B of every projection, 16 bits: lora/layers/base_linear.py) and the 16-bit copy of
    the adapter that Unsloth hands over on the GPU (unsloth_zoo/vllm_lora_worker_manager.py).
    """
    parts = {}
    slots = shape.lora(values["lora_rank"], ["all-linear"])
    if _plans_unsloth(values):
        slots += lora
    else:
        parts["vLLM's weights"] = shape.projections * _sampled(values) + shape.embeddings * 2  # its own copy
    parts["vLLM's LoRA"] = slots * 2
    # gate and up, their product, and the layer's input and output
    activations = VLLM_BATCH * (3 * shape.intermediate_size + 2 * shape.hidden_size) * 2
    parts["vLLM's activations and graphs"] = activations + VLLM_GRAPHS
    return parts


def _sampled(values: Values) -> float:
    """Bytes of a parameter of the projections in vLLM."""
    return NF4_BYTES if values["load_in_4bit"] else 2


def _lengths(values: Values) -> tuple[int, int]:
    """Tokens of the longest row, and of its completion."""
    most = values["max_seq_length"]
    length = min(values.get("max_length") or most, most)
    prompt = values["max_prompt_length"]
    completion = values.get("max_completion_length") or max(1, length - prompt)
    return min(prompt + completion, length), completion


def _generated(values: Values) -> int:
    """Completions that are generated together."""
    batches = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    return values.get("generation_batch_size") or values["per_device_train_batch_size"] * batches


def verdict(shape: Shape, values: Values, free: float, total: float) -> str | None:
    """Why a run does not fit ``free`` of ``total`` GiB of memory; None if it fits.

    vLLM in the training process reserves its share of all memory; completions beyond its KV cache wait. Unsloth trains
    on vLLM's weights.
    """
    parts = estimate(shape, values)
    need = sum(parts.values())
    if not _shares_with_vllm(values):
        return None if need < free else f"the run is estimated to need {need:.1f} GiB: lower --max_seq_length"
    weights = parts.get("vLLM's weights", parts["weights"])
    fixed = weights + parts["vLLM's LoRA"] + parts["vLLM's activations and graphs"]
    one = fixed + parts["KV cache"] / _generated(values)  # of one completion
    training = need - fixed - parts["KV cache"]
    reserved = values["gpu_memory_utilization"] * total
    if one <= reserved < free - training:
        return None
    least = math.ceil(100 * one / total) / 100
    return (
        f"vLLM reserves {reserved:.1f} GiB, and is estimated to need {one:.1f} (`--gpu_memory_utilization {least:g}`) "
        f"next to {training:.1f} for training: set that, or lower --max_seq_length"
    )


def _plans_unsloth(values: Values) -> bool:
    """On the machine that the run is for."""
    return backend_of(values["backend"], values["use_cpu"], has_gpu=True) == "unsloth"


def _shares_with_vllm(values: Values) -> bool:
    return values.get("use_vllm", False) and values["vllm_mode"] == "colocate"


def largest_batch(shape: Shape, values: Values, completions: int, size: float) -> int:
    """The largest micro-batch, a divisor of the completions of a step, that fits ``size`` GiB; 1 if none does.

    A micro-batch has one group at most, and ``SPARE`` of a GPU stays free.
    """
    most = completions
    free = size
    if not values["use_cpu"]:
        most = math.gcd(completions, values.get("num_generations") or completions)
        free = size * (1 - SPARE)
    for rows in range(most, 1, -1):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": completions // rows}
        if most % rows == 0 and verdict(shape, values | sizes, free, size) is None:
            return rows
    return 1


def derived_micro_batch(shape: Shape | None, values: Values, processes: int) -> int:
    """Completions per micro-batch of a run that does not name them: as many as fit this machine.

    1, as in Listing 1, where the size would change what is computed (``bnpo`` averages over a micro-batch,
    ``steps_per_generation`` counts micro-batches) and where the shape of the model is not known. A plan for a GPU on a
    machine without one is for ``PLANNED``. On a CPU a third of the host's memory: the measured peak is about twice the
    estimate, without the memory of the libraries.
    """
    depends = values.get("loss_type") == "bnpo" or values.get("steps_per_generation")
    if depends or shape is None:
        return 1
    every = values["num_generations"] * (values["prompts_per_step"] or 1)
    completions = max(1, every // processes)
    if values["use_cpu"]:
        return largest_batch(shape, values, completions, _host_memory() / 3)
    return largest_batch(shape, values, completions, gpu_memory() or PLANNED)


def fitting_micro_batch(source: ModelSource, processes: int, values: Values) -> int | None:
    """:func:`derived_micro_batch` of a model; None for the tiny ones, SFT, and processes that share a CPU."""
    shares_host = values["use_cpu"] and processes > 1
    if source.is_tiny or shares_host or "num_generations" not in values:
        return None
    return derived_micro_batch(known_shape(source), values, processes)


def gpu_memory() -> float | None:
    """GiB of this process's GPU; None where PyTorch sees none."""
    import torch

    if gpu_is_available():
        return torch.cuda.get_device_properties(local_rank()).total_memory / GIB
    return None


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
    if settings.method != "sft" and (updates := _updates(settings)) != 1:
        size += f", {updates:g} on each generation of {_sequences(settings)}"
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
        if saved := saved_in_16_bits(settings, gpu_memory(), steps):
            lines.append(saved)
    lines.append("changed settings; all: config.yaml of a run")
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(settings.changed_settings(), sort_keys=True)


def _memory_lines(shape: Shape, values: Values) -> list[str]:
    """The memory by part, and whether the run fits this machine, or a GPU of ``PLANNED``."""
    parts = estimate(shape, values)
    large = [f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05]
    known = _host_memory() if values["use_cpu"] else gpu_memory()
    where = "this machine" if known else "an A100 or H100 of 80 GB"
    size = known or PLANNED
    fault = verdict(shape, values, size, size)
    return [
        f"memory: {sum(parts.values()):.1f} GiB at the maximum lengths, an estimate: {', '.join(large)}",
        f"{where}, {size:.1f} GiB: {fault or 'fits'}",
    ]


def steps_of(settings: Settings, rows: int) -> int:
    """Optimizer steps of a run; TRL drops the rows of an epoch that are too few for a generation."""
    trainer = settings.trainer
    if trainer.max_steps > 0:
        return int(trainer.max_steps)
    if settings.method == "sft":
        return int(trainer.num_train_epochs * rows / settings.completions_per_step)
    generations = rows // (trainer.generation_batch_size // settings.group_size)
    return int(trainer.num_train_epochs * generations * _updates(settings))


def _updates(settings: Settings) -> float:
    """Optimizer steps on the completions of a generation."""
    trainer = settings.trainer
    return float(trainer.steps_per_generation * trainer.num_iterations / trainer.gradient_accumulation_steps)


def _sequences(settings: Settings) -> int:
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
    if (sequences := _sequences(settings)) != group:
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
    weights = shape.projections * _sampled(values) + 2 * shape.vocab_size * shape.hidden_size
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
    if not usual or _sequences(settings) % group or _sequences(settings) > rates["most_sequences"]:
        return None
    return usual


def _context(rates: Mapping[str, Any], tokens: float) -> float:
    """Mean tokens of a sequence while so many are generated."""
    return float(rates["prompt_tokens"] + tokens / 2)


def _hours_at(rates: Mapping[str, Any], settings: Settings, values: Values, tokens: float, steps: float) -> float:
    """:func:`hours_of_steps` of a run whose longest completions have so many tokens."""
    model = settings.source.alias
    slower = token_time(KNOWN[model], values, _sequences(settings), _context(rates, tokens))
    waited = tokens * slower / _updates(settings)
    return hours_of_steps(rates, model, settings.completions_per_step, waited, steps)


def hours_of_steps(rates: Mapping[str, Any], model: str, completions: int, tokens: float, steps: float) -> float:
    """Hours of steps, each with so many tokens in sequence, and loss and backward of so many completions."""
    seconds = tokens * rates["seconds_per_token"][model] + completions * rates["seconds_per_micro_batch"][model]
    return steps * seconds / 3600


def _host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
