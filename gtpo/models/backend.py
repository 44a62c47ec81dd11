"""Which backend trains or samples: Unsloth or vLLM on a GPU, plain Transformers elsewhere; which drivers and GPUs can.

Also the environment variables that have to be set before PyTorch or vLLM is imported.
"""

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys

from gtpo.errors import UsageError
from gtpo.processes import local_rank, world_size

logger = logging.getLogger(__name__)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer's construction otherwise

GPU_PACKAGES = {  # as in requirements/gpu.txt; Unsloth silently drops 4-bit weights where bitsandbytes is missing
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
    "vllm": "0.27.1",
    "bitsandbytes": "0.50.2",
}
LEAST_CAPABILITY = (7, 5)  # compute capability that the wheels of PyTorch (CUDA 13), bitsandbytes and vLLM start at
DRIVER = 580  # the oldest NVIDIA driver of CUDA 13, for which PyTorch 2.13 is built


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def gpu_is_available() -> bool:
    """Whether PyTorch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def check_driver() -> str | None:
    """One sentence if the NVIDIA driver is too old: PyTorch then sees no GPU, and says so only in a warning.

    None for a GPU that PyTorch with CUDA 13 sees anyway (CUDA forward compatibility), without a driver, and with
    ``CUDA_VISIBLE_DEVICES`` empty.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    release = found.partition(".")[0]
    if release.isdecimal() and (int(release) >= DRIVER or _runs_cuda_13()):
        return None
    what = f"the NVIDIA driver is {found}" if release.isdecimal() else "nvidia-smi finds no NVIDIA driver or no GPU"
    return (
        f"{what}, and PyTorch 2.13 needs R{DRIVER} or newer (CUDA 13): install it on the host, on Ubuntu with "
        f"`sudo apt-get install nvidia-driver-{DRIVER}`, and reboot."
    )


def _runs_cuda_13() -> bool:
    if not is_installed("torch"):
        return False
    import torch

    return (torch.version.cuda or "").startswith("13.") and gpu_is_available()


def check_compute_capability() -> str | None:
    """One sentence if this process's GPU is older than Turing (T4); None without a GPU."""
    if not gpu_is_available() or _capability() >= LEAST_CAPABILITY:
        return None
    found, least = (".".join(map(str, version)) for version in (_capability(), LEAST_CAPABILITY))
    return (
        f"this GPU has compute capability {found} and PyTorch, bitsandbytes and vLLM need {least} (T4) or newer: "
        "use another GPU, or set CUDA_VISIBLE_DEVICES= and train --model tiny on the CPU."
    )


def disable_flashinfer_sampler() -> None:
    """Let vLLM sample with its own kernels, unless the user has chosen; call it before vLLM is imported.

    FlashInfer's kernels are compiled while the engine starts, which fails without nvcc and ninja. Below compute
    capability 8.0 vLLM has none, and refuses the choice that Unsloth makes, also one inherited from its process.
    """
    if os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0") == "0":
        os.environ.setdefault("UNSLOTH_VLLM_NO_FLASHINFER", "1")  # Unsloth sets the former to 1 where it finds nvcc
    if gpu_is_available() and _capability() < (8, 0):
        os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "UNSLOTH_VLLM_NO_FLASHINFER": "1"}


def installed_version(package: str) -> str | None:
    """The version of a package, or of its build for CPUs, which vLLM has; None if neither is installed."""
    names = package, f"{package}-cpu"
    return next((found.version for name in names for found in importlib.metadata.distributions(name=name)), None)


def check_version(package: str) -> None:
    """Refuse another version than that of ``GPU_PACKAGES``; with ``GTPO_ALLOW_VERSIONS=1`` it is a warning."""
    pinned = GPU_PACKAGES[package]
    found = installed_version(package)
    if found == pinned:
        return
    if found and os.environ.get("GTPO_ALLOW_VERSIONS") == "1":
        logger.warning("%s %s is installed, %s is pinned: nothing was tested with it", package, found, pinned)
        return
    other = " (GTPO_ALLOW_VERSIONS=1 tries the installed one)" if found else ""
    raise UsageError(
        f"{package} {pinned} is needed, installed is {found or 'none'}{other}: `pip install -r requirements.txt`, "
        "or --backend transformers."
    )


def _capability() -> tuple[int, int]:
    """Compute capability of this process's GPU."""
    import torch

    return torch.cuda.get_device_capability(local_rank())


def backend_of(asked: str, use_cpu: bool, has_gpu: bool, fast: str = "unsloth") -> str:
    """What trains or samples: as asked, and of ``auto`` the fast one on a GPU, Transformers on a CPU.

    Training, dry run, evaluation and study ask it.

    Args:
        asked: ``--backend``.
        use_cpu: That of preset, file and command line together; the preset of the tiny base is for a CPU.
        has_gpu: Whether the machine of the run has a GPU, which for a dry run may be another machine.
        fast: ``unsloth``, which trains, or ``vllm``, which samples.
    """
    known = ("auto", fast, "transformers")
    if asked not in known:
        raise UsageError(f"--backend {asked!r} is unknown: pick one of {', '.join(known)}.")
    if asked == "auto":
        return fast if has_gpu and not use_cpu else "transformers"
    return asked


def check_backend(backend: str) -> None:
    """UsageError for a GPU that is too old, and where Unsloth or vLLM cannot run; nothing is imported but PyTorch."""
    if fault := check_compute_capability():
        raise UsageError(fault)
    if backend == "vllm":
        check_version("vllm")
    if backend == "unsloth":
        if not gpu_is_available():
            raise UsageError(check_driver() or "--backend unsloth needs a GPU: use --backend transformers.")
        if world_size() > 1:
            raise UsageError(
                "--backend unsloth trains on one GPU, and this is one of several: add --backend transformers."
            )
        for package in GPU_PACKAGES:
            check_version(package)


def uses_unsloth() -> bool:
    """Whether Unsloth has replaced TRL's trainer."""
    import trl

    return trl.GRPOTrainer.__name__.startswith("Unsloth")


def load_backend(backend: str = "auto", *, use_cpu: bool = False) -> str:
    """Choose a backend, and import Unsloth if it is chosen. Call it before trl, transformers and peft are imported.

    UsageError as :func:`check_backend`, and if Unsloth is imported late.
    """
    backend = backend_of(backend, use_cpu, gpu_is_available())
    check_backend(backend)
    disable_flashinfer_sampler()
    if backend == "transformers":
        return backend
    early_imports = {"trl", "transformers", "peft"} & sys.modules.keys()
    if early_imports and "unsloth" not in sys.modules:
        raise UsageError(f"{sorted(early_imports)[0]} was imported before Unsloth: call load_backend() first.")
    import unsloth  # noqa: F401  (imported for its side effects)

    if not uses_unsloth():
        raise UsageError("Unsloth did not patch trl.GRPOTrainer: delete unsloth_compiled_cache/ and restart.")
    return backend
