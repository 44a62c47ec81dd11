import math
from dataclasses import dataclass, field
from typing import Literal

from gtpo.errors import UsageError

MODEL_ALIASES = {
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen": "Qwen/Qwen2.5-3B-Instruct",
    "tiny": "tiny",
}


@dataclass
class DataArguments:
    """What is trained on."""

    _argument_group_name = "data"

    dataset: str = field(
        default="gsm8k",
        metadata={"help": "gsm8k, math, arithmetic (generated), or a JSONL file with a column prompt of your own."},
    )
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of JSONL files to read instead of the Hub (gsm8k_train.jsonl, ...)."}
    )
    max_prompt_length: int = field(
        default=4000, metadata={"help": "Tokens; longer prompts are dropped and counted [Listing 1]."}
    )


@dataclass
class RewardArguments:
    """What is rewarded, in GTPO and GRPO."""

    _argument_group_name = "reward"

    reward: list[str] = field(
        default_factory=lambda: ["format", "accuracy"],
        metadata={
            "help": "Rewards that are summed: format and accuracy [Section 8.2], or one of your own as module:function "
            "or file.py:function, with TRL's signature."
        },
    )


@dataclass
class ModelArguments:
    """The policy and the backend that runs it."""

    _argument_group_name = "model"

    model: str = field(
        default="tiny",
        metadata={
            "help": "tiny (built here, CPU), llama (Llama-3.1-8B-Instruct), qwen (Qwen2.5-3B-Instruct), "
            "a Hub id or a local path."
        },
    )
    backend: str = field(
        default="auto",
        metadata={"help": "auto: unsloth on a GPU, transformers without one. unsloth | transformers choose by hand."},
    )
    lora_rank: int = field(default=64, metadata={"help": "Rank of the LoRA adapter; alpha = rank [Listing 1]."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        metadata={"help": "Layers that get an adapter [Listing 1]."},
    )
    load_in_4bit: bool = field(default=False, metadata={"help": "4-bit base weights, on a GPU [Listing 1: true]."})
    max_seq_length: int = field(default=5500, metadata={"help": "Prompt and completion, tokens [Listing 1]."})
    gpu_memory_utilization: float = field(
        default=0.4, metadata={"help": "Share of GPU memory for vLLM, 0 to 1 [Listing 1]."}
    )

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise UsageError(f"lora_rank is {self.lora_rank}: expected at least 1.")
        if not self.lora_target_modules:
            raise UsageError("lora_target_modules is empty: name the layers that get an adapter, such as q_proj.")
        if "lm_head" in self.lora_target_modules:
            raise UsageError("LoRA on lm_head is not supported: take it out of --lora_target_modules.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: expected a share of the GPU's memory, over "
                "0 and up to 1."
            )
        if self.max_seq_length < 1:
            raise UsageError(f"max_seq_length is {self.max_seq_length}: expected at least 1.")


@dataclass
class GTPOArguments:
    """The method (paper, Section 5); every ablation is a value here."""

    _argument_group_name = "GTPO"

    gamma: float = field(default=0.1, metadata={"help": "Strength of the entropy penalty, >= 0 [Eq. 11, Section 6]."})
    entropy_threshold: float = field(
        default=math.log(2.0),
        metadata={"help": "Completions of higher mean entropy are filtered, nats [Eq. 10: ln 2]."},
    )
    entropy_filter: Literal["auto", "on", "off", "negative_only"] = field(
        default="auto",
        metadata={
            "help": "auto: only if the untrained policy's entropy is below ln 2 [Eq. 10]; negative_only [Fig. 4c]."
        },
    )
    conflict_correction: bool = field(
        default=True, metadata={"help": "false: weight 1 on every token, no conflict-aware correction [Eq. 9]."}
    )
    conflict_span: Literal["anchored", "first_run", "common"] = field(
        default="anchored",
        metadata={
            "help": "Which conflict tokens count: the runs at both ends [Section 5.1], the first run anywhere, or the "
            "prefix and suffix common to the group."
        },
    )
    initial_entropy: float | None = field(
        default=None,
        metadata={
            "help": "Mean entropy of the untrained policy, nats; measured on 100 prompts if not given [Section 6]."
        },
    )

    def __post_init__(self) -> None:
        for name in ("gamma", "entropy_threshold"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}: expected a finite number >= 0.")
        if self.initial_entropy is not None and not (math.isfinite(self.initial_entropy) and self.initial_entropy >= 0):
            raise UsageError(f"initial_entropy is {self.initial_entropy}: expected nats >= 0.")


@dataclass
class RunArguments:
    """Where the run goes and how it starts."""

    _argument_group_name = "run"

    prompts_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Prompts, with G completions each, per optimizer step [Listing 1: 1]. Batch size and gradient "
            "accumulation follow from it where they are not given."
        },
    )
    resume: str | None = field(
        default=None, metadata={"help": "Continue the run directory (this one, or the one named)."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace the run directory if it exists."})
    merge: Literal["none", "16bit"] = field(
        default="none", metadata={"help": "16bit: write merged/ too, base and adapter as one standalone model."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Print the resolved settings, steps and expected memory, and stop."}
    )
