"""Steps, tokens and memory of a run, estimated from the shape of the model and the settings.

An estimate for one GPU, or for a CPU, printed by ``--dry_run``: the parts that grow with the model and the batch,
without the few hundred MiB of the CUDA context and what the allocators reserve unused.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.errors import UsageError, counted
from gtpo.files import CONFIGS, read_yaml
from gtpo.forward.head import TILES
from gtpo.models.hub import GB, hub_is_reachable, is_cached, is_hub_id, not_reachable
from gtpo.models.workload import Workload, step_seconds

logger = logging.getLogger(__name__)

GIB = 2**30
CARDS = (  # GiB that CUDA reports of them
    ("16 GB (T4)", 14.7),
    ("24 GB (L4)", 22.1),
    ("40 GB (A100)", 39.5),
    ("48 GB (L40S)", 44.4),
    ("80 GB (H100)", 79.1),
)
OFFLOADED_FROM = 512  # tokens: Unsloth keeps the hidden states of shorter sequences on the GPU (models/_utils.py)
VLLM_BATCH = 8192  # most tokens of a forward pass of vLLM: TRL sets 4,096, Unsloth 2,048 to 8,192 by the free memory
VLLM_GRAPHS = 0.5 * 2**30  # CUDA graphs of an 8B model, up to what vLLM logs when it has captured them
NF4_BYTES = (
    0.5 + 1 / 64 + 4 / (64 * 256)
)  # bytes of a 4-bit parameter with its share of the double-quantized block scales


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
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, query),
            "k_proj": (self.hidden_size, key),
            "v_proj": (self.hidden_size, key),
            "o_proj": (query, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }


KNOWN = {  # a plan for them needs neither the Hub nor access to gated weights
    "llama": Shape(128256, 4096, 14336, 32, 32, 8, 128, tied=False),
    "qwen": Shape(151936, 2048, 11008, 36, 16, 2, 128, tied=True),
    "smol": Shape(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "tiny": Shape(512, 160, 480, 2, 4, 4, 40, tied=False),
}


def shape_of(model: str) -> Shape:
    """The shape of an alias, a Hub id or a local directory; only its config.json is read.

    Raises:
        UsageError: If it cannot be read or is not a dense Llama-like model.
    """
    alias = next((alias for alias, target in MODEL_ALIASES.items() if model in (alias, target)), None)
    if alias is not None:
        return KNOWN[alias]
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    if (
        is_hub_id(model)
        and not isinstance(try_to_load_from_cache(model, "config.json"), str)
        and not hub_is_reachable()
    ):
        raise UsageError(not_reachable(model))
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config.json of {model!r}: {str(error).splitlines()[0]}") from error
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts or not hasattr(config, "intermediate_size") or not hasattr(config, "num_key_value_heads"):
        raise UsageError(
            f"{model} ({config.model_type}) is not a dense Llama-like model: its memory cannot be estimated."
        )
    return Shape(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        config.tie_word_embeddings,
    )


def download_size(shape: Shape, is_4bit: bool) -> float:
    """Bytes of the weights of a Hub model, or of Unsloth's 4-bit copy."""
    return shape.projections * (NF4_BYTES if is_4bit else 2) + shape.embeddings * 2


