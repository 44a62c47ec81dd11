"""Checks of a GPU machine before anything is downloaded.

Each check returns None, or one sentence with the command that fixes it. A train script runs them before it loads the
model, ``--dry_run`` prints them, and so does

    python -m gtpo.models.preflight --model llama

with the model's preset, also before any package is installed: what needs a missing package is left out then.
"""

import argparse
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.errors import UsageError
from gtpo.models.backend import check_compute_capability, check_driver, gpu_is_available, is_installed
from gtpo.models.hub import (
    check_access,
    check_disk,
    hub_is_reachable,
    is_cached,
    is_hub_id,
    not_reachable,
)
from gtpo.models.workload import Workload
from gtpo.processes import IS_MAIN_PROCESS, refuse_data_parallel
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)

COLUMNS = 100


class Check(NamedTuple):
    """The result of one check: ``fault`` is None, or the sentence; a fatal fault makes the run impossible."""

    name: str
    fault: str | None
    fatal: bool = True


def check_machine(settings: Settings, backend: str) -> None:
    """Run the checks before anything is downloaded: warnings are logged. A dry run and a run on a CPU are not checked.

    Args:
        settings: All settings of the run.
        backend: unsloth or transformers.

    Raises:
        UsageError: For the first fault that makes the run impossible.
    """
    work = Workload.of(settings.to_dict())
    if settings.run.dry_run:
        return
    if work.use_cpu or not gpu_is_available():
        if work.use_vllm and work.vllm_mode == "server":
            raise UsageError(
                "--vllm_mode server needs a GPU, because TRL sends the weights to the server over NCCL: use "
                "--vllm_mode colocate, or --use_vllm false."
            )
        return
    if backend == "transformers":  # Unsloth uses one GPU
        refuse_data_parallel(settings.trainer)
    for check in checks(work, backend):
        if check.fault and check.fatal:
            raise UsageError(check.fault)
        if check.fault and IS_MAIN_PROCESS:
            logger.warning("warning: %s", check.fault)


def describe_dry_run(settings: Settings, backend: str, rows: int, held_out: int) -> str:
    """What ``--dry_run`` prints, as YAML: the checks, the plan of steps, time and memory, and the changed settings.

    Comments have at most ``COLUMNS`` columns.

    Args:
        settings: All settings of the run.
        backend: unsloth or transformers.
        rows: Training rows; 0 if they are not known before a download.
        held_out: Held-out rows.
    """
    from gtpo.models.memory import describe_plan

    text = describe_checks(settings, backend) + describe_plan(settings, rows, held_out=held_out)
    lines = (
        textwrap.fill(line, COLUMNS, subsequent_indent="#     ", break_long_words=False, break_on_hyphens=False)
        if line.startswith("#")
        else line
        for line in text.splitlines()
    )
    return "".join(f"{line}\n" for line in lines)


def describe_checks(settings: Settings, backend: str) -> str:
    """The results as YAML comments, for ``--dry_run``; empty for a run on a CPU."""
    work = Workload.of(settings.to_dict())
    if work.use_cpu:
        return ""
    if gpu_is_available():
        lines = _lines(checks(work, backend))
    else:
        command = shlex.join(["python", "-m", "gtpo.models.preflight", "--model", work.model])
        where = f"check the machine of the run first: {command}"
        lines = [check_driver() or where]
    return "".join(f"# {line}\n" for line in lines)


def checks(work: Workload, backend: str) -> Iterator[Check]:
    """The checks of a run on a GPU, in this order: the machine, then the Hub. Nothing is downloaded but a config.json.

    Args:
        work: The settings that they depend on.
        backend: unsloth or transformers.
    """
    model = MODEL_ALIASES.get(work.model, work.model)
    yield from check_before_installation(compiles=backend == "unsloth" or work.shares_gpu_with_vllm)
    shape = _shape(model)
    if shape is not None and gpu_is_available():
        from gtpo.models.memory import estimate

        share = work.gpu_memory_utilization if work.shares_gpu_with_vllm else 0.0
        yield check_memory(estimate(shape, work), share)
    if not is_hub_id(model) or not is_installed("huggingface_hub"):
        return
    copy = backend == "unsloth" and work.load_in_4bit  # Unsloth has 4-bit copies of known models
    if is_cached(model, copy):
        return
    reachable = hub_is_reachable()
    yield Check("Hub", None if reachable else not_reachable(model))
    if reachable:
        yield Check("access to the model", check_access(model, copy), fatal=not copy)
    if shape is not None:
        from gtpo.models.memory import download_size

        yield Check("disk", check_disk(model, download_size(shape, copy)))


# The machine


