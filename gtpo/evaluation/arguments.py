"""The settings of an evaluation as a dataclass: every field is a flag of ``evaluate.py`` and a key of its YAML file."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from gtpo.arguments import (
    AT_LEAST_1,
    BENCHMARK_TITLES,
    NOT_NEGATIVE,
    SHARE,
    Check,
    PromptArguments,
    SourceArguments,
    fields_of,
    option,
    read_texts,
)
from gtpo.errors import UsageError

K: Check = (lambda x: 1 <= x <= 10_000, "1 to 10000")  # as many as in arXiv 2407.21787
MATH_VERIFY = "math_verify"  # --grader
DATA_FLAGS = tuple(name for name in fields_of([SourceArguments]) if name != "limit")
OF_STORED = {  # a flag that reads what is stored -> the others that it takes
    "compare": {"benchmarks", "output_dir"},
    "regrade": {"benchmarks", "output_dir", "grader", *DATA_FLAGS},
}


@dataclass(frozen=True)
class EvaluationArguments(SourceArguments):
    """What is evaluated, how completions are sampled, and where they are kept."""

    _argument_group_name = "evaluation"

    benchmarks: list[str] = option(
        [], f"{', '.join(BENCHMARK_TITLES)}, or your own: a JSONL, CSV or Parquet file, or a Hub id (owner/name)."
    )
    runs: list[str] = option([], "Runs or adapters; `base` is their base model. Default: the newest finished run.")
    model: str | None = option(None, "Without --runs: tiny, smol, llama, qwen, a Hub id, a path or an adapter.")
    checkpoint: str = option("last", "Adapter of a run: last (the final one), best, or the number of a step.")
    grader: str | None = option(
        None, "math_verify alone compares the answers; or a reward function, file.py:function: above 0 is correct."
    )
    k: int = option(64, "Completions per problem.", K)
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy.", NOT_NEGATIVE)
    top_p: float = option(1.0, "Nucleus sampling; 1 disables it.", SHARE)
    seed: int = option(0, "The same seed gives the same completions.", NOT_NEGATIVE)
    max_new_tokens: int = option(1500, "Maximum tokens of a completion.", AT_LEAST_1)
    backend: Literal["auto", "vllm", "transformers"] = option("auto", "auto: vLLM on a GPU, except for tiny.")
    load_in_4bit: bool | None = option(None, "NF4 base weights, on a GPU. Default: the run's, if this machine can.")
    system_prompt: str | None = option(None, "Text, a file, or none. Default: the run's; without a run the paper's.")
    tags: str | None = option(None, "Four tags of a completion. Default: the run's; without a run the paper's.")
    chat_template: str | None = option(None, "Jinja file. Default: the run's; without a run the tokenizer's.")
    chat_template_kwargs: dict | str | None = option(None, "Arguments of the template as JSON. Default: the run's.")
    batch_size: int = option(64, "Completions per batch, Transformers.", AT_LEAST_1)
    gpu_memory_utilization: float = option(0.9, "Share of GPU memory for vLLM, 0 to 1.", SHARE)
    output_dir: str = option(
        "outputs/evaluation", "Directory of completions and scores.", (str.strip, "the path of a directory")
    )
    compare: list[str] = option(
        [], "Paired difference of stored scores: directories of evaluations, or evaluated runs; -sN are seeds of one."
    )
    regrade: bool = option(False, "Grade stored completions again without a model: all, or those of --benchmarks.")
    overwrite: bool = option(False, "Discard stored completions and sample them again.")

    @property
    def user_grader(self) -> str | None:
        """The function of ``--grader``."""
        return None if self.grader == MATH_VERIFY else self.grader

    @property
    def reading(self) -> SourceArguments:
        """How the rows of your benchmarks are read."""
        return SourceArguments(**{name: getattr(self, name) for name in fields_of([SourceArguments])})

    @property
    def prompt(self) -> dict[str, Any]:
        """The settings of :class:`PromptArguments` that are given."""
        values = {name: getattr(self, name) for name in fields_of([PromptArguments])}
        return {name: value for name, value in values.items() if value is not None} | read_texts(values)

    def __post_init__(self) -> None:
        PromptArguments(**self.prompt)  # raises
        super().__post_init__()
        if self.temperature == 0 and self.k > 1:
            raise UsageError(f"--temperature 0 samples the same completion {self.k} times: add --k 1.")

    def check_given(self, given: Collection[str]) -> None:
        """Refuse flags that ``--compare`` and ``--regrade`` read from what is stored; ``given``: what the user set."""
        for name, taken in OF_STORED.items():
            others = {*given} - taken - {name, "config"}
            if getattr(self, name) and others:
                raise UsageError(f"--{name} reads what is stored, and takes no --{min(others)}: remove it.")
