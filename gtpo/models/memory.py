"""Memory and hours of a run on one GPU, or memory on a CPU, estimated from the shape of the model and the settings.

Memory of the parts that grow with model and batch: neither the CUDA context nor what the allocators reserve unused.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.errors import UsageError, counted, first_line
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.backend import gpu_is_available, plans_unsloth
from gtpo.models.hub import GB, hub_is_reachable, is_hub_id

GIB = 2**30
# GiB that CUDA reports
GPUS = {"16 GB (T4)": 14.7, "24 GB (L4)": 22.1, "40 GB (A100)": 39.5, "48 GB (L40S)": 44.4, "80 GB (A100, H100)": 79.1}
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

    def linear(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the seven projections of a layer."""
        hidden, wide = self.hidden_size, self.intermediate_size
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"q": (hidden, query), "k": (hidden, key), "v": (hidden, key), "o": (query, hidden)}
        sizes |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
        return {f"{name}_proj": size for name, size in sizes.items()}


KNOWN = {  # a plan for them needs neither the Hub nor access to gated weights
    "llama": Shape(128256, 4096, 14336, 32, 32, 8, 128, tied=False),
    "qwen": Shape(151936, 2048, 11008, 36, 16, 2, 128, tied=True),
    "smol": Shape(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "tiny": Shape(513, 160, 480, 2, 4, 4, 40, tied=False),
}


def shape_of(model: str) -> Shape:
    """The shape of an alias, a Hub id or a local directory; only its config.json is read."""
    if alias := _alias_of(model):
        return KNOWN[alias]
    from transformers import AutoConfig

    local = not is_hub_id(model) or not hub_is_reachable()
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=local).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config.json of {model!r}: {first_line(error)}") from error
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts or not hasattr(config, "intermediate_size") or not hasattr(config, "num_key_value_heads"):
        raise UsageError(f"{model} ({config.model_type}) has no estimate: expected a dense Llama-like model.")
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    sizes = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads
    return Shape(*sizes, config.num_key_value_heads, head_dim or sizes[1] // heads, config.tie_word_embeddings)


def _alias_of(model: str) -> str:
    return next((alias for alias, target in MODEL_ALIASES.items() if model in (alias, target)), "")


def known_shape(model: str) -> Shape | None:
    """:func:`shape_of`; None where it is not known."""
    with suppress(UsageError):
        return shape_of(model)
    return None


def download_size(shape: Shape, is_4bit: bool) -> float:
    """Bytes of the weights of a Hub model, or of Unsloth's 4-bit copy."""
    return shape.projections * (NF4_BYTES if is_4bit else 2) + shape.embeddings * 2


def estimate(shape: Shape, values: Mapping[str, Any]) -> dict[str, float]:
    """Peak memory in GiB by part, at the longest prompts and completions of the settings (:meth:`Settings.to_dict`).

    Activations are those of a training micro-batch. With Unsloth the hidden states between the layers wait in host
    memory, and two of them are on the GPU (unsloth_zoo/gradient_checkpointing.py). vLLM also holds LoRA slots (one A
    and B of every projection, 16 bits: lora/layers/base_linear.py) and the 16-bit copy of the adapter that Unsloth
    hands over on the GPU (unsloth_zoo/vllm_lora_worker_manager.py).
    """
    from gtpo.forward.head import TILES  # imports torch

    unsloth, engine, full = plans_unsloth(values), _shares_with_vllm(values), values["lora_rank"] == 0
    width = 2 if values["bf16"] or values["fp16"] else 4  # bytes of an activation
    modules, targets = shape.linear(), {*values["lora_target_modules"]}
    ranks = {name: shape.layers * values["lora_rank"] * sum(sizes) for name, sizes in modules.items()}
    lora = sum(size for name, size in ranks.items() if targets & {name, "all-linear"})
    trained = shape.projections + shape.embeddings if full else lora
    length = min(values.get("max_length") or values["max_seq_length"], values["max_seq_length"])
    completion = values.get("max_completion_length") or max(1, length - values["max_prompt_length"])
    length = min(values["max_prompt_length"] + completion, length)
    rows = values["per_device_train_batch_size"]
    hidden = rows * length * shape.hidden_size * width
    one_layer = rows * length * width * (2 * shape.hidden_size + sum(outputs for _, outputs in modules.values()))
    layers_kept = shape.layers * (hidden if values["gradient_checkpointing"] else one_layer)
    if unsloth and values["gradient_checkpointing"] and values["max_seq_length"] >= OFFLOADED_FROM:
        layers_kept = 2 * hidden
    kv_cache = _generated(values) * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    base_width = 4 if full else width  # as load_policy
    tokens, (tile_rows, tile_columns) = rows * completion, TILES["cpu" if values["use_cpu"] else "cuda"]
    tile = min(tile_rows, tokens) * min(tile_columns, shape.vocab_size)
    parts = {
        "weights": shape.projections * (NF4_BYTES if values["load_in_4bit"] else base_width),
        "LoRA": lora * 4,
        "gradients": trained * 4,
        "optimizer": trained * (2 if "8bit" in values["optim"] else 8),
        "KV cache": kv_cache if values.get("num_generations") else 0,
        "activations": layers_kept + 2 * one_layer,
        "head": 2 * tokens * shape.hidden_size * width + 3 * 4 * tile,  # hidden states, their gradient, three tiles
    }
    parts["weights"] += shape.embeddings * base_width
    if full and values.get("beta"):
        parts["reference"] = trained * 4
    if engine and not unsloth:
        parts["vLLM's weights"] = download_size(shape, values["load_in_4bit"])  # its own copy
    if engine:
        parts["vLLM's LoRA"] = (sum(ranks.values()) + lora * unsloth) * 2
        # gate and up, their product, and the layer's input and output
        activations = VLLM_BATCH * (3 * shape.intermediate_size + 2 * shape.hidden_size) * 2
        parts["vLLM's activations and graphs"] = activations + VLLM_GRAPHS
    return {name: size / GIB for name, size in parts.items()}


def _generated(values: Mapping[str, Any]) -> int:
    """Completions that are generated together."""
    batches = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    return int(values.get("generation_batch_size") or values["per_device_train_batch_size"] * batches)


def _vllm_parts(shape: Shape, values: Mapping[str, Any]) -> tuple[float, float, float]:
    """GiB of vLLM in the training process, with the KV cache of one completion and of all, and GiB of training."""
    parts = estimate(shape, values)
    engine = parts.get("vLLM's weights", parts["weights"]) + parts.get("vLLM's LoRA", 0)
    engine += parts["vLLM's activations and graphs"] + parts["KV cache"]  # Unsloth trains on vLLM's weights
    return engine - parts["KV cache"] * (1 - 1 / _generated(values)), engine, sum(parts.values()) - engine


def verdict(shape: Shape, values: Mapping[str, Any], free: float, total: float) -> str | None:
    """Why a run does not fit ``free`` of ``total`` GiB of memory, and what it would take; None if it fits.

    vLLM in the training process reserves its share of all memory; completions beyond its KV cache wait.
    """
    if not _shares_with_vllm(values):
        need = sum(estimate(shape, values).values())
        return None if need < free else f"the run is estimated to need {need:.1f} GiB: lower --max_seq_length"
    one, _, training = _vllm_parts(shape, values)
    reserved, share = values["gpu_memory_utilization"] * total, math.ceil(100 * one / total) / 100
    if one <= reserved < free - training:
        return None
    flag = f"add `--gpu_memory_utilization {share:g}`" if share * total < free - training else "lower --max_seq_length"
    needs = f"at least {one:.1f} GiB for vLLM and {training:.1f} for training"
    return f"vLLM reserves {reserved:.1f} GiB and the run is estimated to need {needs}: {flag}"


def _shares_with_vllm(values: Mapping[str, Any]) -> bool:
    return bool(values.get("use_vllm") and values["vllm_mode"] == "colocate")


def fit(shape: Shape, values: Mapping[str, Any], size: float) -> str:
    """Whether a run fits a GPU, or host, of ``size`` GiB: the verdict, or its largest micro-batch and vLLM's room."""
    if fault := verdict(shape, values, size, size):
        return fault
    text = f"fits, with --per_device_train_batch_size up to {largest_batch(shape, values, size)}"
    if not _shares_with_vllm(values):
        return text
    (one, every, training), count = _vllm_parts(shape, values), _generated(values)
    room, share = values["gpu_memory_utilization"] * size - one, math.ceil(100 * every / size) / 100
    held = min(count, 1 + int(room * (count - 1) / (every - one))) if count > 1 else 1
    more = f"; `--gpu_memory_utilization {share:g}` has room for all" if share * size < size - training else ""
    return (
        f"{text}; vLLM has room for {held} of {count} completions at the maximum length{more if held < count else ''}"
    )


def largest_batch(shape: Shape, values: Mapping[str, Any], free: float) -> int:
    """The largest part of the completions of a step that fits ``free`` GiB; 1 if there is none."""
    completions = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    for rows in range(completions, 1, -1):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": completions // rows}
        if completions % rows == 0 and verdict(shape, {**values, **sizes}, free, free) is None:
            return rows
    return 1


def rows_that_fit(values: Mapping[str, Any]) -> int:
    """Completions per micro-batch on a CPU, as many as fit a third of the memory; 1 where the shape is not known.

    The measured peak is about twice the estimate, without the memory of the libraries.
    """
    completions = values["num_generations"] * (values["prompts_per_step"] or 1)
    step = {**values, "per_device_train_batch_size": 1, "gradient_accumulation_steps": completions}
    shape = known_shape(values["model"])
    return largest_batch(shape, step, _host_memory() / 3) if shape else 1


def describe_plan(settings: Settings, rows: int, size: float | None = None) -> str:
    """Steps, disk and memory of the run as YAML comments, then the changed settings: what ``--dry_run`` prints.

    With ``--config`` the text gives the same settings again. ``rows`` is 0 if they are not known before a download;
    ``size``: GiB of the GPU or, for a run on a CPU, of the host; that of this machine by default.
    """
    import torch

    values, trainer, model = settings.to_dict(), settings.trainer, settings.model.model
    prompts, shape = max(1, settings.completions_per_step // settings.group_size), shape_of(model)
    steps = int(trainer.max_steps if trainer.max_steps > 0 else trainer.num_train_epochs * rows / prompts)
    parts = estimate(shape, values)
    lines = [
        f"{settings.method.upper()} of {model} on {settings.data.dataset}: {settings.output_dir}",
        f"{f'{rows:,}' if rows else 'not yet known'} training rows, {counted(steps, 'step') if steps else 'steps'} of "
        f"{counted(prompts, 'prompt')} x {counted(settings.group_size, 'completion')} per process",
    ]
    if is_hub_id(MODEL_ALIASES.get(model, model)):
        copy = values["load_in_4bit"] and plans_unsloth(values)  # Unsloth has 4-bit copies of known models
        lines.append(f"download: {download_size(shape, copy) / GB:.1f} GB of weights, unless they are cached")
    if steps and trainer.save_strategy == "steps":
        every = trainer.save_steps if trainer.save_steps >= 1 else trainer.save_steps * steps
        count = min(math.ceil(steps / every), trainer.save_total_limit or steps)
        each = ((parts["LoRA"] or parts["weights"]) + parts["optimizer"]) * GIB / GB
        lines.append(f"disk: {counted(count, 'checkpoint')} of {each:.1f} GB, {count * each:.1f} GB in all")
    where = "host" if values["use_cpu"] else "GPU"
    lines.append(f"{where} memory: {sum(parts.values()):.1f} GiB at the maximum lengths, an estimate:")
    lines.append("  " + ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05))
    if not size:
        of_gpu = torch.cuda.mem_get_info()[1] / GIB if gpu_is_available() else 0
        size = _host_memory() if values["use_cpu"] else of_gpu
    machines = {f"this machine, {size:.1f} GiB": size} if size else {}
    machines |= {} if values["use_cpu"] else GPUS
    lines += [f"  {name}: {fit(shape, values, gib)}" for name, gib in machines.items()]
    if not values["use_cpu"] and steps:
        lines.append(f"hours: {hours(settings, steps)}")
    lines.append("changed settings; all: config.yaml of a run")
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(settings.changed_settings(), sort_keys=True)


def hours(settings: Settings, steps: int) -> str:
    """The time of a run by the rates of configs/experiments.yaml, or why it is not known."""
    rates = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    model = _alias_of(settings.model.model)
    group, lengths = settings.group_size, rates["longest_completion"].get(settings.data.dataset, {})
    if model not in rates["seconds_per_token"] or group not in lengths or settings.completions_per_step != group:
        known = f"{', '.join(rates['seconds_per_token'])} on {', '.join(rates['longest_completion'])} with G of 8 or 12"
        return f"not known; the authors' logs have {known}, one prompt a step"
    together = _generated(settings.to_dict()) / settings.completions_per_step  # prompts that are generated at once
    lengths = lengths[group], settings.trainer.max_completion_length
    usual, most = (hours_of_steps(rates, model, group, tokens / together, steps) for tokens in lengths)
    return (
        f"{usual / rates['speedup'][model]:.1f} to {usual:.1f} on an {rates['gpu']}, an estimate; "
        f"up to {most:.0f} if the policy collapses and writes {lengths[1]:,} tokens each"
    )


def hours_of_steps(rates: Mapping[str, Any], model: str, group: int, tokens: float, steps: float) -> float:
    """Hours of steps of one prompt, each with so many tokens in sequence; each completion is a micro-batch."""
    seconds = tokens * rates["seconds_per_token"][model] + group * rates["seconds_per_micro_batch"][model]
    return float(steps * seconds / 3600)


def _host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
