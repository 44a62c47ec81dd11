"""What a run needs of a machine: the settings that checks and estimates read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gtpo.arguments import fields_of


@dataclass(frozen=True)
class Workload:
    """The settings that decide what a run needs of a machine; SFT has none of those with a default."""

    model: str
    backend: str
    bf16: bool
    fp16: bool
    load_in_4bit: bool
    lora_rank: int
    lora_target_modules: list[str]
    max_prompt_length: int
    max_seq_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    optim: str
    gpu_memory_utilization: float
    use_cpu: bool = False
    max_length: int | None = None
    max_completion_length: int | None = None
    num_generations: int | None = None
    generation_batch_size: int | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    beta: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The fields of flat settings: ``Settings.to_dict()``, or a preset on top of the defaults."""
        return cls(**{name: values[name] for name in fields_of([cls]) if name in values})

    @property
    def is_unsloth(self) -> bool:
        """Whether Unsloth trains on the machine of the settings, by the rule of ``choose_training_backend``."""
        return self.backend == "unsloth" or (self.backend == "auto" and not self.use_cpu and self.model != "tiny")

    @property
    def shares_gpu_with_vllm(self) -> bool:
        """Whether vLLM generates on the GPU that trains."""
        return self.use_vllm and self.vllm_mode == "colocate"


def step_seconds(rates: Mapping[str, Any], model: str, dataset: str, group_size: int) -> float | None:
    """Seconds of a step of one prompt on an A100: its longest completion, then loss and backward of each.

    Args:
        rates: The section ``paper`` of configs/experiments.yaml.
        model: llama or qwen.
        dataset, group_size: Of the run.

    Returns:
        None for a run that the section has no number for.
    """
    tokens = rates["longest_completion"].get(dataset, {}).get(group_size)
    if tokens is None or model not in rates["seconds_per_token"]:
        return None
    return float(tokens * rates["seconds_per_token"][model] + group_size * rates["seconds_per_micro_batch"][model])
