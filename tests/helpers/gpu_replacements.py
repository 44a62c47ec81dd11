"""Unsloth, 4-bit weights and vLLM without a GPU: everything that is replaced, each with its reason.

``replace()`` comes before trl, transformers and peft are imported. Not replaced: Unsloth's loader, model, trainer and
LoRA functions, its ``load_vllm``, the weights that it shares with vLLM, vLLM's engine, bitsandbytes, TRL, and ours.

Without ``--bf16=true`` everything is computed in float32, which Unsloth does not do on a GPU: rounding then hides no
difference between the trainer and the sampler.
"""

import functools
import importlib.metadata
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ENVIRONMENT = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # in forks, new threads that load weights race for PyTorch's thread pool
    "UNSLOTH_ALLOW_CPU": "1",  # otherwise Unsloth cannot be imported
    "UNSLOTH_DISABLE_STATISTICS": "1",  # no network
    "VLLM_NO_USAGE_STATS": "1",  # no network
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as Unsloth has it
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a CPU has no gpu_memory_utilization
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several tests may share the cores
    "TORCH_COMPILE_DISABLE": "1",  # minutes of compilation, for kernels that a GPU does not run
}


def replace() -> None:
    """Replace what needs a GPU for Unsloth, vLLM and the project's own questions about the GPU."""
    os.environ.update(ENVIRONMENT)
    import_unsloth()
    replace_loader()
    replace_fused_lora()
    replace_engine()
    replace_project()


def computes_in_bfloat16() -> bool:
    return "--bf16=true" in sys.argv


# CUDA and Unsloth's kernels


class _Host(str):
    """A device name that is also a list index, 0: Unsloth uses the current CUDA device as both."""

    def __index__(self) -> int:
        return 0


def import_unsloth() -> Any:
    """``import unsloth`` as on a GPU: the device is mocked, the patched classes are Unsloth's."""
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    if not torch.cpu._is_avx512_supported():
        sys.modules["vllm._C"] = ModuleType("vllm._C")  # AVX-512, which Unsloth loads; vLLM itself takes _C_AVX2
    import unsloth
    from unsloth.models import llama, rl

    os.environ["UNSLOTH_ALLOW_CPU"] = "0"  # with it Unsloth does not patch TRL
    rl.PatchFastRL(FastLanguageModel=llama.FastLlamaModel)
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    llama.DEVICE_COUNT = 1  # tables of sines and cosines are kept per device
    # An A100, whose settings are those of the presets; no kernel of it is called.
    gpu = SimpleNamespace(name="none", total_memory=80 * 2**30, major=8, minor=0, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda *args: gpu
    torch.cuda.get_device_capability = lambda *args: (8, 0)
    torch.cuda.current_device = lambda: _Host("cpu:0")
    torch.cuda.mem_get_info = lambda *args: (78 * 2**30, 80 * 2**30)  # load_vllm sizes the engine by it
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.empty_cache = lambda: None
    llama.fast_rms_layernorm = _rms_norm  # Triton
    llama.fast_rope_embedding = _rotate  # Triton
    return unsloth


def _rms_norm(norm: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: Any) -> Any:
    """Rotary embedding, of rows that start at position 0 without ``positions`` (B, T). Shape (B, heads, T, D) each."""
    cos = cos.clone()
    sin = sin.clone()  # inference-mode tensors where the reference was scored
    if positions is not None:
        cos, sin = (table[positions.long()][:, None] for table in (cos, sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        turned = x * cos[..., : x.shape[2], :] + torch.cat([-right, left], dim=-1) * sin[..., : x.shape[2], :]
        return turned.to(x.dtype)

    return rotated(q), rotated(k)


def replace_fused_lora() -> None:
    """The Triton and CUDA kernels that Unsloth's fused LoRA functions call in bfloat16."""
    import bitsandbytes
    from unsloth.kernels import fast_lora, swiglu, utils

    def dequantize(weight: torch.Tensor, state: Any = None, **options: Any) -> Any:
        # The options: ``out`` and ``use_global_buffer`` save memory, ``dtype`` is for fp8 weights.
        if state is None:
            return weight
        transposed = weight.shape[0] == 1
        full = bitsandbytes.functional.dequantize_4bit(weight.t() if transposed else weight, state).to(state.dtype)
        return full.t() if transposed else full

    def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up

    utils._fast_dequantize_bnb = dequantize  # CUDA; bitsandbytes has the same function for a CPU
    fast_lora.swiglu_fg_kernel = silu_times  # Triton
    fast_lora.swiglu_DWf_DW_dfg_kernel = swiglu._DWf_DW_dfg_traced  # Triton; Unsloth's own PyTorch version


def replace_loader() -> None:
    """What Unsloth asks the GPU, and where it puts the model."""
    import unsloth
    from unsloth_zoo import empty_model, vllm_utils

    for module in list(sys.modules.values()):  # each imports these by name
        names = vars(module) if (module is not None and module.__name__.startswith("unsloth")) else {}
        for name in ("ALLOW_BITSANDBYTES", "ALLOW_PREQUANTIZED_MODELS", "SUPPORTS_BFLOAT16"):
            if name in names:
                setattr(module, name, True)  # found by a query of the GPU
        if "is_bfloat16_supported" in names:
            module.is_bfloat16_supported = lambda *args: True  # a query of the GPU
    for module in (vllm_utils, empty_model):
        if hasattr(module, "get_target_device"):
            module.get_target_device = lambda index=0: torch.device("cpu")  # "cuda" otherwise

    loader = unsloth.FastLanguageModel
    load = loader.from_pretrained
    wrap = loader.get_peft_model
    checkpointing = {"use_gradient_checkpointing": True}  # "unsloth" copies activations to pinned memory
    here = {"device_map": "cpu"} | checkpointing  # "sequential" otherwise: the first GPU

    def load_here(**options: Any) -> Any:
        return load(**options | here | {"dtype": torch.bfloat16 if computes_in_bfloat16() else torch.float32})

    loader.from_pretrained = staticmethod(load_here)
    loader.get_peft_model = staticmethod(lambda model, **options: wrap(model, **options | checkpointing))


# vLLM


def replace_engine() -> None:
    """A CPU engine under Unsloth's ``load_vllm``."""
    import vllm
    import vllm._custom_ops
    from unsloth_zoo import vllm_utils
    from vllm.model_executor.layers.quantization import bitsandbytes

    # The CPU build packs linear weights for oneDNN and deletes the originals, which the trainer shares.
    vllm._custom_ops._supports_onednn = False
    bitsandbytes.calculate_quant_ratio = lambda dtype: 2  # values per byte; vLLM's formula is for 16-bit models
    load = vllm_utils.load_vllm

    class CPUEngine(vllm.LLM):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            options["enforce_eager"] = True  # no CUDA graphs
            if not computes_in_bfloat16():
                options["dtype"] = torch.float32
            super().__init__(**options)

    @functools.wraps(load)
    def load_vllm(**options: Any) -> Any:
        return load(**options | {"dtype": torch.bfloat16})  # it refuses float32

    vllm.LLM = CPUEngine
    vllm_utils.load_vllm = load_vllm


# The project


def replace_project() -> None:
    from gtpo.models import backend

    backend.gpu_is_available = lambda: True  # otherwise --backend unsloth is refused
    version = importlib.metadata.version
    names = {"vllm": "vllm-cpu"}  # the CPU build has another name
    importlib.metadata.version = lambda name: version(names.get(name, name))
