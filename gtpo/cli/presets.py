"""The preset of a model: its own file, or ``configs/own.yaml``, of which a part follows from the machine.

``llama`` and ``qwen`` have the paper's listing, for a GPU. ``smol`` and ``tiny`` have values for a CPU; ``smol`` takes
precision, backend and memory from ``own.yaml`` on a GPU. Presets are part of the repository, not of the package.
"""

import math
from pathlib import Path
from typing import NamedTuple

from gtpo.arguments import Values
from gtpo.files import CONFIGS, read_yaml

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
            return own["all"] | own[rollouts] | own[self.method] | of_machine
        values = read_yaml(self.path)
        return values | of_machine if (self.name, self.machine) == ("smol", "gpu") else values

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
