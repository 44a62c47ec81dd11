"""Training rows and benchmark problems: the datasets of the paper, generated arithmetic, and your own data.

A training row is ``prompt`` (a conversation), ``answer`` (the gold answer as text) and ``solution`` (the reference
completion, for SFT). Rows that cannot be used and prompts over the length limit are dropped and counted by reason.
``datasets`` is imported when rows are read.
"""

import contextlib
import json
import logging
import math
import random
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo.arguments import BENCHMARK_TITLES, DataArguments, Settings
from gtpo.data.arithmetic import arithmetic
from gtpo.data.tables import Row, Table, check_source, is_on_hub, read_file, read_hub, read_table
from gtpo.data.tokenizer import encode_prompt
from gtpo.errors import UsageError, nearest
from gtpo.grading import alternatives, gsm8k_gold, is_correct, last_boxed
from gtpo.prompts import PAPER, PromptFormat

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

ARITHMETIC_TRAIN_ROWS, ARITHMETIC_TEST_ROWS = 4000, 500
ARITHMETIC_STEPS = {"arithmetic": (1, 2, 3), "arithmetic_hard": (4, 5)}  # benchmark -> operations in a problem


@dataclass(frozen=True)
class Problem:
    """A problem of a benchmark."""

    id: str  # BENCHMARK/NUMBER
    question: Any  # text, or a conversation
    gold: str
    columns: dict[str, Any] = field(default_factory=dict)  # of its row, for --grader


# The datasets of the paper

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


_MATH_CONFIGS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
_GSM8K = ("openai/gsm8k", ("main",))
_MATH = ("EleutherAI/hendrycks_math", _MATH_CONFIGS)
_OF_GSM8K: tuple[tuple[str, ...], Read] = (("question", "answer"), _read_gsm8k)
_OF_MATH: tuple[tuple[str, ...], Read] = (
    ("problem", "solution"),
    lambda row: (row["problem"], last_boxed(row["solution"]), row["solution"]),
)
_OF_AIME: tuple[tuple[str, ...], Read] = (("problem", "answer"), lambda row: (row["problem"], row["answer"], None))

