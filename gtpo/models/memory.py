"""Memory of a run on a GPU or a CPU, estimated from the shape of the model and the settings, and the micro-batch by it.

Memory of the parts that grow with model and batch: neither the CUDA context nor what the allocators reserve unused.
"""

import math
import os

from gtpo.arguments import Values
from gtpo.models.backend import backend_of, gpu_is_available
from gtpo.models.shape import Shape, known_shape
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


def estimate(shape: Shape, values: Values) -> Parts:
    """Peak memory in GiB by part, at the longest prompts and completions of the settings (:meth:`Settings.to_dict`)."""
    lora = shape.lora(values["lora_rank"], values["lora_target_modules"])
    trained = shape.projections + shape.embeddings if _trains_all(values) else lora
    parts = {
        "weights": _weights(shape, values),
        "LoRA": lora * 4,
        "gradients": trained * 4,
        "optimizer": trained * (2 if "8bit" in values["optim"] else 8),
        "KV cache": _kv_cache(shape, values),
        "activations": _activations(shape, values),
        "head": _head(shape, values),
    }
    if _trains_all(values) and values.get("beta"):
        parts["reference"] = trained * 4
    if _shares_with_vllm(values):
        parts |= _of_vllm(shape, values, lora)
    return {name: size / GIB for name, size in parts.items()}


def _weights(shape: Shape, values: Values) -> float:
    """Bytes of the base, in the precision of ``load_policy``."""
    width = 4 if _trains_all(values) else _width(values)
    projection = NF4_BYTES if values["load_in_4bit"] else width
    return shape.projections * projection + shape.embeddings * width


def _kv_cache(shape: Shape, values: Values) -> int:
    """Bytes of the completions that are generated together; SFT generates none."""
    length, _ = _lengths(values)
    return _generated(values) * length * shape.cached * _width(values) if values.get("num_generations") else 0


def _activations(shape: Shape, values: Values) -> int:
    """Bytes of a training micro-batch: what the layers keep for the backward, and one layer's forward and backward.

    With Unsloth the hidden states between the layers wait in host memory, and two of them are on the GPU
    (unsloth_zoo/gradient_checkpointing.py).
    """
    length, _ = _lengths(values)
    numbers = values["per_device_train_batch_size"] * length * _width(values)
    hidden = numbers * shape.hidden_size
    one_layer = 2 * hidden + numbers * shape.outputs
    if not values["gradient_checkpointing"]:
        kept = shape.layers * one_layer
    elif _plans_unsloth(values) and values["max_seq_length"] >= OFFLOADED_FROM:
        kept = 2 * hidden
    else:
        kept = shape.layers * hidden
    return kept + 2 * one_layer


def _head(shape: Shape, values: Values) -> int:
    """Bytes of the hidden states of a micro-batch's completions, their gradient, and the logits at a time."""
    from gtpo.forward.head import MAX_LOGITS, TILES  # imports torch

    _, completion = _lengths(values)
    tokens = values["per_device_train_batch_size"] * completion
    if _trains_all(values):
        logits = 5 * min(MAX_LOGITS, tokens * shape.vocab_size)
    else:
        rows, columns = TILES["cpu" if values["use_cpu"] else "cuda"]
        logits = 3 * min(rows, tokens) * min(columns, shape.vocab_size)
    return 2 * tokens * shape.hidden_size * _width(values) + 4 * logits


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
        parts["vLLM's weights"] = shape.projections * sampled_bytes(values) + shape.embeddings * 2  # its own copy
    parts["vLLM's LoRA"] = slots * 2
    # gate and up, their product, and the layer's input and output
    activations = VLLM_BATCH * (3 * shape.intermediate_size + 2 * shape.hidden_size) * 2
    parts["vLLM's activations and graphs"] = activations + VLLM_GRAPHS
    return parts


def sampled_bytes(values: Values) -> float:
    """Bytes of a parameter of the projections in vLLM."""
    return NF4_BYTES if values["load_in_4bit"] else 2


def _trains_all(values: Values) -> bool:
    """Whether the weights of the base are trained, in float32."""
    return bool(values["lora_rank"] == 0)


def _width(values: Values) -> int:
    """Bytes of an activation."""
    return 2 if values["bf16"] or values["fp16"] else 4


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


def memory_here(use_cpu: bool) -> float | None:
    """GiB of the host, or of this process's GPU; None where PyTorch sees none."""
    return _host_memory() if use_cpu else gpu_memory()


def _host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
