"""Settings as dataclasses: what is trained on, the policy, the method and the run.

Every field is a command-line flag and a key of a YAML file (``gtpo/cli/flags.py``), like those of TRL's GRPOConfig and
SFTConfig. Nothing heavy is imported here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from gtpo.errors import UsageError, nearest
from gtpo.prompts import SYSTEM_PROMPT, TAGS, PromptFormat, Tags, default_system_prompt

Values = dict[str, Any]  # settings, metrics or facts, by name

MODEL_ALIASES = {
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen": "Qwen/Qwen2.5-3B-Instruct",
    "smol": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tiny": "tiny",
}


def hub_name(model: str) -> str:
    """The Hub id behind a short name; any other model under its own name."""
    return MODEL_ALIASES.get(model, model)


BENCHMARK_TITLES = {
    "gsm8k": "GSM8K",
    "gsm8k_platinum": "GSM8K-Platinum",
    "math": "MATH",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "aime26": "AIME 2026",
    "hmmt_feb26": "HMMT February 2026",
    "amc23": "AMC 2023",
    "arithmetic": "Arithmetic",
    "arithmetic_hard": "Arithmetic, 4 to 5 steps",
}
SHORT_NAMES = {
    "G": "num_generations",
    "model_name_or_path": "model",  # these are TRL's names, for settings of ours
    "dataset_name": "dataset",
    "lora_r": "lora_rank",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "adapter": "runs",
}


def name_of(setting: str) -> str:
    """The name of a setting that is given by its short name, or by that of TRL."""
    return SHORT_NAMES.get(setting, setting)


def option(default: Any, text: str, check: "Check | None" = None, **metadata: Any) -> Any:
    """A field with its text in --help, and what its values are; each instance has its own copy of a list."""
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(metadata={"help": text, "check": check, **metadata}, **given)


Check = tuple[Callable[[Any], Any], str]  # whether a value is valid, and what is expected
AT_LEAST_1 = (lambda x: x >= 1, "at least 1")
NOT_NEGATIVE = (lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0")
SHARE = (lambda x: 0 < x <= 1, "a number above 0, at most 1")


def check_fields(values: Values, checks: Mapping[str, Check]) -> None:
    """Raise a UsageError for the first field that is given and not valid."""
    for name, (is_valid, expected) in checks.items():
        value = values.get(name)
        if value is not None and not is_valid(value):
            raise UsageError(f"--{name} is {value!r}: expected {expected}.")


def checks_of(classes: Sequence[type]) -> dict[str, Check]:
    """Name -> check of each field of some dataclasses that has one."""
    return {name: item.metadata["check"] for name, item in fields_of(classes).items() if item.metadata.get("check")}


class Checked:
    """A dataclass that refuses a value when it is made."""

    def __post_init__(self) -> None:
        checks = checks_of([type(self)])
        check_fields({name: getattr(self, name) for name in checks}, checks)  # a subclass may have slots


@dataclass(frozen=True, kw_only=True)
class SourceArguments(Checked):
    """Which rows are used, of training or of a benchmark, and what their columns are called."""

    limit: int | None = option(None, "Only the first N usable rows, of each benchmark too.", AT_LEAST_1)
    data_dir: str | None = option(None, "Directory of JSONL files to read instead of the Hub (gsm8k_train.jsonl, ...).")
    dataset_config: str | None = option(None, "Configuration of a Hub dataset that has several, as in load_dataset.")
    split: str | None = option(None, "Split of a Hub dataset, or of gsm8k, math, arithmetic; else train, or test.")
    prompt_column: str = option("prompt", "Column of your data with the question, or with a conversation.")
    answer_column: str = option("answer", "Column of your data with the gold answer; rewards get it as `answer`.")
    answer_list: Literal["any", "all"] = option("any", "Answers that are lists: any element is right, or all.")


@dataclass(frozen=True)
class DataArguments(SourceArguments):
    """The training data."""

    _argument_group_name = "data"

    dataset: str = option(
        "gsm8k",
        "gsm8k, math, arithmetic (generated), or your data: a JSONL, CSV or Parquet file, or a Hub id (owner/name).",
    )
    solution_column: str = option("solution", "Column of your data with the reference completion, for SFT.")
    eval_dataset: str | None = option(
        None, "Held-out set, evaluated while training: as --dataset, or test split of a benchmark. best/ follows it."
    )
    eval_rows: int | None = option(
        None, "Hold out N training rows, chosen by the seed, or N of --eval_dataset.", AT_LEAST_1
    )
    eval_split: str | None = option(None, "Split of --eval_dataset, a Hub dataset; else test.")
    max_prompt_length: int = option(4000, "Prompts of more tokens are dropped and counted [Listing 1].", AT_LEAST_1)


NO_PROMPT = "none"  # --system_prompt


def _are_four(tags: str) -> bool:
    words = tags.split()
    return len(words) == len(TAGS) and not any(a in b for a, b in permutations(words, 2))


@dataclass
class FormatArguments(Checked):
    """How questions are asked and answers are written: texts, of which :func:`read_texts` has read the files."""

    _argument_group_name = "prompt"

    tags: str = option(
        " ".join(TAGS),
        "Tags around reasoning and answer of a completion, four words [Section 8.2].",
        (_are_four, "four different tags, none a part of another"),
    )
    system_prompt: str | None = option(None, "Text, a file, or none. Default: the paper's, with --tags [Section 8.2].")
    chat_template: str | None = option(None, "Jinja file for conversations. Default: the tokenizer's.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tags = " ".join(self.tags.split())
        if self.system_prompt in (None, SYSTEM_PROMPT):  # it names the tags of the run
            self.system_prompt = default_system_prompt(self.format_tags)

    @property
    def format_tags(self) -> Tags:
        """The four tags."""
        return tuple(self.tags.split())  # type: ignore[return-value]  # checked: they are four

    @property
    def format(self) -> PromptFormat:
        """The system prompt and the tags."""
        return PromptFormat(None if self.system_prompt == NO_PROMPT else self.system_prompt, self.format_tags)


@dataclass
class PromptArguments(FormatArguments):
    """The prompt of a run, with a setting that TRL's GRPOConfig has and SFTConfig has not."""

    chat_template_kwargs: dict | str | None = option(None, 'JSON, such as {"enable_thinking": false} for Qwen3.')

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = dict(json.loads(self.chat_template_kwargs))

    @property
    def template_kwargs(self) -> Values:
        """Arguments of the chat template, by name."""
        return self.chat_template_kwargs or {}  # type: ignore[return-value]  # JSON is read above


