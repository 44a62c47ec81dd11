"""The datasets of the paper: where GSM8K, MATH, AIME and AMC are stored and how their rows are read."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gtpo.grading import gsm8k_gold, last_boxed

Row = dict[str, Any]
Read = Callable[[Row], tuple[str, str | None, str | None]]  # question, gold, reasoning


@dataclass(frozen=True)
class Source:
    """Where a split is stored, and how its rows are read."""

    hub_id: str
    configs: tuple[str, ...]
    hub_split: str
    file: str  # in --data_dir
    columns: tuple[str, ...]
    read: Read
    rows: int = 0  # with a readable gold answer


def _read_gsm8k(row: Row) -> tuple[str, str | None, str | None]:
    reasoning = row["answer"].rpartition("####")[0].strip()
    without_calculator = re.sub(r"<<[^<>]*>>", "", reasoning)  # <<3*4=12>>
    return row["question"], gsm8k_gold(row["answer"]), without_calculator


def _read_math(row: Row) -> tuple[str, str | None, str | None]:
    return row["problem"], last_boxed(row["solution"]), row["solution"]


_MATH_CONFIGS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
_AIME: tuple[tuple[str, ...], Read] = (("problem", "answer"), lambda row: (row["problem"], row["answer"], None))
_GSM8K_COLUMNS, _MATH_COLUMNS = ("question", "answer"), ("problem", "solution")

TRAIN = {
    "gsm8k": Source("openai/gsm8k", ("main",), "train", "gsm8k_train.jsonl", _GSM8K_COLUMNS, _read_gsm8k, 7473),
    "math": Source(
        "EleutherAI/hendrycks_math", _MATH_CONFIGS, "train", "math_train.jsonl", _MATH_COLUMNS, _read_math, 7498
    ),
}
BENCHMARKS = {
    "gsm8k": Source("openai/gsm8k", ("main",), "test", "gsm8k_test.jsonl", _GSM8K_COLUMNS, _read_gsm8k, 1319),
    "math": Source(
        "EleutherAI/hendrycks_math", _MATH_CONFIGS, "test", "math_test.jsonl", _MATH_COLUMNS, _read_math, 5000
    ),
    "math500": Source(
        *("HuggingFaceH4/MATH-500", ("default",), "test", "math500_test.jsonl", ("problem", "solution", "answer")),
        read=lambda row: (row["problem"], row["answer"], row["solution"]),
        rows=500,
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", ("default",), "train", "aime2024.jsonl", *_AIME, 30),
    "aime25": Source("math-ai/aime25", ("default",), "test", "aime2025.jsonl", *_AIME, 30),
    "amc23": Source(
        *("math-ai/amc23", ("default",), "test", "amc2023.jsonl", ("question", "answer")),
        read=lambda row: (row["question"], row["answer"], None),
        rows=40,
    ),
}
DATASETS = (*TRAIN, "arithmetic")
ARITHMETIC_STEPS = {"arithmetic": (1, 2, 3), "arithmetic_hard": (4, 5)}  # benchmark -> operations in a problem
