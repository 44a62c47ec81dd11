"""Your rows: JSONL, CSV and Parquet files, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. A stranger's file cannot exhaust memory: rows, columns and
bytes have a limit. ``datasets`` and ``pyarrow`` are imported when needed.
"""

import csv
import json
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gtpo.arguments import SourceArguments
from gtpo.errors import UsageError, first_line, nearest

Row = dict[str, Any]
FORMATS = (".jsonl", ".csv", ".parquet")
NOT_READ = (".json", ".gz", ".arrow")  # data of other formats, which is refused rather than taken for a Hub id
MAX_ROWS = 1_000_000
MAX_COLUMNS = 1_000
MAX_CELLS = 2**25
MAX_BYTES = 2**32  # of memory while a file is read
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Table:
    """Rows, each with its place: ``line 3 of my.csv``, the last of its lines. A row may lack columns."""

    name: str  # the file or Hub id
    columns: list[str]
    rows: list[tuple[Row, str]]

    @classmethod
    def of(cls, name: str, rows: Iterable[tuple[Row, str]]) -> "Table":
        """The columns are those of all rows, in the order of the first that has them."""
        rows = list(rows)
        if not rows:
            raise UsageError(f"{name} has no rows.")
        columns: Row = {}
        for row, _ in rows:
            columns |= dict.fromkeys(row)
        width = len(columns)
        if width > MAX_COLUMNS or width * len(rows) > MAX_CELLS:
            raise UsageError(
                f"{name} has {width:,} columns in {len(rows):,} rows, more than this program reads: keep the columns "
                "of prompt and answer."
            )
        return cls(name, list(columns), rows)


def value_of(row: Row, name: str) -> Any:
    """The value of a column, or of a field of the objects in a column, as COLUMN.FIELD; None without one."""
    if name in row:
        return row[name]
    value: Any = row
    for field in name.split("."):
        value = value.get(field) if isinstance(value, dict) else None
    return value


def check_source(flag: str, source: str, known: Collection[str]) -> None:
    """Refuse what is none of ``known`` and cannot be your data: an existing path, the name of a file, or a Hub id."""
    is_invalid = source == "" or (is_on_hub(source) and not _HUB_ID.fullmatch(source))
    if is_invalid and source not in known:
        raise UsageError(
            f"--{flag} {source!r} is unknown{nearest(source, known)}: pick one of {', '.join(known)}, or name a file "
            f"({', '.join(FORMATS)}) or a Hub id (owner/name)."
        )


def is_on_hub(source: str) -> bool:
    """Whether your data is a dataset of the Hub."""
    return Path(source).suffix.lower() not in FORMATS + NOT_READ and not os.path.lexists(source)


def short_name_of(source: str, taken: Collection[str]) -> str:
    """A short name for your data: that of the file without its extension, or the last part of the Hub id.

    Of ``taken``, which mean something else, ``gsm8k.csv`` stays as it is, and ``me/gsm8k`` becomes ``me-gsm8k``.
    """
    path = Path(source).resolve()
    is_file = path.suffix.lower() in FORMATS
    short = path.stem if is_file else path.name
    if short not in taken:
        return short
    if short != path.name:
        return path.name
    return f"{path.parent.name}-{path.name}"


def read_table(source: str, flags: SourceArguments, default_split: str) -> Table:
    """The rows of a file, or of one split of a dataset of the Hub; with ``--limit`` of a larger one the first."""
    if is_on_hub(source):
        return read_hub(source, flags.dataset_config, flags.split or default_split, flags.limit)
    for flag in ("dataset_config", "split"):
        value = getattr(flags, flag)
        if value is not None:
            raise UsageError(f"--{flag} {value} is for a dataset of the Hub, and {source} is a path: remove it.")
    return read_file(Path(source), flags.limit)