def stored_prompt(settings: Mapping[str, Any]) -> Values:
    """The settings of :class:`PromptArguments` among stored ones; a default prompt is None: it may get other tags."""
    found = {name: settings[name] for name in fields_of([PromptArguments]) if settings.get(name) is not None}
    tags = found.get("tags", " ".join(TAGS)).split()
    if len(tags) == len(TAGS) and found.get("system_prompt") == default_system_prompt(tags):
        found["system_prompt"] = None
    return found


def read_texts(settings: Mapping[str, Any]) -> Values:
    """System prompt and chat template of a command line or a user's file, each as text or from the file it names.

    A run stores the text: it does not depend on the file, and a stranger's run names none.
    """
    texts = {}
    prompt = settings.get("system_prompt")
    template = settings.get("chat_template")
    if prompt is not None:
        texts["system_prompt"] = _text_or_file(prompt)
    if template is not None:
        texts["chat_template"] = template if "{" in template else _read(template)
    return texts


def _read(path: str) -> str:
    from gtpo.files import read_regular  # it imports yaml, which preflight may lack

    return read_regular(path).decode()


def _text_or_file(value: str) -> str:
    text = value.strip()
    is_name = "\n" not in value and len(value) < 256
    if is_name and (Path(text).is_file() or re.fullmatch(r"\S+\.(txt|md)", text)):
        text = _read(text).strip()
    if not text:
        raise UsageError("--system_prompt is empty: expected text, a file with text, or none.")
    return text


def split_function(name: str, known: Iterable[str], noun: str) -> tuple[str, str]:
    """(module, function) of ``file.py:function`` or ``module:function``, which is not one of ``known``."""
    module, _, function = name.rpartition(":")
    if not module:
        choice = ", ".join([*known, "file.py:function"])
        raise UsageError(f"{noun} {name!r} is unknown{nearest(name, known)}: pick {choice} or module:function.")
    return module, function


@dataclass
class RewardArguments(Checked):
    """The reward functions of GTPO and GRPO."""

    _argument_group_name = "reward"

    reward: list[str] = option(
        ["format", "accuracy"], "Summed: format and accuracy [Section 8.2], or your own, file.py:function as in TRL."
    )
    objective: str | None = option(None, "Of train_grpo.py: file.py:Class, a subclass of gtpo.GRPOTrainer.")
    changed_reward: bool = option(False, "With --resume: go on though the code of a reward has changed.")


