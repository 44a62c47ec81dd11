"""Training rows and benchmarks: GSM8K, MATH, AIME, AMC (Hub or a directory of JSONL files), arithmetic, your JSONL.

A training row is ``prompt`` (a conversation), ``answer`` (the gold answer as text) and ``solution`` (the reference
completion in the paper's tags, for SFT). Rows without a readable gold answer and prompts over the length limit are
dropped and counted. ``datasets`` is imported when rows are read.
"""

import bisect
import gzip
import json
import logging
import reprlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo.arguments import DataArguments
from gtpo.arithmetic import arithmetic
from gtpo.errors import UsageError, first_line, nearest
from gtpo.prompts import to_completion, to_messages
from gtpo.sources import ARITHMETIC_STEPS, BENCHMARK_TITLES, BENCHMARKS, DATASETS, TRAIN, Row, Source
from gtpo.tokenizer import encode_prompt

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


ARITHMETIC_TRAIN_ROWS, ARITHMETIC_TEST_ROWS = 4000, 500


def load_train(data: DataArguments, seed: int = 0, dry_run: bool = False) -> "Dataset":
    """The rows of ``data.dataset``: columns prompt, answer, solution. The number of dropped rows is logged.

    Args:
        data: Which rows: gsm8k, math, arithmetic, or your JSONL file with a column ``prompt`` (a question, or a
            conversation that is used as it is), and ``answer`` and ``solution`` where the rewards or SFT need them.
            Other columns are passed to the rewards.
        seed: Seed of the generated arithmetic problems; other datasets ignore it.
        dry_run: Do not ask the Hub: its rows are empty, and their number and columns are enough for a plan.

    Raises:
        UsageError: If the name is unknown, or a file is missing, empty, or lacks a column, or a row cannot be used.
    """
    rows = _load_all(data.dataset, data.data_dir, seed, dry_run)
    return rows if data.limit_rows is None else rows.select(range(min(data.limit_rows, len(rows))))