def read_file(path: Path, limit: int | None = None) -> Table:
    """The rows of a file, whose ending names the format; with a ``limit`` of a too long one the first MAX_ROWS."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    ending = path.suffix.lower()
    if ending not in readers:
        raise UsageError(f"{path}: unknown format, expected .jsonl (a JSON object per line), .csv or .parquet.")
    unit = "row" if ending == ".parquet" else "line"
    try:
        with memory_limit(MAX_BYTES):
            rows = list(islice(readers[ending](path), MAX_ROWS + 1))
            check_count(str(path), len(rows), limit)
            placed = []
            for number, row in rows[:MAX_ROWS]:
                placed.append((row, f"{unit} {number} of {path}"))
            return Table.of(str(path), placed)
    except MemoryError as error:
        raise UsageError(f"{path} takes more than {MAX_BYTES >> 30} GiB of memory: split it.") from error
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}.") from error


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Inside, this process may take so many bytes more: then MemoryError, not the end of the machine's memory."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # not on every system
        pages, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
        used = int(pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check_count(name: str, rows: int, limit: int | None) -> None:
    """Refuse more rows than are read, unless ``--limit`` asks for the first ones."""
    if rows > MAX_ROWS and limit is None:
        raise UsageError(f"{name} has more than {MAX_ROWS:,} rows: split it, or add --limit.")


def _read_jsonl(path: Path) -> Iterable[tuple[int, Row]]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is {reprlib.repr(row)}, expected a JSON object")
            yield number, row


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return row


def _read_csv(path: Path) -> Iterable[tuple[int, Row]]:
    """Numbered by the line where they end. Not by pandas, which shifts the columns of a row longer than the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        _check_header(header)
        for values in filter(None, reader):
            if len(values) != len(header):
                where = f"line {reader.line_num} has more or fewer fields than the header ({', '.join(header)})"
                raise ValueError(f"{where}: put a field that contains a comma into double quotes")
            row = dict(zip(header, values, strict=True))
            row.pop("", None)  # the row number of DataFrame.to_csv
            yield reader.line_num, row


def _check_header(header: list[str]) -> None:
    if len(header) > MAX_COLUMNS:
        raise ValueError(f"more than {MAX_COLUMNS:,} columns, keep those of prompt and answer")
    for mark in ";\t":
        if len(header) == 1 and mark in header[0]:
            raise ValueError(
                f"the header {header[0]!r} has {mark!r} between the columns: save it with commas between columns and "
                "points in decimal numbers"
            )
    names = header[1:] if header[:1] == [""] else header
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"duplicate or empty column name in the header {header}")


def _read_parquet(path: Path) -> Iterable[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    before = 0
    with ParquetFile(path) as file:
        for batch in file.iter_batches(1024, use_threads=False):  # a thread of Arrow's aborts where memory ends
            yield from enumerate(rows_of(batch), before + 1)
            before += len(batch)


def rows_of(table: Any) -> list[Row]:
    """The rows of an Arrow table or batch; 0.1 of a column of float32 is 0.1, not 0.10000000149011612."""
    import pyarrow

    for number, column in enumerate(table.schema):
        as_text = _with_floats_as(pyarrow.string(), column.type)
        if as_text != column.type:
            wide = _with_floats_as(pyarrow.float64(), column.type)
            exact = table.column(number).cast(as_text).cast(wide)
            table = table.set_column(number, column.name, exact)
    rows: list[Row] = table.to_pylist()
    return rows


def _with_floats_as(leaf: Any, kind: Any) -> Any:
    """An Arrow type with another one for its floats of 32 bits."""
    from pyarrow import list_, struct, types

    if types.is_float32(kind):
        return leaf
    if types.is_list(kind):
        return list_(_with_floats_as(leaf, kind.value_type))
    if types.is_struct(kind):
        return struct([(field.name, _with_floats_as(leaf, field.type)) for field in kind])
    return kind


def read_hub(hub_id: str, config: str | None, split: str, limit: int | None = None) -> Table:
    """The rows of one split of a dataset of the Hub, as :func:`read_file`."""
    from datasets import load_dataset

    try:
        data = load_dataset(hub_id, config, split=split)
    except Exception as error:  # of the network, of the Hub, and of the reader of each format
        why = " ".join(str(error).split()).rstrip(".")
        what = f"cannot read {hub_id}, split {split!r}, from the Hub: {why[:300]}"
        help = "Check the name, --split, --dataset_config, the network; --data_dir DIR reads files instead."
        raise UsageError(f"{what}. {help}") from error
    check_count(hub_id, len(data), limit)
    first = range(min(len(data), MAX_ROWS))
    rows = rows_of(data.select(first).with_format("arrow")[:])
    placed = [(row, f"row {number} of {hub_id}") for number, row in enumerate(rows, 1)]
    return Table.of(hub_id, placed)
