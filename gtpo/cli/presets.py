"""The preset of a model: its own file, or ``configs/own.yaml``, of which a part follows from the machine.

``llama`` and ``qwen`` have the paper's listing, for a GPU. ``smol`` and ``tiny`` have values for a CPU; ``smol`` takes
precision, backend and memory from ``own.yaml`` on a GPU. Presets are part of the repository, not of the package.
"""

import logging
import math
from pathlib import Path
from typing import NamedTuple

from gtpo.arguments import Values
from gtpo.errors import UsageError
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.backend import check_driver, gpu_is_available
from gtpo.models.shape import scale_of
from gtpo.models.source import LARGE, ModelSource

logger = logging.getLogger(__name__)

_LENGTHS = ("max_seq_length", "max_prompt_length", "max_completion_length", "max_length")


class Preset(NamedTuple):
    """The preset of a method and a model, ``own`` or an alias, on a machine, ``gpu`` or ``cpu``."""

    method: str
    name: str
    machine: str

    @property
    def path(self) -> Path:
        """Its file."""
        return CONFIGS / "own.yaml" if self.name == "own" else CONFIGS / self.method / f"{self.name}.yaml"

    def values(self) -> Values:
        """Its settings, but for those that follow from the model."""
        own = read_yaml(CONFIGS / "own.yaml")
        rollouts = "sft" if self.method == "sft" else "rollouts"
        of_machine = {**own[self.machine], **own.get(f"{self.machine}_{rollouts}", {})}
        if self.name == "own":
            of_step = own.get(f"own_{self.machine}_{rollouts}", {})
            return own["all"] | own[rollouts] | own[self.method] | of_machine | of_step
        values = read_yaml(self.path)
        return values | of_machine if (self.name, self.machine) == ("smol", "gpu") else values

    def values_of(self, source: ModelSource) -> Values:
        """All of its settings."""
        return self.values_for(*scale_of(source)) if self.name == "own" else self.values()

    def values_for(self, parameters: float, context: float) -> Values:
        """The settings of ``own`` with the LoRA rate by the size of a model, and lengths within its context."""
        values = self.values()
        rates = read_yaml(self.path)["learning_rate"]
        values["learning_rate"] = rates[min(size for size in rates if parameters <= size)]
        longest = values["max_seq_length"]
        for name in _LENGTHS:
            if name in values and context < longest:
                values[name] = math.floor(values[name] * context / longest)
        return values


def preset_for(
    method: str, source: ModelSource, backend: str | None = None, use_cpu: bool | None = None, dry_run: bool = False
) -> Preset:
    """The preset of a model on this machine, or with ``use_cpu`` on its CPU.

    A dry run plans a run that needs a GPU (llama, qwen, Unsloth) where there is none; otherwise that is a UsageError.
    """
    needs_gpu = source.preset in LARGE or backend == "unsloth"
    on_cpu = source.is_tiny or use_cpu
    has_gpu = (needs_gpu or not on_cpu) and gpu_is_available()  # imports PyTorch
    if needs_gpu and not has_gpu and not dry_run:
        instead = f"on a CPU run `python train_{method}.py --model tiny --dataset arithmetic`"
        needed = f"--model {source.asked} trains on a GPU, which PyTorch does not see: {instead}."
        raise UsageError(check_driver() or needed)
    on_gpu = has_gpu or needs_gpu
    if not on_cpu and not on_gpu and (fault := check_driver()):
        logger.warning("training runs on the CPU: %s", fault)
    return Preset(method, source.preset, "gpu" if on_gpu else "cpu")


def of_this_machine(of_preset: Values, source: ModelSource, backend: str) -> Values:
    """Settings that adapt those of a preset to this machine; --config and the command line override them."""
    import torch

    adapted: Values = {}
    if backend == "unsloth" and of_preset.get("use_cpu"):  # the tiny model's preset is for a CPU
        adapted = {"use_cpu": False, "bf16": True}
    gpu = torch.cuda
    if (
        (of_preset | adapted).get("bf16")
        and gpu.is_available()
        and not gpu.is_bf16_supported(including_emulation=False)
    ):
        adapted |= {"bf16": False, "fp16": True}
    if "entropy_filter" in of_preset and source.adapter:
        adapted["entropy_filter"] = "auto"  # Eq. 10; the preset has what the paper found for its own model
    return adapted
