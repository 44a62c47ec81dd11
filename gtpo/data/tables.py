"""A row, and where rows are read from: JSONL, CSV and Parquet files, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. ``datasets`` and ``pyarrow`` are imported when needed.

JSONL and CSV are read by the standard library. pandas fills a short CSV row with empty text, drops the last fields of
rows that are all longer than the header, takes text after a closing quote and numbers no line; of JSONL it rounds
2^53 + 1 beside a null. ``datasets`` makes a date in JSONL a datetime, and of "1" after a list a number.
"""

import csv
import json
import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from gtpo.arguments import SourceArguments, Values
from gtpo.errors import UsageError, first_line, nearest
from gtpo.files import check_regular

Columns = dict[str, str]  # field of a Row: prompt, gold, solution -> column
Numbered = Iterable[tuple[int, Values]]  # column -> value, with the number of the line, or of the row
Placed = tuple[Values, str]  # column -> value, with the place: `line 3 of my.csv`
DATASETS = ("gsm8k", "math", "arithmetic")  # that a run trains on by name
# By default the columns of your data, and always the names under which rewards get them.
COLUMNS = {"prompt": "prompt", "gold": "answer", "solution": "solution"}


@dataclass(frozen=True)
class Row:
    """A problem of any source, before it is written in the format of a prompt."""

    prompt: Any  # text, or a conversation
    gold: Any  # text; any value where a reward or grader of your own decides; None without one
    solution: Any = None  # worked, without the gold answer; of your data the reference completion; None without one
    others: Values = field(default_factory=dict)  # columns of your data, under their names
    place: str = ""  # line 3 of my.csv


class Table(NamedTuple):
    """Rows as they are stored, each with its place: ``line 3 of my.csv``, the last of its lines. Some lack columns."""

    name: str  # the file or Hub id
    columns: list[str]
    rows: list[Placed]

    @classmethod
    def of(cls, name: str, unit: str, numbered: Numbered) -> "Table":
        """The columns are those of all rows, in the order of the first that has them; ``unit`` is line or row."""
        rows = []
        columns: Values = {}  # its keys
        for number, row in numbered:
            rows.append((row, f"{unit} {number} of {name}"))
            columns |= row
        if not rows:
            raise UsageError(f"{name} has no rows.")
        return cls(name, list(columns), rows)


def value_of(row: Values, name: str) -> Any:
    """The value of a column, or of a field of the objects in a column, as COLUMN.FIELD; None without one."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def named_columns(flags: SourceArguments) -> Columns:
    """Field of a row -> the column of your data that the settings name."""
    return {name: getattr(flags, f"{column}_column", column) for name, column in COLUMNS.items()}


def columns_of(table: Table, named: Columns, required: Collection[str]) -> Columns:
    """Field of a row -> column, of the fields that have one; a UsageError for another that needs it."""
    found = {}
    it_has = "it has"
    if Path(table.name).suffix.lower() == ".csv":
        it_has = "its first line, which names the columns, has"
    for key, name in named.items():
        if name in table.columns or any(value_of(row, name) is not None for row, _ in table.rows):
            found[key] = name
        elif key in required or name != COLUMNS[key]:
            raise UsageError(
                f"{table.name} has no column {name!r}{nearest(name, table.columns)}: {it_has} "
                f"{', '.join(map(reprlib.repr, table.columns))}; set --prompt_column and --answer_column."
            )
    return found


def check_source(flag: str, source: str, known: Collection[str]) -> None:
    """Refuse what is none of ``known`` and cannot be your data: an existing path, the name of a file, or a Hub id."""
    if source in known or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        return
    if not source or is_on_hub(source):
        raise UsageError(
            f"--{flag} {source!r} is unknown{nearest(source, known)}: pick one of {', '.join(known)}, or name a file "
            f"({', '.join(FORMATS)}) or a Hub id (owner/name)."
        )


def is_on_hub(source: str) -> bool:
    """Whether your data is a dataset of the Hub."""
    path = Path(source)
    return path.suffix.lower() not in FORMATS and not path.exists()


def short_name_of(source: str, taken: Collection[str]) -> str:
    """A short name for your data: that of the file without its extension, or the last part of the Hub id.

    Of ``taken``, which mean something else, ``gsm8k.csv`` stays as it is, and ``me/gsm8k`` becomes ``me-gsm8k``.
    """
    path = Path(source)
    short = path.stem if path.suffix.lower() in FORMATS else path.name
    if short not in taken:
        return short
    if short != path.name:
        return path.name
    return "-".join(path.parts[-2:])


def refuse_flags(flags: SourceArguments, names: Sequence[str], source: str) -> None:
    """Refuse settings that have no effect on your data or a dataset of the paper."""
    for name in names:
        value = getattr(flags, name)
        if value != getattr(type(flags), name):
            raise UsageError(f"--{name} {value} has no effect on {source}: remove it.")


def read_table(source: str, flags: SourceArguments, default_split: str) -> Table:
    """The rows of a file, or of one split of a dataset of the Hub."""
    if is_on_hub(source):
        return read_hub(source, [flags.dataset_config], flags.split or default_split)
    refuse_flags(flags, ("dataset_config", "split"), source)
    return read_file(Path(source))


def read_file(path: Path, most: int | None = None) -> Table:
    """The rows of a file, or the first ones; its ending names the format."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise UsageError(f"{path}: unknown format, expected .jsonl (a JSON object per line), .csv or .parquet.")
    check_regular(path)
    try:
        rows = list(islice(FORMATS[ending](path), most))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not in UTF-8: save it as UTF-8, in a spreadsheet as CSV UTF-8.") from error
    except Exception as error:  # of the reader of each format
        raise UsageError(f"{path} cannot be read: {first_line(error)}.") from error
    return Table.of(str(path), "row" if ending == ".parquet" else "line", rows)