ALL_LINEAR = "all-linear"  # --lora_target_modules


@dataclass
class ModelArguments(Checked):
    """The policy, its LoRA adapter and the backend."""

    _argument_group_name = "model"

    model: str = option(
        "tiny",
        "tiny, smol (SmolLM2-135M), llama (Llama-3.1-8B-Instruct), qwen (Qwen2.5-3B-Instruct), Hub id or path; or a "
        "run, or an adapter by TRL or PEFT, to train further as a new run.",
    )
    initial_adapter: str | None = option(None, "The adapter that training starts from: --model RUN sets it.")
    backend: str = option("auto", "unsloth or transformers; auto: unsloth on a GPU, transformers without one.")
    lora_rank: int = option(
        64,
        "Rank of the LoRA adapter; alpha = rank [Listing 1]. 0 trains all weights.",
        (lambda x: x >= 0, "at least 1, or 0 to train all weights"),
    )
    lora_target_modules: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Modules that get an adapter [Listing 1], or all-linear.",
        (
            lambda names: names == [ALL_LINEAR] or (names and not {ALL_LINEAR, "lm_head"} & set(names)),
            "modules such as q_proj, without lm_head, or all-linear alone",
        ),
    )
    load_in_4bit: bool = option(False, "4-bit base weights, on a GPU [Listing 1: true].")
    max_seq_length: int = option(5500, "Maximum length of prompt and completion in tokens [Listing 1].", AT_LEAST_1)
    gpu_memory_utilization: float = option(0.4, "Share of GPU memory for vLLM, 0 to 1 [Listing 1].", SHARE)

    @property
    def target_modules(self) -> list[str] | str:
        return ALL_LINEAR if self.lora_target_modules == [ALL_LINEAR] else self.lora_target_modules


@dataclass
class GTPOArguments(Checked):
    """The method (Section 5 of the paper); every ablation is a value here."""

    _argument_group_name = "GTPO"

    gamma: float = option(0.1, "Weight of the entropy penalty, >= 0 [Eq. 11, Section 6].", NOT_NEGATIVE)
    zero_advantage: Literal["entropy", "skip"] = option(
        "entropy", "A completion with A = 0 trains on its entropy alone [Eq. 11], or is skipped [Eq. 27, 28]."
    )
    entropy_threshold: float = option(
        math.log(2.0), "Completions above this entropy (nats) are filtered [Eq. 10].", NOT_NEGATIVE
    )
    entropy_filter: Literal["auto", "on", "off", "negative_only"] = option(
        "auto", "auto: on if the untrained policy's entropy is below ln 2 [Eq. 10]; negative_only [Fig. 4c]."
    )
    conflict_correction: bool = option(True, "Weight conflict tokens by lambda [Eq. 9]; false: weight 1.")
    conflict_positive_weight: float = option(2.0, "Lambda of conflict tokens with A > 0 [Eq. 9: 2].", NOT_NEGATIVE)
    conflict_span: Literal["anchored", "first_run", "common"] = option(
        "anchored", "Anchored at both ends [Section 5.1], the first run anywhere, or the prefix and suffix of all."
    )
    conflict_tokens: Literal["all", "tags"] = option(
        "all", "Lambda acts on all tokens of the span [Eq. 9], or on those of --tags alone [ours]."
    )
    initial_entropy: float | None = option(
        None,
        "Mean entropy of the untrained policy in nats, as an earlier run printed it. Default: measured [Section 6].",
        NOT_NEGATIVE,
    )


@dataclass
class RunArguments(Checked):
    """How the run starts, and what it saves."""

    _argument_group_name = "run"

    prompts_per_step: int | None = option(
        None,
        "Prompts per optimizer step, with G completions each [Listing 1: 1]; batch sizes follow from it.",
        AT_LEAST_1,
    )
    resume: str | None = option(
        None, "Resume the run in the given directory, or in --output_dir.", nargs="?", const="auto"
    )
    overwrite: bool = option(False, "Replace the run directory if it exists.")
    merge: Literal["none", "16bit"] = option("none", "16bit: also write merged/, one standalone model.")
    dry_run: bool = option(False, "Print steps, hours, expected memory and changed settings, and exit.")


def fields_of(classes: Sequence[type]) -> dict[str, dataclasses.Field[Any]]:
    """Name -> field of every setting of some dataclasses."""
    return {item.name: item for cls in classes for item in dataclasses.fields(cls) if item.init}


