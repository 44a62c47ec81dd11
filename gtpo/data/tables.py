"""Your rows: JSONL, CSV and Parquet files, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. ``datasets`` and ``pyarrow`` are imported when needed.
"""

import csv
import json
import os
import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line

Row = dict[str, Any]
FORMATS = (".jsonl", ".csv", ".parquet")
NOT_READ = (".json", ".gz", ".arrow")  # data of other formats, which is refused rather than skipped
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Table:
    """Rows and where each of them is stored.

    Attributes:
        name: The file or Hub id.
        columns: Their names; each row has all of them.
        rows: Column -> value; None where a JSON object lacks it.
        locations: Of each row, such as ``line 3 of my.csv``: the last of its lines.
    """

    name: str
    columns: list[str]
    rows: list[Row]
    locations: list[str]


def is_user_data(source: str) -> bool:
    """Whether a name can only be your data: an existing path, the name of a file, or a Hub id."""
    return source != "" and (_is_path(source) or _HUB_ID.fullmatch(source) is not None)


def is_on_hub(source: str) -> bool:
    """Whether your data is a dataset of the Hub."""
    return not _is_path(source) and _HUB_ID.fullmatch(source) is not None


def _is_path(source: str) -> bool:
    return _ending(Path(source)) in FORMATS + NOT_READ or os.path.lexists(source)


def short_name_of(source: str, taken: Collection[str]) -> str:
    """A short name for your data: that of the file without its extension, or the last part of the Hub id.

    Args:
        source: Path or Hub id.
        taken: Names that mean something else: ``gsm8k.csv`` stays as it is, ``./gsm8k`` gets the name above it.
    """
    path = Path(source).resolve()
    short = path.stem if _ending(path) in FORMATS else path.name
    if short not in taken:
        return short
    return path.name if short != path.name else f"{path.parent.name}-{path.name}"


def read_table(source: str, split: str | None, default_split: str, config: str | None = None) -> Table:
    """All rows of a file, or of one split of a dataset of the Hub.

    Args:
        source: Path or Hub id.
        split: The split of a dataset of the Hub that the user names.
        default_split: The one that is read otherwise.
        config: Configuration of a Hub dataset.

    Raises:
        UsageError: If it does not exist or cannot be read, or a line is damaged.
    """
    if is_on_hub(source):
        return read_hub(source, config, split or default_split)
    for flag, value in (("dataset_config", config), ("split", split)):
        if value is not None:
            raise UsageError(f"--{flag} {value} is for a dataset of the Hub, and {source} is a path: remove it.")
    return read_file(Path(source))


def read_file(path: Path, if_missing: str = "expected a file or a Hub id (owner/name).") -> Table:
    """All rows of one file, whose ending names the format; ``if_missing`` is advice for a file that does not exist.

    Raises:
        UsageError: As :func:`read_table`.
    """
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if not path.is_file():
        raise UsageError(f"{path} does not exist or is not a regular file: {if_missing}")
    if (ending := _ending(path)) not in readers:
        raise UsageError(
            f"{path}: unknown format, expected .jsonl (one JSON object per line), .csv or .parquet, not compressed."
        )
    try:
        rows = readers[ending](path)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}.") from error
    if not rows:
        raise UsageError(f"{path} has no rows.")
    unit = "row" if ending == ".parquet" else "line"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(str(path), columns, list(rows.values()), [f"{unit} {number} of {path}" for number in rows])
    return concatenate(str(path), [table])


def concatenate(name: str, tables: Sequence[Table]) -> Table:
    """The rows of several tables, each with the columns of all of them."""
    columns = list(dict.fromkeys(column for table in tables for column in table.columns))
    rows = [{column: row.get(column) for column in columns} for table in tables for row in table.rows]
    return Table(name, columns, rows, [location for table in tables for location in table.locations])


# One format each: number -> row


def _read_jsonl(path: Path) -> dict[int, Row]:
    rows = {}
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                rows[number] = json.loads(line, object_pairs_hook=_object)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON: {error}") from error
            if not isinstance(rows[number], dict):
                raise ValueError(f"line {number} is {reprlib.repr(rows[number])}, expected a JSON object")
    return rows


def _object(pairs: list[tuple[str, Any]]) -> Row:
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return row


def _read_csv(path: Path) -> dict[int, Row]:
    """The rows by the line where they end; empty lines are skipped.

    pandas alone would shift the columns of a row that is longer than the header.
    """
    from pandas import read_csv

    lines = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len({*header, ""}) <= len(header):
                raise ValueError(f"duplicate or empty column name in the header {header}")
            for row in filter(None, reader):
                if len(row) != len(header):
                    raise ValueError(
                        f"line {reader.line_num} has more or fewer fields than the header ({', '.join(header)}): put "
                        "a field that contains a comma into double quotes"
                    )
                lines.append(reader.line_num)
        except csv.Error as error:
            raise ValueError(f"the row that ends at line {reader.line_num} is not valid CSV: {error}") from error
    if not lines:
        return {}
    table = read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    return dict(zip(lines, table.to_dict("records"), strict=True))


def _read_parquet(path: Path) -> dict[int, Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return dict(enumerate(file.read().to_pylist(), 1))


# The Hub


def read_hub(hub_id: str, config: str | None, split: str) -> Table:
    """All rows of one split of a dataset of the Hub; errors as :func:`read_table`."""
    from datasets import load_dataset

    try:
        data = load_dataset(hub_id, config, split=split)
    except Exception as error:  # of the network, of the Hub, and of the reader of each format
        raise UsageError(
            f"cannot read {hub_id}, split {split!r}, from the Hub (and there is no such path): "
            f"{' '.join(str(error).split()).rstrip('.')[:300]}. Check the name, --split, --dataset_config and the "
            "network."
        ) from error
    if not len(data):
        raise UsageError(f"{hub_id} has no rows in its split {split!r}.")
    locations = [f"row {number} of {hub_id}" for number in range(1, len(data) + 1)]
    return Table(hub_id, data.column_names, data.to_list(), locations)


def _ending(path: Path) -> str:
    return path.suffix.lower()
