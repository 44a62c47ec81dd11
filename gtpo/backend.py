import importlib.metadata
import os
import sys

from gtpo.cli import early_arguments
from gtpo.errors import UsageError


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def gpu_is_available() -> bool:
    """Whether PyTorch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


GPU_PACKAGES = {  # as in requirements.txt; Unsloth goes on without 4-bit weights where bitsandbytes is missing
    "unsloth": "2026.10.7",
    "unsloth_zoo": "2026.10.7",
    "vllm": "0.27.1",
    "bitsandbytes": "0.50.2",
}


def load_backend(argv: list[str] | None = None) -> str:
    """Decide between Unsloth and Transformers, and import Unsloth where it is chosen: the first thing a script does.

    Args:
        argv: Command line without the program; ``sys.argv[1:]`` by default.

    Returns:
        "unsloth" or "transformers".

    Raises:
        UsageError: If the backend is unknown, or Unsloth is chosen and cannot run, or was imported too late.
    """
    early = early_arguments(list(sys.argv[1:] if argv is None else argv))
    choice = early.backend
    if choice not in ("auto", "unsloth", "transformers"):
        raise UsageError(f"--backend {choice!r} is unknown: pick one of auto, unsloth, transformers.")
    if choice == "auto":
        choice = "unsloth" if early.model != "tiny" and gpu_is_available() else "transformers"
    if choice == "transformers" or early.dry_run:  # a plan needs neither GPU nor packages
        return choice
    if not gpu_is_available():
        raise UsageError(
            "--backend unsloth needs a GPU that PyTorch sees, and there is none: use --backend transformers."
        )
    for package, pinned in GPU_PACKAGES.items():
        if not is_installed(package):
            raise UsageError(
                f"{package} is not installed: `pip install -r requirements.txt`, or --backend transformers."
            )
        if (found := importlib.metadata.version(package)) != pinned:
            raise UsageError(f"{package} {found} is installed, {pinned} is needed: `pip install -r requirements.txt`.")
    early_imports = {"trl", "transformers", "peft"} & sys.modules.keys()
    if early_imports and "unsloth" not in sys.modules:
        raise UsageError(
            f"{sorted(early_imports)[0]} was imported before Unsloth, which patches it: load_backend() first."
        )
    if os.environ.get("UNSLOTH_VLLM_STANDBY") == "1":
        logger.warning("UNSLOTH_VLLM_STANDBY=1: Unsloth takes its own share of the GPU, not --gpu_memory_utilization")
    import unsloth  # noqa: F401  (its import is its effect)
    from trl import GRPOTrainer

    if not GRPOTrainer.__name__.startswith("Unsloth"):
        raise UsageError("Unsloth did not patch trl.GRPOTrainer: delete unsloth_compiled_cache/ and start again.")
    return choice