TRAIN = {
    "gsm8k": Source(*_GSM8K, "train", "gsm8k_train.jsonl", *_OF_GSM8K, 7473),
    "math": Source(*_MATH, "train", "math_train.jsonl", *_OF_MATH, 7498),
}
BENCHMARKS = {
    "gsm8k": Source(*_GSM8K, "test", "gsm8k_test.jsonl", *_OF_GSM8K, 1319),
    "math": Source(*_MATH, "test", "math_test.jsonl", *_OF_MATH, 5000),
    "math500": Source(
        *("HuggingFaceH4/MATH-500", ("default",), "test", "math500_test.jsonl", ("problem", "solution", "answer")),
        read=lambda row: (row["problem"], row["answer"], row["solution"]),
        rows=500,
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", ("default",), "train", "aime2024.jsonl", *_OF_AIME, 30),
    "aime25": Source("math-ai/aime25", ("default",), "test", "aime2025.jsonl", *_OF_AIME, 30),
    "amc23": Source(
        *("math-ai/amc23", ("default",), "test", "amc2023.jsonl", ("question", "answer")),
        read=lambda row: (row["question"], row["answer"], None),
        rows=40,
    ),
}
DATASETS = (*TRAIN, "arithmetic")


def _rows_of(name: str, split: str, data_dir: str | None, seed: int = 0) -> list[Row]:
    """The rows {question, gold, reasoning} of a dataset of the paper, or of arithmetic: split train, or its test."""
    if name in ARITHMETIC_STEPS:
        if split == "train":
            return list(arithmetic("train", ARITHMETIC_TRAIN_ROWS, seed))
        return list(arithmetic("test", ARITHMETIC_TEST_ROWS, seed=0, steps=ARITHMETIC_STEPS[name]))
    source = (TRAIN if split == "train" else BENCHMARKS)[name]
    if data_dir is None:
        parts = [read_hub(source.hub_id, config, source.hub_split) for config in source.configs]
        table = Table.of(source.hub_id, (row for part in parts for row in part.rows))
    else:
        table = read_file(Path(data_dir) / source.file)
    kept, dropped = _usable(table, _columns_of(table, {column: column for column in source.columns}, source.columns))
    rows = []
    for row, place in kept:
        texts = {column: _text(row[column], f"{place}: column {column!r}") for column in source.columns}
        question, gold, reasoning = source.read(texts)
        if gold is None:
            dropped["without a readable gold answer"].append(place)
        else:
            rows.append({"question": question, "gold": gold, "reasoning": reasoning})
    _report_dropped(table, dropped)
    return rows


def load_rows(settings: Settings) -> tuple["Dataset", "Dataset | None"]:
    """Training rows and held-out rows, which have the same columns; None without ``eval_dataset`` and ``eval_rows``.

    The seed of the run also chooses the rows that are held out.
    """
    data, seed = settings.data, settings.trainer.seed
    how = settings.run.dry_run, settings.prompt.format, settings.method == "sft"
    rows, held_out = load_train(data, seed, *how), None
    if data.eval_dataset is not None:
        own = replace(data, dataset=data.eval_dataset, split=data.eval_split, limit=None)
        held_out = load_train(own, 0, *how, held_out=True)
    if not rows.column_names or (held_out is not None and not held_out.column_names):  # a dry run of the Hub
        return rows, None
    if held_out is None and data.eval_rows is None:
        return rows, None
    if held_out is None:
        rows, held_out = hold_out(rows, int(data.eval_rows or 0), seed)
    elif data.eval_rows not in (None, len(held_out)):
        _, held_out = hold_out(held_out, int(data.eval_rows or 0), seed)
    if "answer" in rows.column_names and "answer" not in held_out.column_names:
        raise UsageError(f"--eval_dataset {data.eval_dataset} has no column 'answer', and the training rows have.")
    held_out = held_out.select_columns([name for name in rows.column_names if name in held_out.column_names])
    trained = {json.dumps(prompt) for prompt in rows["prompt"]}
    known = sum(json.dumps(prompt) in trained for prompt in held_out["prompt"])
    if known and not settings.run.dry_run:
        logger.warning("%d of %d held-out prompts are also prompts of training rows", known, len(held_out))
    return rows, held_out


def load_train(
    data: DataArguments,
    seed: int = 0,
    dry_run: bool = False,
    prompt_format: PromptFormat = PAPER,
    for_sft: bool = False,
    held_out: bool = False,
) -> "Dataset":
    """The rows of ``data.dataset``: columns prompt, answer, solution, and all others of your data under their names.

    A prompt that is a conversation is not changed. The number of dropped rows is logged. ``seed``: of the generated
    arithmetic problems. ``for_sft``: without a column of solutions, the last turn of a conversation is one where it is
    the assistant's. ``held_out``: the rows are those of ``--eval_dataset``, by default of its test split.

    A ``dry_run`` does not ask the Hub. The rows of gsm8k and math are empty then, and their number and columns are
    enough for a plan; of another dataset of the Hub neither is known, and the result has no columns.
    """
    known = tuple(BENCHMARK_TITLES) if held_out else DATASETS
    name, split = data.dataset, data.split or ("test" if held_out else "train")
    if name not in known:
        check_source(f"{'eval_' * held_out}dataset", name, known)
        return _to_dataset({}) if dry_run and is_on_hub(name) else _load_own(data, prompt_format, split, for_sft)
    for flag in () if held_out else ("prompt_column", "answer_column", "solution_column", "dataset_config"):
        if (value := getattr(data, flag)) != getattr(DataArguments, flag):
            raise UsageError(f"--{flag} {value} is for your own data, not for {name}: remove it.")
    if split not in (splits := ("test",) if held_out else ("train", "test")):
        raise UsageError(f"--{'eval_' * held_out}split is {split!r}: expected {' or '.join(splits)} of {name}.")
    if dry_run and data.data_dir is None and name not in ARITHMETIC_STEPS:
        count = (TRAIN if split == "train" else BENCHMARKS)[name].rows
        return _to_dataset(dict.fromkeys(("prompt", "answer", "solution"), [""] * min(count, data.limit or count)))
    rows = _rows_of(name, split, data.data_dir, seed)[: data.limit]
    columns = {
        "prompt": [prompt_format.to_messages(row["question"]) for row in rows],
        "answer": [row["gold"] for row in rows],
    }
    if all(row["reasoning"] is not None for row in rows):
        columns["solution"] = [prompt_format.to_completion(row["reasoning"], row["gold"]) for row in rows]
    return _to_dataset(columns)


def hold_out(rows: "Dataset", count: int, seed: int) -> tuple["Dataset", "Dataset"]:
    """(rest, held out): rows chosen by the seed, and the others; both in the order of the rows."""
    if count >= len(rows):
        raise UsageError(f"--eval_rows is {count}: expected 1 to {len(rows) - 1} of the {len(rows)} rows.")
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    return rows.select([i for i in range(len(rows)) if i not in chosen]), rows.select(sorted(chosen))


def load_benchmark(name: str, data_dir: str | None = None) -> list[Problem]:
    """The problems of a benchmark of ``BENCHMARK_TITLES``, in the order of the source."""
    rows = _rows_of(name, "test", data_dir)
    return [Problem(f"{name}/{i}", row["question"], row["gold"]) for i, row in enumerate(rows)]


def load_user_benchmark(
    name: str, source: str, flags: DataArguments, with_grader: bool = False, limit: int | None = None
) -> tuple[list[Problem], dict[str, int]]:
    """The problems of your benchmark, and why rows were dropped -> their number.

    A question may be a conversation. A row whose gold answer the grader cannot read, so that no completion could be
    right, is dropped and counted. After ``limit`` problems no row is read.

    With your ``--grader`` a gold answer can be anything, or missing, and a problem has the columns of its row.
    """
    required = ("prompt",) if with_grader else ("prompt", "answer")
    for table, is_all in _growing(source, flags, "test", limit):
        columns = _columns_of(table, _named(flags, ("prompt", "answer")), required)
        kept, dropped = _usable(table, {role: columns[role] for role in required})
        roles = {column: role for role, column in columns.items()}
        problems: list[Problem] = []
        for row, place in kept:
            question, others = _question(row[columns["prompt"]], place), {}
            if with_grader:
                others = {roles.get(name, name): value for name, value in row.items() if name != columns["prompt"]}
                answer = others.get("answer")
                gold = answer if isinstance(answer, str) else repr(answer)
            else:
                gold = _answer(row[columns["answer"]], f"{place}: column {columns['answer']!r}", flags.answer_list)
            if with_grader or is_correct(alternatives(gold)[0], gold):
                problems.append(Problem(f"{name}/{len(problems)}", question, gold, others))
            else:
                dropped["without a readable gold answer"].append(place)
        if is_all or len(problems) >= (limit or math.inf):
            break
    _say_how_lists_count(table, None if with_grader else columns["answer"], flags.answer_list)
    _report_dropped(table, dropped)
    return problems[:limit], {reason: len(places) for reason, places in dropped.items()}


def drop_long_prompts(rows: "Dataset", tokenizer: Any, settings: Settings) -> "Dataset":
    """Drop prompts of more than ``max_prompt_length`` tokens, chat template included; their number is logged."""
    most, template_kwargs = settings.data.max_prompt_length, settings.prompt.template_kwargs
    lengths = [len(encode_prompt(tokenizer, prompt, **template_kwargs)) for prompt in rows["prompt"]]
    kept = [i for i, length in enumerate(lengths) if length <= most]
    if not kept:
        raise UsageError(f"all {len(rows)} prompts are over {most} tokens: raise --max_prompt_length.")
    if len(kept) < len(rows):
        count = len(rows) - len(kept)
        logger.warning("%d of %d prompts dropped: over %d tokens (--max_prompt_length)", count, len(rows), most)
    return rows.select(kept)


def to_demonstrations(rows: "Dataset", template_kwargs: Mapping[str, Any] | None = None) -> "Dataset":
    """Prompts with their reference solutions: columns prompt and completion, as TRL's SFTTrainer expects.

    Rows without a solution are dropped and counted. Arguments of the chat template are a third column, from which TRL
    takes them.
    """
    if not rows.column_names:  # a dry run of a dataset of the Hub
        return rows
    solutions = rows["solution"] if "solution" in rows.column_names else []
    pairs = [(prompt, text) for prompt, text in zip(rows["prompt"], solutions, strict=False) if text is not None]
    if len(pairs) < len(rows):
        logger.warning("%d of %d rows dropped: with an empty solution", len(rows) - len(pairs), len(rows))
    turns = [[{"role": "assistant", "content": solution}] for _, solution in pairs]
    extra = {"chat_template_kwargs": [dict(template_kwargs)] * len(pairs)} if template_kwargs else {}
    return _to_dataset({"prompt": [prompt for prompt, _ in pairs], "completion": turns, **extra})


ROLES = ("prompt", "answer", "solution")


def check_columns(data: DataArguments) -> None:
    """Refuse a file without a column that the flags name; few rows are read, and nothing heavy is imported."""
    if data.dataset in DATASETS or not Path(data.dataset).is_file():
        return
    for table, is_all in _growing(data.dataset, data, "train", limit=100):
        try:
            _columns_of(table, _named(data, ROLES))
            return
        except UsageError:  # of JSON objects the later ones may have it
            if is_all:
                raise


def _growing(source: str, flags: DataArguments, split: str, limit: int | None) -> Iterator[tuple[Table, bool]]:
    """The first ``limit`` rows, then four times as many and so on, for those who need more; and whether it is all."""
    while limit is not None:
        table = read_table(source, flags, split, limit)
        is_all = len(table.rows) < limit
        yield table, is_all
        if is_all:
            return
        limit *= 4
    yield read_table(source, flags, split), True


def _load_own(data: DataArguments, prompt_format: PromptFormat, default_split: str, for_sft: bool) -> "Dataset":
    for table, is_all in _growing(data.dataset, data, default_split, data.limit):
        roles = _columns_of(table, _named(data, ROLES))
        kept, dropped = _usable(table, {role: name for role, name in roles.items() if role != "solution"})
        if is_all or len(kept) >= (data.limit or math.inf):
            break
    _report_dropped(table, dropped)
    _say_how_lists_count(table, roles.get("answer"), data.answer_list)
    kept = kept[: data.limit]
    columns: dict[str, list[Any]] = {}
    for role, name in roles.items():
        values = [(row[name], f"{place}: column {name!r}") for row, place in kept]
        if role == "prompt":
            ends_with_solution = for_sft and "solution" not in roles
            questions = [_question(row[name], place, ends_with_solution) for row, place in kept]
            if ends_with_solution and any(map(_is_answered, questions)):
                columns["solution"] = [q[-1]["content"] if _is_answered(q) else None for q in questions]
                questions = [q[:-1] if _is_answered(q) else q for q in questions]
            columns[role] = [prompt_format.to_messages(question) for question in questions]
        elif role == "answer":
            columns[role] = [_answer(value, where, data.answer_list) for value, where in values]
        else:  # only a solution can be empty
            columns[role] = [None if _is_empty(value) else _text(value, where) for value, where in values]
    others = [name for name in table.columns if name not in columns and name not in roles.values()]
    return _to_dataset(columns | {name: [row[name] for row, _ in kept] for name in others})


def _named(flags: DataArguments, roles: Sequence[str]) -> dict[str, str]:
    return {role: getattr(flags, f"{role}_column") for role in roles}


def _columns_of(table: Table, named: Mapping[str, str], required: Sequence[str] = ("prompt",)) -> dict[str, str]:
    """Role -> column of your data; without roles that are optional, not named and have no column."""
    for role, name in named.items():
        if name not in table.columns and (role in required or name != role):
            raise UsageError(
                f"{table.name} has no column {name!r}{nearest(name, table.columns)}: it has "
                f"{', '.join(map(repr, table.columns))}; set --prompt_column, --answer_column and --solution_column."
            )
    return {role: name for role, name in named.items() if name in table.columns}


def _usable(table: Table, columns: Mapping[str, str]) -> tuple[list[tuple[Row, str]], dict[str, list[str]]]:
    """The rows with a value in each column, with their places; and reason -> places of the others."""
    kept, dropped = [], defaultdict(list)
    for row, place in table.rows:
        if empty := next((role for role, name in columns.items() if _is_empty(row[name])), None):
            dropped[f"with an empty {empty}"].append(place)
        else:
            kept.append((row, place))
    return kept, dropped


def _report_dropped(table: Table, dropped: Mapping[str, list[str]]) -> None:
    """Log how many rows are dropped, by reason; a UsageError if no row is left."""
    count, total = sum(map(len, dropped.values())), len(table.rows)
    reasons = ", ".join(f"{len(places)} {reason} (first: {places[0]})" for reason, places in dropped.items())
    if count == total:
        raise UsageError(f"{table.name} has no usable row: {reasons}.")
    if count:
        logger.warning("%s: %d of %d rows dropped: %s", table.name, count, total, reasons)


def _is_empty(value: Any) -> bool:
    """Nothing, whitespace, or pandas' NaN for a missing value."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip()) or value != value


def _question(value: Any, where: str, may_be_answered: bool = False) -> Any:
    """A prompt as a string or a conversation; text that is a conversation in JSON is read as one: CSV has no lists."""
    if isinstance(value, str):
        if not _CONVERSATION.match(value):
            return value
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    turns = value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else [{}]
    if any(turn.keys() >= {"from", "value"} for turn in turns):
        raise UsageError(
            f"{where}: the prompt has turns with 'from' and 'value' (ShareGPT): rename them to 'role' and 'content', "
            "human to user and gpt to assistant."
        )
    if not all("role" in turn and (isinstance(turn.get("content"), str) or turn.get("tool_calls")) for turn in turns):
        raise UsageError(
            f"{where}: prompt {reprlib.repr(value)} is neither a string nor a conversation, in JSON "
            '[{"role": "user", "content": "..."}].'
        )
    if _is_answered(value) and not may_be_answered:
        raise UsageError(
            f"{where}: the last turn of the prompt is the assistant's, so the model would be shown its answer: end the "
            "prompt with the user's turn, and put the answer into --answer_column. train_sft.py takes it as it is."
        )
    return value


def _is_answered(question: Any) -> bool:
    return isinstance(question, list) and question[-1]["role"] == "assistant"


_CONVERSATION = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


def _text(value: Any, where: str) -> str:
    """A value as text; 18.0 becomes 18: pandas stores integer columns with missing values as floats."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal) or value in (math.inf, -math.inf):
        raise UsageError(f"{where} is {reprlib.repr(value)}: expected a string or a number.")
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def _answer(value: Any, where: str, answer_list: str) -> str:
    """A gold answer as text. Of a list any element counts, then it is JSON; or all, with commas between them."""
    if not isinstance(value, list):
        return _text(value, where)
    texts = list(dict.fromkeys(_text(element, where) for element in value))
    if len(texts) == 1 or answer_list == "all":
        return ", ".join(texts)
    return json.dumps(texts, ensure_ascii=False)


def _say_how_lists_count(table: Table, column: str | None, answer_list: str) -> None:
    if column and any(isinstance(row[column], list) and len(row[column]) > 1 for row, _ in table.rows):
        how = "all are needed" if answer_list == "all" else "any is right (--answer_list all: all are needed)"
        logger.warning("%s: answers are lists: %s", table.name, how)


def _to_dataset(columns: dict[str, list[Any]]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict(columns)
