"""Training rows and benchmarks: GSM8K, MATH, AIME, AMC (Hub or a directory of JSONL files), arithmetic, your JSONL.

A training row is ``prompt`` (a conversation), ``answer`` (the gold answer as text) and ``solution`` (the reference
completion in the paper's tags, for SFT). Rows without a readable gold answer and prompts over the length limit are
dropped and counted. ``datasets`` is imported when rows are read.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo.arithmetic import arithmetic
from gtpo.errors import UsageError, nearest
from gtpo.grading import gsm8k_gold, last_boxed
from gtpo.prompts import to_completion, to_messages

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a split is stored, and how its rows are read."""

    hub_id: str
    configs: tuple[str, ...]
    hub_split: str
    file: str  # in --data_dir
    columns: tuple[str, ...]
    read: Callable[[Row], tuple[str, str | None, str | None]]  # question, gold, reasoning


def _read_gsm8k(row: Row) -> tuple[str, str | None, str | None]:
    reasoning = row["answer"].rpartition("####")[0].strip()
    without_calculator = re.sub(r"<<[^<>]*>>", "", reasoning)  # <<3*4=12>>
    return row["question"], gsm8k_gold(row["answer"]), without_calculator


def _read_math(row: Row) -> tuple[str, str | None, str | None]:
    return row["problem"], last_boxed(row["solution"]), row["solution"]


def _read_math500(row: Row) -> tuple[str, str | None, str | None]:
    return row["problem"], row["answer"], row["solution"]


def _read_aime(row: Row) -> tuple[str, str | None, str | None]:
    return row["problem"], str(row["answer"]), None


def _read_amc(row: Row) -> tuple[str, str | None, str | None]:
    return row["question"], str(row["answer"]), None


_MATH_CONFIGS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_GSM8K_COLUMNS, _MATH_COLUMNS = ("question", "answer"), ("problem", "solution")

TRAIN = {
    "gsm8k": Source("openai/gsm8k", ("main",), "train", "gsm8k_train.jsonl", _GSM8K_COLUMNS, _read_gsm8k),
    "math": Source("EleutherAI/hendrycks_math", _MATH_CONFIGS, "train", "math_train.jsonl", _MATH_COLUMNS, _read_math),
}
BENCHMARKS = {
    "gsm8k": Source("openai/gsm8k", ("main",), "test", "gsm8k_test.jsonl", _GSM8K_COLUMNS, _read_gsm8k),
    "math": Source("EleutherAI/hendrycks_math", _MATH_CONFIGS, "test", "math_test.jsonl", _MATH_COLUMNS, _read_math),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        ("default",),
        "test",
        "math500_test.jsonl",
        ("problem", "solution", "answer"),
        _read_math500,
    ),
    "aime24": Source(
        "HuggingFaceH4/aime_2024", ("default",), "train", "aime2024.jsonl", ("problem", "answer"), _read_aime
    ),
    "aime25": Source("math-ai/aime25", ("default",), "test", "aime2025.jsonl", ("problem", "answer"), _read_aime),
    "amc23": Source("math-ai/amc23", ("default",), "test", "amc2023.jsonl", ("question", "answer"), _read_amc),
}
DATASETS = (*TRAIN, "arithmetic")
ARITHMETIC_STEPS = {"arithmetic": (1, 2, 3), "arithmetic_hard": (4, 5)}  # benchmark -> operations in a problem
BENCHMARK_TITLES = {
    "gsm8k": "GSM8K",
    "math": "MATH",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "amc23": "AMC 2023",
    "arithmetic": "Arithmetic",
    "arithmetic_hard": "Arithmetic, 4 to 5 steps",
}

ARITHMETIC_TRAIN_ROWS, ARITHMETIC_TEST_ROWS = 4000, 500


def load_train(name: str, data_dir: str | None = None, seed: int = 0) -> "Dataset":
    """The training split of ``name``: columns prompt, answer, solution. The number of dropped rows is logged.

    Args:
        name: gsm8k, math, arithmetic, or your JSONL file with a column ``prompt`` (a question, or a conversation that
            is used as it is), and ``answer`` and ``solution`` where the rewards or SFT need them. Other columns are
            passed to the rewards.
        data_dir: Directory of JSONL files that replace the Hub (``TRAIN`` has their names).
        seed: Seed of the generated arithmetic problems; other datasets ignore it.

    Raises:
        UsageError: If the name is unknown, or a file is missing, empty, or lacks a column.
    """
    if name.endswith((".jsonl", ".json", ".jsonl.gz")):
        return _read_own(Path(name))
    if name == "arithmetic":
        rows = list(arithmetic("train", ARITHMETIC_TRAIN_ROWS, seed))
    elif name in TRAIN:
        rows = _read(name, TRAIN[name], data_dir)
    else:
        raise UsageError(
            f"dataset {name!r} is unknown{nearest(name, DATASETS)}: pick one of {', '.join(DATASETS)}, or a JSONL file."
        )
    columns: dict[str, list[Any]] = {
        "prompt": [to_messages(row["question"]) for row in rows],
        "answer": [row["gold"] for row in rows],
        "solution": [to_completion(row["reasoning"], row["gold"]) for row in rows],
    }
    return _to_dataset(columns)