def check_before_installation(compiles: bool) -> Iterator[Check]:
    """The checks that need neither a package nor the settings of a run, and those of PyTorch where it is installed.

    Args:
        compiles: Whether the run uses Triton or torch.compile.
    """
    yield Check("driver", check_driver())
    if is_installed("torch") and gpu_is_available():
        yield Check("compute capability", check_compute_capability())
    elif is_installed("torch"):
        yield Check("PyTorch", check_pytorch(), fatal=False)  # the installation may replace it
    yield Check("C compiler", check_compiler(), fatal=compiles)
    yield Check("Python headers", check_python_headers(), fatal=compiles)


def check_pytorch() -> str | None:
    """Why PyTorch sees no GPU where the driver is new enough."""
    import torch

    if check_driver():
        return None
    why = "CUDA_VISIBLE_DEVICES hides it" if "CUDA_VISIBLE_DEVICES" in os.environ else "it may be a build for CPUs"
    return (
        f"PyTorch {torch.__version__} sees no GPU ({why}): `unset CUDA_VISIBLE_DEVICES`, or install PyTorch for CUDA."
    )


def check_compiler() -> str | None:
    """Triton and TorchInductor compile their launchers with a C compiler: ``CC``, gcc or clang."""
    if any(shutil.which(name) for name in os.environ.get("CC", "gcc clang").split()):
        return None
    return (
        "there is no C compiler (CC, gcc or clang), and Triton and torch.compile need one: `unset CC`, or "
        "`sudo apt-get install build-essential`."
    )


def check_python_headers() -> str | None:
    """What they compile includes Python.h, which Linux distributions ship in a separate package."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if header.is_file():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{header} is missing, and Triton and torch.compile need it: `sudo apt-get install python{version}-dev`."


def check_memory(parts: Mapping[str, float], share: float) -> Check:
    """Whether the weights, which is fatal, and the whole plan fit into the free GPU memory.

    Args:
        parts: Peak memory by part (GiB), of :func:`gtpo.models.memory.estimate`.
        share: The part of all GPU memory that vLLM reserves, 0 to 1.
    """
    import torch

    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())  # of this process's GPU
    weights, need = parts["weights"] + parts.get("vLLM's weights", 0.0), sum(parts.values())
    fault = None
    if weights > free:
        fault = f"the weights take {weights:.1f} GiB: choose another GPU or a smaller --model"
    elif need > free:
        fault = f"the run is estimated to need {need:.1f} GiB: lower --max_seq_length (`--dry_run` shows the parts)"
    elif share * total > free:
        fault = f"vLLM reserves {share * total:.1f} GiB: add `--gpu_memory_utilization {int(100 * free / total) / 100}`"
    if fault:
        fault += (
            f", or stop the processes that `nvidia-smi` lists; {free:.1f} of {total:.1f} GiB of GPU memory are free."
        )
    return Check("GPU memory", fault, fatal=weights > free)


def _shape(model: str) -> Any:
    """The model's ``gtpo.models.memory.Shape``; None where the plan has no estimate for it."""
    if not is_installed("torch") or not (model in MODEL_ALIASES.values() or is_installed("transformers")):
        return None
    from gtpo.models.memory import shape_of

    try:
        return shape_of(model)
    except UsageError as error:
        logger.debug("no estimate of memory and disk: %s", error)
        return None


# The command


def main() -> None:
    """Print the checks of a model's preset; exit code 2 if the run is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m gtpo.models.preflight", description="Check a GPU machine before anything is downloaded."
    )
    parser.add_argument("--model", default="llama", help="llama, qwen, a Hub id or a local path.")
    model = parser.parse_args().model
    if not (shutil.which("nvidia-smi") or (is_installed("torch") and gpu_is_available())):
        raise UsageError("this machine has no NVIDIA GPU: run the checks on the machine that trains.")
    if is_installed("yaml"):
        found = list(checks(_workload_of_preset(model), "unsloth"))
    else:
        found = list(check_before_installation(compiles=True))
    print("\n".join(_lines(found)))
    if any(check.fault and check.fatal for check in found):
        sys.exit(2)


def _workload_of_preset(model: str) -> Workload:
    from gtpo.files import CONFIGS, read_yaml  # needs PyYAML

    presets = ("llama", "qwen", "tiny")  # other models take Qwen's on a GPU
    alias = next((alias for alias in presets if model in (alias, MODEL_ALIASES[alias])), "qwen")
    preset = read_yaml(CONFIGS / "gtpo" / f"{alias}.yaml")
    derived = {"fp16": False, "use_cpu": False, "gradient_accumulation_steps": preset["num_generations"]}
    return Workload.of(derived | preset | {"model": model, "backend": "unsloth"})


def _lines(found: Iterator[Check] | list[Check]) -> list[str]:
    found = list(found)
    passed = ", ".join(check.name for check in found if not check.fault)
    return [f"ok: {passed}", *(f"{'error' if c.fatal else 'warning'}: {c.fault}" for c in found if c.fault)]


if __name__ == "__main__":
    run_script(main)