def estimate(shape: Shape, work: Workload) -> dict[str, float]:
    """Peak memory in GiB by part, at the longest prompts and completions that the settings allow.

    Activations are those of a training micro-batch. The passes that only score (initial entropy, rollout check, old
    policy, reference) have the same rows and no gradients, so they need less. With Unsloth the hidden states between
    the layers wait in host memory, and two of them are on the GPU (unsloth_zoo/gradient_checkpointing.py: two
    buffers).

    vLLM holds, besides weights and KV cache, its LoRA slots (lora/layers/base_linear.py: one A and B of every
    projection, 16 bits), the 16-bit copy of the adapter that Unsloth hands over on the GPU
    (unsloth_zoo/vllm_lora_worker_manager.py), the activations of its largest batch, and CUDA graphs.

    Args:
        shape: The shape of the model.
        work: The settings that it depends on.
    """
    half = work.bf16 or work.fp16
    width = 2 if half else 4  # bytes of an activation
    modules, projections, embeddings = shape.linear(), shape.projections, shape.embeddings
    targets = set(work.lora_target_modules)
    ranks = {name: shape.layers * work.lora_rank * sum(sizes) for name, sizes in modules.items()}
    lora = sum(size for name, size in ranks.items() if targets & {name, "all-linear"})
    full = work.lora_rank == 0
    trained = projections + embeddings if full else lora
    length = min(work.max_length or work.max_seq_length, work.max_seq_length)
    completion = work.max_completion_length or max(1, length - work.max_prompt_length)
    length = min(work.max_prompt_length + completion, length)
    rows = work.per_device_train_batch_size
    hidden = rows * length * shape.hidden_size * width
    one_layer = rows * length * width * (2 * shape.hidden_size + sum(o for _, o in modules.values()))
    unsloth = work.is_unsloth
    layers_kept = shape.layers * (hidden if work.gradient_checkpointing else one_layer)
    if unsloth and work.gradient_checkpointing and work.max_seq_length >= OFFLOADED_FROM:
        layers_kept = 2 * hidden
    generated = work.generation_batch_size or rows * work.gradient_accumulation_steps
    kv_cache = generated * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    merges = work.use_vllm and not unsloth
    base_width = 4 if merges or full else width  # as load_policy
    tokens = rows * completion
    tile_rows, tile_columns = TILES["cpu" if work.use_cpu else "cuda"]
    tile = min(tile_rows, tokens) * min(tile_columns, shape.vocab_size)
    parts = {
        "weights": projections * (NF4_BYTES if work.load_in_4bit else base_width) + embeddings * base_width,
        "LoRA": lora * 4,
        "gradients": trained * 4,
        "optimizer": trained * (2 if "8bit" in work.optim else 8),
        "KV cache": kv_cache if work.num_generations else 0,
        "activations": layers_kept + 2 * one_layer,
        "head": 2 * tokens * shape.hidden_size * width + 3 * 4 * tile,  # hidden states, their gradient, three tiles
    }
    if full and work.beta:
        parts["reference"] = (projections + embeddings) * 4
    if merges:
        parts["vLLM's weights"] = (projections + embeddings) * 2  # its own copy, 16 bits
    if work.use_vllm and unsloth:  # TRL merges the adapter instead
        parts["vLLM's LoRA"] = (sum(ranks.values()) + lora) * 2
    if work.use_vllm and work.vllm_mode != "server":
        # gate and up, their product, and the layer's input and output
        activations = VLLM_BATCH * (3 * shape.intermediate_size + 2 * shape.hidden_size) * 2
        parts["vLLM's activations and graphs"] = activations + VLLM_GRAPHS
    return {name: size / GIB for name, size in parts.items()}


def rows_that_fit(values: Mapping[str, Any]) -> int:
    """Completions per micro-batch on a CPU: the largest part of a step that fits a third of the memory.

    The measured peak is about twice the estimate, without the memory of the libraries.

    Args:
        values: Every setting, by name; 1 where the shape of the model cannot be read.
    """
    work, completions = Workload.of(values), values["num_generations"] * (values["prompts_per_step"] or 1)
    try:
        shape = shape_of(work.model)
    except UsageError as error:
        logger.debug("micro-batches of one completion: %s", error)
        return 1
    return _largest_batch(shape, work, completions, _host_memory() / 3)


