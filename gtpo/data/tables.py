"""Rows of your own: JSONL, CSV and Parquet files, folders of such shards, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. ``datasets`` and ``pyarrow`` are imported when needed.
"""

import csv
import io
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
FORMATS = {".jsonl": "one JSON object per line", ".csv": "a header and one row per line", ".parquet": "rows"}
NOT_READ = {
    ".gz": "compressed files are not read: gunzip it",
    ".json": "JSON is read as .jsonl, one object per line: `jq -c '.[]'` writes the elements of an array so",
    ".arrow": "Arrow files are not read: write the rows with to_parquet",
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}


@dataclass(frozen=True)
class Table:
    """Rows and where each of them is stored.

    Attributes:
        name: The file, folder or Hub id.
        columns: Their names; each row has all of them.
        rows: Column -> value; None where a JSON object lacks it.
        places: Of each row, such as ``line 3 of my.csv``: the first of its lines.
    """

    name: str
    columns: list[str]
    rows: list[Row]
    places: list[str]


def is_user_data(source: str) -> bool:
    """Whether a name can only be your data: an existing path, the name of a file, or a Hub id."""
    return source != "" and (_is_path(source) or _HUB_ID.fullmatch(source) is not None)


def is_on_hub(source: str) -> bool:
    """Whether your data is a dataset of the Hub."""
    return not _is_path(source) and _HUB_ID.fullmatch(source) is not None


def _is_path(source: str) -> bool:
    return _ending(Path(source)) in {*FORMATS, *NOT_READ} or os.path.lexists(source)


def short_name_of(source: str, taken: Collection[str]) -> str:
    """A short name for your data: that of the file or folder without its ending, or the last part of the Hub id.

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
    """All rows of a file, of a folder of shards, or of one split of a dataset of the Hub.

    Args:
        source: Path or Hub id.
        split: The split of a dataset of the Hub that the user names.
        default_split: The one that is read otherwise.
        config: Configuration of a Hub dataset.

    Raises:
        UsageError: If it does not exist or cannot be read, a line is damaged, or a column has no name of its own.
    """
    if is_on_hub(source):
        return read_hub(source, config, split or default_split)
    for flag, value in (("dataset_config", config), ("split", split)):
        if value is not None:
            raise UsageError(f"--{flag} {value} is for a dataset of the Hub, and {source} is a path: remove it.")
    path = Path(source)
    return _read_folder(path) if path.is_dir() else read_file(path)


def read_file(path: Path, if_missing: str = "") -> Table:
    """All rows of one file.

    Args:
        path: The file; its ending names the format.
        if_missing: What the error for a file that does not exist says.

    Raises:
        UsageError: As :func:`read_table`.
    """
    if not path.is_file():
        why = if_missing or f"{path} does not exist: expected a file, a folder or a Hub id (owner/name)."
        if path.is_symlink() or path.exists():
            why = f"{path} is a broken link or not a regular file: write its content to a file first."
        raise UsageError(why)
    ending = _ending(path)
    if ending not in FORMATS:
        unknown = f"unknown format, expected a name that ends in {', '.join(FORMATS)}"
        raise UsageError(f"{path}: {NOT_READ.get(ending, unknown)}.")
    names, rows = {".jsonl": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}[ending](path)
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise UsageError(
                f"column {number} of {path} has no name: name it, or remove it (pandas writes its index without "
                "index=False)."
            )
        if names.count(name) > 1:
            raise UsageError(f"{path} has two columns {name!r}: rename one of them.")
    if not rows:
        raise UsageError(f"{path} is empty: expected {FORMATS[ending]}.")
    unit = "row" if ending == ".parquet" else "line"
    return _table(path, list(rows.values()), [f"{unit} {number} of {path}" for number in rows])


def _table(path: Path, rows: Sequence[Row], places: list[str]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(str(path), columns, [{name: row.get(name) for name in columns} for row in rows], places)


# One format each: names of the columns, and number -> row


def _read_json(path: Path) -> tuple[list[str], dict[int, Row]]:
    rows = {}
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if line.strip():
            try:
                rows[number] = row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                what = f"{getattr(error, 'msg', first_line(error))}{where}"
                raise UsageError(
                    f"line {number} of {path} is not valid JSON: {what}. Expected one JSON object per line."
                ) from error
            if not isinstance(row, dict):
                raise UsageError(f"line {number} of {path} is {reprlib.repr(row)}: expected a JSON object.")
    return list(dict.fromkeys(name for row in rows.values() for name in row)), rows


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return row


def _read_csv(path: Path) -> tuple[list[str], dict[int, Row]]:
    """The rows by the line where they begin; empty lines are skipped."""
    reader = csv.reader(io.StringIO(_text_of(path), newline=""), strict=True)
    names: list[str] = []
    rows = {}
    number = 1
    try:
        for fields in reader:
            if not names:
                names = fields
            elif fields and len(fields) != len(names):
                raise UsageError(
                    f"line {number} of {path} has {len(fields)} field(s) and the header {len(names)} "
                    f"({', '.join(names)}): put a field that contains a comma into double quotes."
                )
            elif fields:
                rows[number] = dict(zip(names, fields, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        what = "a quoted field has no closing quote" if "end of data" in str(error) else first_line(error)
        raise UsageError(
            f"line {number} of {path} is not valid CSV: {what}; a quote inside a quoted field is written twice."
        ) from error
    if len(names) == 1 and (separator := re.search("[;\t]", names[0])):
        raise UsageError(
            f"{path} has one column, {names[0]!r}: expected commas between columns, found {separator.group()!r}."
        )
    return names, rows


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line} of {path} is not valid UTF-8: {error.reason} at byte {error.start} of the file: save it as "
            "UTF-8 (a spreadsheet calls it `CSV UTF-8`)."
        ) from error


def _read_parquet(path: Path) -> tuple[list[str], dict[int, Row]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            return file.schema_arrow.names, dict(enumerate(file.read().to_pylist(), 1))
    except (OSError, ArrowException) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}. Expected a Parquet file.") from error


# Several files, and the Hub


def _read_folder(folder: Path) -> Table:
    """The shards in a folder, by name; folders in it are not read."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    shards = [path for path in files if _ending(path) in FORMATS]
    others = [f"{path}: {NOT_READ[_ending(path)]}." for path in files if _ending(path) in NOT_READ]
    if not shards:
        expected = f"expected files whose names end in {', '.join(FORMATS)}."
        raise UsageError(" ".join([f"{folder} has no data files: {expected}", *others[:1]]))
    if others:
        raise UsageError(others[0])
    kinds = {(_ending(path), _split_of(path)): path.name for path in shards}
    if len(kinds) > 1:
        raise UsageError(
            f"{folder} has {' and '.join(kinds.values())}: expected shards of one format and one split; put "
            "others into a folder of their own."
        )
    tables = [read_file(path) for path in shards]
    rows = [row for table in tables for row in table.rows]
    return _table(folder, rows, [place for table in tables for place in table.places])


def _split_of(shard: Path) -> str | None:
    """The split in the name of a shard: train of ``train-00000-of-00002.parquet``."""
    return next((word for word in re.split("[^a-z]+", shard.name.lower()) if word in _SPLITS), None)


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
    places = [f"row {number} of {hub_id}" for number in range(1, len(data) + 1)]
    return Table(hub_id, data.column_names, data.to_list(), places)


def _ending(path: Path) -> str:
    return path.suffix.lower()