def _load_all(name: str, data_dir: str | None, seed: int, dry_run: bool) -> "Dataset":
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UsageError(f"--data_dir {data_dir} is not a directory: name one with JSONL files, or remove --data_dir.")
    if name.endswith((".jsonl", ".json", ".jsonl.gz")):
        return _read_own(Path(name))
    if name == "arithmetic":
        rows = list(arithmetic("train", ARITHMETIC_TRAIN_ROWS, seed))
    elif name in TRAIN and dry_run and data_dir is None:
        return _to_dataset({column: [""] * TRAIN[name].rows for column in ("prompt", "answer", "solution")})
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
        UsageError: If no prompt remains, or the chat template fails on one.
    """
    kept = [i for i, prompt in enumerate(rows["prompt"]) if len(encode_prompt(tokenizer, prompt)) <= max_prompt_length]
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
    names = _columns(rows)
    if "prompt" not in names:
        raise UsageError(
            f"{path} has no column 'prompt': expected a question or a conversation in each, found {names}."
        )
    ours = sorted({"prompt", "answer", "solution"} & set(names))
    complete = {number: row for number, row in rows.items() if all(row[name] not in (None, "", []) for name in ours)}
    if not complete:
        raise UsageError(f"{path} has no row with {', '.join(ours)} ({len(rows)} read).")
    if len(complete) < len(rows):
        logger.warning(
            "%s: %d of %d rows dropped: empty prompt, answer or solution",
            path,
            len(rows) - len(complete),
            len(rows),
        )
    for number, row in complete.items():
        where = f"row {number} of {path}"
        row["prompt"] = to_messages(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"]
        _check_conversation(row["prompt"], where)
        row |= {name: _text(row, name, where) for name in ours if name != "prompt"}
    columns = {name: [row[name] for row in complete.values()] for name in names}
    try:
        return _to_dataset(columns)
    except (ValueError, TypeError, OverflowError) as error:  # of Arrow, without the row
        raise UsageError(_why_not_stored(columns, list(complete), path)) from error


def _check_conversation(prompt: Any, where: str) -> None:
    if not isinstance(prompt, list) or any(not isinstance(turn, dict) or "role" not in turn for turn in prompt):
        raise UsageError(
            f"{where}: prompt {reprlib.repr(prompt)} is neither a string nor a conversation "
            "[{'role': ..., 'content': ...}]."
        )
    for turn in prompt:
        if not isinstance(turn.get("content"), str) and not turn.get("tool_calls"):
            raise UsageError(
                f"{where}: the {turn['role']} turn of the prompt has the content {reprlib.repr(turn.get('content'))}: "
                "expected a string."
            )


def _text(row: Row, column: str, where: str) -> str:
    """A value as text; numbers are written out."""
    value = row[column]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise UsageError(f"{where}: column {column!r} is {reprlib.repr(value)}: expected a string or a number.")
    return str(value)


def _why_not_stored(columns: dict[str, list[Any]], numbers: Sequence[int], path: Path) -> str:
    """The first row that Arrow cannot store in one column with the rows before it."""

    def fails(name: str, rows: int) -> bool:
        try:
            _to_dataset({name: columns[name][:rows]})
        except (ValueError, TypeError, OverflowError):
            return True
        return False

    name = next(name for name in columns if fails(name, len(numbers)))
    first = bisect.bisect_left(range(1, len(numbers) + 1), True, key=lambda rows: fails(name, rows))
    return (
        f"row {numbers[first]} of {path}: column {name!r} is {reprlib.repr(columns[name][first])}, which cannot be "
        "stored with the rows before it: expected values of one type in a column."
    )


def _to_dataset(columns: dict[str, list[Any]]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _read(name: str, source: Source, data_dir: str | None) -> list[Row]:
    where, raw = _raw_rows(name, source, data_dir)
    if missing := [column for column in source.columns if column not in _columns(raw)]:
        raise UsageError(f"{where} has no column {missing[0]!r}: expected {source.columns}, found {_columns(raw)}.")
    rows = []
    for number, row in raw.items():
        if any(row[column] is None for column in source.columns):
            continue
        texts = {column: _text(row, column, f"row {number} of {where}") for column in source.columns}
        question, gold, reasoning = source.read(texts)
        if question and gold is not None:
            rows.append({"question": question, "gold": gold, "reasoning": reasoning})
    if not rows:
        raise UsageError(f"dataset {name!r} has no row with a readable gold answer ({len(raw)} rows read).")
    if len(rows) < len(raw):
        logger.warning("%s: %d of %d rows dropped: no readable gold answer", name, len(raw) - len(rows), len(raw))
    return rows


def _raw_rows(name: str, source: Source, data_dir: str | None) -> tuple[str, dict[int, Row]]:
    """Where the rows come from, and number -> row."""
    if data_dir is not None:
        path = Path(data_dir) / source.file
        packed = path.with_name(f"{path.name}.gz")
        path = packed if packed.is_file() and not path.is_file() else path
        return str(path), _read_jsonl(
            path, f"{path} does not exist: for {name}, --data_dir must contain {source.file}."
        )
    try:
        from datasets import concatenate_datasets, load_dataset

        parts = [load_dataset(source.hub_id, config, split=source.hub_split) for config in source.configs]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {source.hub_id} from the Hub: {first_line(error)}. Check the network, or set --data_dir to a "
            f"directory that contains {source.file}."
        ) from error
    return source.hub_id, dict(enumerate(concatenate_datasets(parts), 1))


def _columns(rows: dict[int, Row]) -> list[str]:
    return list(next(iter(rows.values())))


def _read_jsonl(path: Path, if_missing: str) -> dict[int, Row]:
    """Number -> row of a JSONL file, gzipped or not, or of a JSON array; a column missing from a row is None.

    The number is that of the line, from 1 (of the element, in an array).
    """
    if not path.is_file():
        raise UsageError(if_missing)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}. Expected one JSON object per line.") from error
    if content.lstrip().startswith(b"["):
        array = _from_json(content, str(path))
        values = dict(enumerate(array, 1))
    else:
        lines = enumerate(content.split(b"\n"), 1)
        values = {number: _from_json(line, f"row {number} of {path}") for number, line in lines if line.strip()}
    if not values:
        raise UsageError(f"{path} is empty: expected one JSON object per line.")
    for number, row in values.items():
        if not isinstance(row, dict):
            raise UsageError(f"row {number} of {path} is {reprlib.repr(row)}: expected a JSON object.")
    names = dict.fromkeys(name for row in values.values() for name in row)
    return {number: {name: row.get(name) for name in names} for number, row in values.items()}


def _from_json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not valid JSON: {first_line(error)}. Expected one JSON object per line."
        ) from error
