"""Checks of a GPU machine before anything is downloaded.

A train script runs them before it loads the model. Driver and GPU can be checked before any package is installed:

    python -m gtpo.models.preflight
"""

import argparse
import logging
import shutil

from gtpo.arguments import Settings
from gtpo.errors import UsageError
from gtpo.models.backend import check_compute_capability, check_driver, gpu_is_available, is_installed
from gtpo.models.hub import check_upload
from gtpo.processes import is_main_process, refuse_data_parallel
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)


def check_machine(settings: Settings, backend: str) -> None:
    """UsageError for what makes a run impossible, before anything is downloaded; a warning where memory is short."""
    if settings.run.dry_run:
        return
    if getattr(settings.trainer, "use_vllm", False) and not is_installed("vllm"):
        raise UsageError("--use_vllm needs vLLM: `pip install -r requirements.txt` on a GPU, or --use_vllm false.")
    if settings.given.get("push_to_hub"):
        check_upload()
    if settings.to_dict()["use_cpu"] or not gpu_is_available():
        return
    if backend == "transformers":  # Unsloth uses one GPU
        refuse_data_parallel(settings.trainer)
    _check_memory(settings)


def _check_memory(settings: Settings) -> None:
    """Warn if a run may not fit this process's GPU; UsageError if its weights do not."""
    import torch

    from gtpo.models.hours import saved_in_16_bits
    from gtpo.models.memory import GIB, estimate, verdict
    from gtpo.models.shape import known_shape

    values = settings.to_dict()
    shape = known_shape(settings.source)
    free, total = (size / GIB for size in torch.cuda.mem_get_info())
    if is_main_process() and (saved := saved_in_16_bits(settings, total)):
        logger.warning("%s", saved)
    fault = shape and verdict(shape, values, free, total)
    if not shape or not fault:
        return
    fault += f"; {free:.1f} of {total:.1f} GiB of GPU memory are free, `nvidia-smi` lists the processes."
    if estimate(shape, values)["weights"] > free:
        raise UsageError(fault)
    if is_main_process():
        logger.warning("warning: %s", fault)


def main() -> None:
    """Check driver and GPU."""
    argparse.ArgumentParser(prog="python -m gtpo.models.preflight", description=main.__doc__).parse_args()
    has_torch = is_installed("torch")
    if not shutil.which("nvidia-smi") and not (has_torch and gpu_is_available()):
        raise UsageError("this machine has no NVIDIA GPU: run the checks on the machine that trains.")
    if fault := check_driver() or (has_torch and check_compute_capability()):
        raise UsageError(fault)


if __name__ == "__main__":
    run_script(main)