def load_benchmark(name: str, data_dir: str | None = None) -> list[Row]:
    """The problems of a benchmark as rows {id, question, gold}, in the order of the source.

    Raises:
        UsageError: As :func:`load_train`.
    """
    if name in ARITHMETIC_STEPS:
        rows = list(arithmetic("test", ARITHMETIC_TEST_ROWS, seed=0, steps=ARITHMETIC_STEPS[name]))
    elif name in BENCHMARKS:
        rows = _read(name, BENCHMARKS[name], data_dir)
    else:
        raise UsageError(
            f"benchmark {name!r} is unknown{nearest(name, BENCHMARK_TITLES)}: pick from {', '.join(BENCHMARK_TITLES)}."
        )
    return [{"id": f"{name}/{i}", "question": r["question"], "gold": r["gold"]} for i, r in enumerate(rows)]


def drop_long_prompts(rows: "Dataset", tokenizer: Any, max_prompt_length: int) -> "Dataset":
    """Drop prompts of more than ``max_prompt_length`` tokens, chat template included; their number is logged.

    Raises:
        UsageError: If no prompt remains.
    """
    kept = [
        i
        for i, prompt in enumerate(rows["prompt"])
        if len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        <= max_prompt_length
    ]
    if not kept:
        raise UsageError(
            f"all {len(rows)} prompts are over max_prompt_length {max_prompt_length} tokens: raise --max_prompt_length."
        )
    if len(kept) < len(rows):
        logger.warning("%d of %d prompts dropped: over %d tokens", len(rows) - len(kept), len(rows), max_prompt_length)
    return rows.select(kept)


def to_demonstrations(rows: "Dataset") -> "Dataset":
    """Prompts with their reference solutions: columns prompt and completion, as TRL's SFTTrainer expects.

    Raises:
        UsageError: If the rows have no solutions.
    """
    if "solution" not in rows.column_names:
        raise UsageError("SFT needs reference solutions: the dataset has no column 'solution'.")
    turns = [[{"role": "assistant", "content": solution}] for solution in rows["solution"]]
    return _to_dataset({"prompt": rows["prompt"], "completion": turns})


def _read_own(path: Path) -> "Dataset":
    rows = _read_jsonl(path, f"{path} does not exist: --dataset names gsm8k, math, arithmetic or a JSONL file.")
    if "prompt" not in rows.column_names:
        raise UsageError(
            f"{path} has no column 'prompt': expected a question or a conversation in each, found {rows.column_names}."
        )
    ours = {"prompt", "answer", "solution"} & set(rows.column_names)
    complete = rows.filter(lambda row: all(row[name] not in (None, "", []) for name in ours))
    if not len(complete):
        raise UsageError(f"{path} has no row with {', '.join(sorted(ours))} ({len(rows)} read).")
    if len(complete) < len(rows):
        logger.warning(
            "%s: %d of %d rows dropped: empty prompt, answer or solution",
            path,
            len(rows) - len(complete),
            len(rows),
        )
    columns = {name: list(complete[name]) for name in complete.column_names}
    columns["prompt"] = [to_messages(prompt) if isinstance(prompt, str) else prompt for prompt in columns["prompt"]]
    for prompt in columns["prompt"]:
        if not isinstance(prompt, list) or any(not isinstance(turn, dict) or "role" not in turn for turn in prompt):
            raise UsageError(
                f"{path}: prompt {prompt!r} is neither a string nor a conversation [{{'role': ..., 'content': ...}}]."
            )
    if "answer" in columns:
        columns["answer"] = [str(answer) for answer in columns["answer"]]
    return _to_dataset(columns)


def _to_dataset(columns: dict[str, list[Any]]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _read(name: str, source: Source, data_dir: str | None) -> list[Row]:
    raw = _raw_rows(name, source, data_dir)
    rows = []
    for row in raw:
        if any(row[column] is None for column in source.columns):
            continue
        question, gold, reasoning = source.read(row)
        if question and gold is not None:
            rows.append({"question": question, "gold": gold, "reasoning": reasoning})
    if not rows:
        raise UsageError(f"dataset {name!r} has no row with a readable gold answer ({len(raw)} rows read).")
    if len(rows) < len(raw):
        logger.warning("%s: %d of %d rows dropped: no readable gold answer", name, len(raw) - len(rows), len(raw))
    return rows


def _raw_rows(name: str, source: Source, data_dir: str | None) -> "Dataset":
    if data_dir is None:
        where = source.hub_id
        try:
            from datasets import concatenate_datasets, load_dataset

            parts = [load_dataset(where, config, split=source.hub_split) for config in source.configs]
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read {where} from the Hub: {_first_line(error)} Check the network, or set --data_dir to a "
                f"directory that contains {source.file}."
            ) from error
        rows = concatenate_datasets(parts)
    else:
        path = Path(data_dir) / source.file
        packed = path.with_name(f"{path.name}.gz")
        path = packed if packed.is_file() and not path.is_file() else path
        where = str(path)
        rows = _read_jsonl(path, f"{where} does not exist: for {name}, --data_dir must contain {source.file}.")
    missing = [column for column in source.columns if column not in rows.column_names]
    if missing:
        raise UsageError(f"{where} has no column {missing[0]!r}: expected {source.columns}, found {rows.column_names}.")
    return rows


def _read_jsonl(path: Path, if_missing: str) -> "Dataset":
    if not path.is_file():
        raise UsageError(if_missing)
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty: expected one JSON object per line.")
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset("json", data_files=str(path), split="train")
    except (OSError, ValueError, DatasetGenerationError) as error:
        reason = _first_line(error.__cause__ or error)
        raise UsageError(f"{path} cannot be read: {reason} Expected one JSON object per line.") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."