def _largest_batch(shape: Shape, work: Workload, completions: int, free: float) -> int:
    """The largest part of the completions of a step with an estimate below ``free`` GiB; 1 if there is none."""
    for rows in range(completions, 1, -1):
        steps = completions // rows
        tried = replace(work, per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
        if completions % rows == 0 and sum(estimate(shape, tried).values()) < free:
            return rows
    return 1


def steps_of(settings: Settings, rows: int) -> int:
    """Optimizer steps of a run on so many training rows, with one process."""
    prompts = max(1, settings.completions_per_step // settings.group_size)
    steps = int(settings.trainer.max_steps)
    return steps if steps > 0 else int(settings.trainer.num_train_epochs * rows / prompts)


def describe_plan(
    settings: Settings,
    rows: int,
    gpus: Sequence[tuple[str, float]] | None = None,
    host: float | None = None,
    held_out: int = 0,
) -> str:
    """Steps, time, disk and memory of the run as YAML comments, then the changed settings: what ``--dry_run`` prints.

    With ``--config`` the text gives the same settings again.

    Args:
        settings: All settings of the run.
        rows: Training rows; 0 if they are not known before a download.
        gpus: Name and memory (GiB) of each GPU; those of this machine by default.
        host: Host memory (GiB); that of this machine by default.
        held_out: Held-out rows.
    """
    work = Workload.of(settings.to_dict())
    completions = settings.completions_per_step
    prompts = max(1, completions // settings.group_size)
    steps, shape = steps_of(settings, rows), shape_of(work.model)
    parts = estimate(shape, work)
    known = f"{rows:,} training rows" if rows else "the number of training rows is known after the download"
    lines = [
        f"{settings.method.upper()} of {settings.model.model} on {settings.data.dataset}: {settings.output_dir}",
        f"{known}, {f'{steps:,} ' if steps else ''}steps of {counted(prompts, 'prompt')} x "
        f"{counted(settings.group_size, 'completion')} per process",
    ]
    if work.max_completion_length and steps:
        lines.append(f"at most {steps * completions * work.max_completion_length:,} generated tokens per process")
    if held_out := held_out or settings.data.eval_rows or 0:  # only the latter is known before a download
        lines.append(_evaluations(settings.trainer, held_out, steps, steps * completions, rows / prompts))
    elif settings.data.eval_dataset:
        lines.append("the number of held-out rows is known after the download")
    if not work.use_cpu and (hours := _hours(settings, steps)):
        lines.append(hours)
    lines += _disk(settings, shape, parts, steps)
    if "wandb" in settings.trainer.report_to:
        lines.append("logs to wandb, offline without a login; --report_to none logs to metrics.jsonl alone")
    total, listed = sum(parts.values()), [f"{name} {size:.1f}" for name, size in parts.items() if size >= 0.05]
    vllm = [part for part in listed if part.startswith("vLLM")]
    gpus = _gpus() if gpus is None else gpus
    if not (work.use_cpu or gpus):
        lines.insert(0, "this machine has no GPU: the plan is for one that has")
    lines += [
        f"{'host' if work.use_cpu else 'GPU'} memory: {total:.1f} GiB at the maximum lengths, an estimate:",
        *(f"  {', '.join(group)}" for group in (listed[: len(listed) - len(vllm)], vllm) if group),
    ]
    if work.use_cpu:
        host = _host_memory() if host is None else host
        smaller = "--per_device_train_batch_size, --max_prompt_length or --max_seq_length"
        verdict = "fits" if total < host else f"may not fit: WARNING, lower {smaller}"
        lines.append(f"  this machine, {host:.1f} GiB: {verdict}")
    else:
        lines += [f"  {name}: {_verdict(size, shape, work, completions)}" for name, size in [*gpus, *CARDS]]
    lines.append("changed settings; all: config.yaml of a run")
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(settings.changed_settings(), sort_keys=True)


def _verdict(size: float, shape: Shape, work: Workload, completions: int) -> str:
    """Whether a run fits a GPU of this size (GiB), and if not, what it would take.

    vLLM reserves its share for its weights, which Unsloth trains on too, and the KV cache of as many of the
    ``generated`` completions as fit; the others wait. The largest micro-batch is that of the rest.
    """
    parts, generated = estimate(shape, work), work.generation_batch_size or completions
    total, share = sum(parts.values()), work.gpu_memory_utilization
    largest = max(parts, key=lambda name: parts[name])
    if not work.shares_gpu_with_vllm:
        return "fits" if total < size else f"does not fit, {largest} alone: {parts[largest]:.1f} GiB"
    engine = parts.get("vLLM's weights", parts["weights"])
    engine += sum(parts.get(f"vLLM's {name}", 0) for name in ("LoRA", "activations and graphs"))
    one, training = parts["KV cache"] / generated, total - engine - parts["KV cache"]
    at_once = max(0, min(generated, int((share * size - engine) / one)))
    if at_once and share * size + training < size:
        rows = _largest_batch(shape, work, completions, size - share * size + total - training)
        batches = f", micro-batches up to {rows}" if rows > work.per_device_train_batch_size else ""
        return f"fits; vLLM reserves {100 * share:g} %, {at_once} of {generated} completions at a time{batches}"
    needed = math.ceil(100 * (engine + one) / size)  # percent of the GPU for one completion at a time
    if needed * size / 100 + training < size:
        return f"fits only with --gpu_memory_utilization {needed / 100:g}, 1 of {generated} completions at a time"
    least = engine + one + training
    return f"does not fit: at least {least:.1f} GiB, vLLM {engine + one:.1f} and training {training:.1f}"


def _disk(settings: Settings, shape: Shape, parts: Mapping[str, float], steps: int) -> list[str]:
    """The download of the weights, if they are not here, and the size of the checkpoints; GB as disks have."""
    model, lines = settings.model, []
    target, copy = MODEL_ALIASES.get(model.model, model.model), Workload.of(settings.to_dict()).is_unsloth
    copy = copy and model.load_in_4bit  # Unsloth has 4-bit copies of known models
    if is_hub_id(target):
        here = " (in the cache of the Hub)" if is_cached(target, copy) else ""
        lines.append(f"download: {download_size(shape, copy) / GB:.1f} GB of weights{here}")
    trainer, trained = settings.trainer, parts["LoRA"] or parts["weights"]
    if steps and trainer.save_strategy == "steps":
        every = trainer.save_steps if trainer.save_steps >= 1 else trainer.save_steps * steps
        count = min(math.ceil(steps / every), trainer.save_total_limit or steps)
        each = (trained + parts["optimizer"]) * GIB / GB
        if count * each >= 0.1:
            fewer = "" if trainer.save_total_limit else "; --save_total_limit 2 keeps two"
            lines.append(f"disk: {counted(count, 'checkpoint')} of {each:.1f} GB, {count * each:.1f} GB in all{fewer}")
    return lines


def _hours(settings: Settings, steps: int) -> str | None:
    """The GPU hours of a run of the paper's models and datasets on an A100; None for others."""
    rates, data = read_yaml(CONFIGS / "experiments.yaml")["paper"], settings.data.dataset
    model = next((alias for alias, target in MODEL_ALIASES.items() if settings.model.model in (alias, target)), "")
    if data not in rates["steps"] or model not in rates["speedup"]:
        return None
    seconds, faster = step_seconds(rates, model, data, settings.group_size), rates["speedup"][model]
    if settings.method == "sft":
        seconds, faster = rates["seconds_per_solution"][model] * settings.completions_per_step, 1
    elif seconds is None or settings.completions_per_step != settings.group_size:
        return None
    most = (steps or rates["steps"][data]) * seconds / 3600
    hours = f"{most / faster:.0f} to {most:.0f} hours" if faster > 1 else f"{most:.1f} hours"
    return f"{hours if most >= 1 else 'less than an hour'} on an A100, an estimate (configs/experiments.yaml)"


def _evaluations(trainer: Any, rows: int, steps: int, trained: int, epoch: float) -> str:
    """How often the held-out rows are evaluated, and the completions that this costs; ``epoch``: steps of one."""
    if not steps:  # before a download
        return f"{rows:,} held-out rows"
    every = epoch if trainer.eval_strategy == "epoch" else trainer.eval_steps
    every = math.ceil(every * steps) if every < 1 else every
    times = math.ceil(steps / every) + bool(trainer.eval_on_start)
    more = rows * getattr(trainer, "num_generations_eval", 0) * times
    cost = f": {more:,} more completions, {100 * more / trained:.0f} % of those of training" if more else ""
    return f"{rows:,} held-out rows, evaluated {counted(times, 'time')}{cost}"


def _gpus() -> list[tuple[str, float]]:
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(device.name, device.total_memory / GIB) for device in devices]


def _host_memory() -> float:
    """GiB of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