_OPTIMIZER = "learning rate {learning_rate:g}, Adam {adam_beta1:g} / {adam_beta2:g}"
_ROLLOUTS = ", beta {beta:g}, G {num_generations}, completions to {max_completion_length} tokens"


@dataclass
class Settings:
    """All settings of one training run; None where a method has no such group."""

    method: str  # gtpo, grpo or sft
    data: DataArguments
    model: ModelArguments
    run: RunArguments
    trainer: Any  # TRL's GRPOConfig or SFTConfig
    prompt: PromptArguments = field(default_factory=PromptArguments)
    reward: Any = None  # RewardArguments
    gtpo: Any = None  # GTPOArguments
    settings: Any = None  # the dataclass Settings of --objective
    source: Any = None  # the ModelSource of --model
    given: Values = field(default_factory=dict)  # of the trainer, before TRL resolves it: what can be read back
    made_from: Values = field(default_factory=dict)  # rows and rewards -> hash, in environment.json
    prompt_keys: bytes = b""  # of the training prompts, in prompts.bin
    changed: frozenset[str] = frozenset()  # not as in preset and defaults, before other settings follow from them

    @property
    def output_dir(self) -> Path:
        """The run directory."""
        return Path(self.trainer.output_dir)

    @property
    def completions_per_step(self) -> int:
        """Completions per optimizer step and process."""
        return self.trainer.per_device_train_batch_size * self.trainer.gradient_accumulation_steps

    @property
    def group_size(self) -> int:
        """G; supervised fine-tuning has one completion per prompt."""
        return getattr(self.trainer, "num_generations", 1)

    @property
    def scored(self) -> Sequence[str]:
        """The rewards of the run; SFT learns the format."""
        return self.reward.reward if self.reward else ("format",)

    @property
    def optimization(self) -> str:
        """The values in which two runs should not differ by accident, as text."""
        rest = ", sequences of at most {max_length} tokens" if self.method == "sft" else _ROLLOUTS
        return (_OPTIMIZER + rest).format_map(vars(self.trainer))

    def to_dict(self) -> Values:
        """Every value as ``config.yaml`` stores it: flat, as given, no secrets, nothing that only starts a run."""
        values = dict(self.given)
        groups = (self.data, self.prompt, self.reward, self.model, self.run, self.gtpo, self.settings)
        for group in filter(None, groups):
            values |= {name: getattr(group, name) for name in fields_of([type(group)])}
        return {name: value for name, value in values.items() if name not in NOT_STORED}

    def without_effect(self) -> list[str]:
        """The settings that differ from preset and default, and change nothing beside another one, as text."""
        values = {**self.to_dict(), **vars(self.run), **vars(self.reward or self.run)}
        found = []
        for name, other, none in WITHOUT_EFFECT:
            if name in self.changed and name in values and values.get(other) in none:
                found.append(f"--{name} {values[name]} has no effect with --{other} {values[other]}")
        return found

    def changed_settings(self) -> Values:
        """The part of :meth:`to_dict` from which, as ``--config``, all of it follows."""
        told = self.changed | {"model", "dataset", "output_dir"}
        return {name: value for name, value in self.to_dict().items() if name in told}


WITHOUT_EFFECT = (  # a setting, another one, and the values of that with which the first one changes nothing
    ("entropy_threshold", "entropy_filter", ("off",)),
    ("initial_entropy", "entropy_filter", ("off", "on", "negative_only")),
    ("zero_advantage", "gamma", (0,)),
    ("conflict_positive_weight", "conflict_correction", (False,)),
    ("conflict_span", "conflict_correction", (False,)),
    ("conflict_tokens", "conflict_correction", (False,)),
    ("lora_target_modules", "lora_rank", (0,)),
    ("vllm_mode", "use_vllm", (False,)),
    ("vllm_server_host", "use_vllm", (False,)),
    ("vllm_server_port", "use_vllm", (False,)),
    ("vllm_server_base_url", "use_vllm", (False,)),
    ("vllm_tensor_parallel_size", "use_vllm", (False,)),
    ("gpu_memory_utilization", "use_vllm", (False,)),
    ("num_completions_to_print", "log_completions", (False,)),
    ("answer_list", "dataset", ("gsm8k", "math", "arithmetic")),
    ("changed_reward", "resume", (None,)),
)
NOT_STORED = {"resume", "overwrite", "changed_reward", "dry_run", "hub_token"}