def _read_jsonl(path: Path) -> Numbered:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = {**json.loads(line, object_pairs_hook=_object)}
                except (TypeError, ValueError) as error:
                    raise ValueError(f"line {number} is not a JSON object: {error}") from error
                if "\\u" in line:
                    for column, value in row.items():
                        refuse_half_characters(value, f"line {number}, column {column!r}")
                yield number, row


def refuse_half_characters(value: Any, where: str) -> None:
    """A UsageError for one half of a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UsageError(f"{where} has {half}, half of a character: write the whole one, or remove it.") from error


def _object(pairs: list[Any]) -> Values:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a key occurs twice in {pairs}")
    return row


def _read_csv(path: Path) -> Numbered:
    """Numbered by the line where they end."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        header = reader.fieldnames or []
        if "" in header[1:] or len({*header}) < len(header) or (len(header) == 1 and re.search("[;\t]", header[0])):
            raise ValueError(f"the header needs different column names, with commas between them: {header}")
        for row in _rows_to(reader):
            if None in row or None in row.values():
                raise ValueError(
                    f"line {reader.line_num} has more or fewer fields than the header ({', '.join(header)}): put a "
                    "field that contains a comma into double quotes"
                )
            row.pop("", None)  # the row number of DataFrame.to_csv
            yield reader.line_num, row


def _rows_to(reader: "csv.DictReader[str]") -> Iterable[Values]:
    """The rows of a file; an error names the line that was read last."""
    try:
        yield from reader
    except csv.Error as error:
        hint = ": close a double quote above, or shorten the field" if "field limit" in str(error) else ""
        raise ValueError(f"line {reader.reader.line_num}: {error}{hint}") from error


def _read_parquet(path: Path) -> Numbered:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from enumerate(chain.from_iterable(map(_rows_of, file.iter_batches())), 1)


FORMATS = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}


def _rows_of(table: Any) -> list[Values]:
    """The rows of an Arrow table or batch; 0.1 of a column of float32 is 0.1, not 0.10000000149011612."""
    from pyarrow import float64, schema, string

    stored = table.schema
    for leaf in string(), float64():
        table = table.cast(schema([(column.name, _with_floats_as(leaf, column.type)) for column in stored]))
    return table.to_pylist()


def _with_floats_as(leaf: Any, kind: Any) -> Any:
    """An Arrow type with another one for its floats of 32 bits, those of lists and structs too."""
    from pyarrow import list_, struct, types

    if types.is_list(kind):
        return list_(_with_floats_as(leaf, kind.value_type))
    if types.is_struct(kind):
        return struct([(part.name, _with_floats_as(leaf, part.type)) for part in kind])
    return leaf if str(kind) == "float" else kind


def read_hub(hub_id: str, configs: Sequence[str | None], split: str) -> Table:
    """The rows of one split of a dataset of the Hub, of all of these configurations, as :func:`read_file`."""
    from datasets import load_dataset

    rows = []
    try:
        for config in configs:
            rows += _rows_of(load_dataset(hub_id, config, split=split).with_format("arrow")[:])
    except Exception as error:  # of the network, of the Hub, and of the reader of each format
        raise UsageError(
            f"cannot read {hub_id}, split {split!r}, from the Hub: {error}: check the name, --split, --dataset_config, "
            "the network; --data_dir DIR reads files instead."
        ) from error
    return Table.of(hub_id, "row", enumerate(rows, 1))
