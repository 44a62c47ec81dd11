"""Rows of your own: JSONL, JSON, CSV and Parquet files, folders of them, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. ``datasets`` and ``pyarrow`` are imported when needed.
"""

import csv
import gzip
import io
import json
import re
import reprlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line

Row = dict[str, Any]
FORMATS = {  # ending -> format; the files of a folder have one format
    ".jsonl": "JSON",
    ".jsonl.gz": "JSON",
    ".json": "JSON",
    ".json.gz": "JSON",
    ".csv": "CSV",
    ".csv.gz": "CSV",
    ".parquet": "Parquet",
}
MEDIA = {"Image", "Audio", "Video"}  # feature types of ``datasets``
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


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
    return _format(Path(source)) is not None or Path(source).exists() or _HUB_ID.fullmatch(source) is not None


def is_on_hub(source: str) -> bool:
    """Whether your data is a dataset of the Hub."""
    return is_user_data(source) and not Path(source).exists() and _format(Path(source)) is None


def short_name_of(source: str, taken: Collection[str]) -> str:
    """A short name for your data: that of the file or folder without its ending, or the last part of the Hub id.

    Args:
        source: Path or Hub id.
        taken: Names that mean something else: ``gsm8k.csv`` stays as it is, ``./gsm8k`` gets the name above it.
    """
    path = Path(source).resolve()
    short = next((path.name[: -len(end)] for end in FORMATS if path.name.lower().endswith(end)), path.name)
    if short not in taken:
        return short
    return path.name if short != path.name else f"{path.parent.name}-{path.name}"


def read_table(source: str, split: str | None, default_split: str, config: str | None = None) -> Table:
    """All rows of a file, a folder, or a dataset of the Hub.

    Args:
        source: Path or Hub id.
        split: The split of a folder or of the Hub that the user names; a file has none.
        default_split: The one that is read otherwise.
        config: Configuration of a Hub dataset.

    Raises:
        UsageError: If it does not exist or cannot be read, a line is damaged, or a column has no name of its own.
    """
    if is_on_hub(source):
        return _read_hub(source, config, split or default_split)
    path = Path(source)
    if config is not None:
        raise UsageError(f"--dataset_config {config} is for a dataset of the Hub, and {source} is a path: remove it.")
    if path.is_dir():
        return _read_folder(path, split or default_split)
    if split is not None:
        raise UsageError(f"--split {split} is for a folder or a dataset of the Hub, and {source} is a file: remove it.")
    return read_file(path)


def read_file(path: Path, if_missing: str = "") -> Table:
    """All rows of one file.

    Args:
        path: The file; its ending names the format.
        if_missing: What the error for a file that does not exist says.

    Raises:
        UsageError: As :func:`read_table`.
    """
    if not path.is_file():
        raise UsageError(if_missing or f"{path} does not exist: expected a file, a folder or a Hub id (owner/name).")
    format_ = _format(path)
    if format_ is None:
        raise UsageError(f"{path} has an unknown format: expected a name that ends in {', '.join(FORMATS)}.")
    if format_ == "Parquet":
        unit, numbered = "row", _parquet_rows(path)
    elif format_ == "CSV":
        unit, numbered = "line", _csv_rows(path, _text_of(path))
    else:
        content = _content_of(path)
        is_array = content.lstrip().startswith(b"[")
        unit, numbered = "row" if is_array else "line", _json_rows(path, content, is_array)
    if not numbered:
        raise UsageError(f"{path} is empty: expected {_EXPECTED[format_]}.")
    columns = list(dict.fromkeys(name for row in numbered.values() for name in row))
    _check_names(columns, path)
    rows = [{name: row.get(name) for name in columns} for row in numbered.values()]
    return Table(str(path), columns, rows, [f"{unit} {number} of {path}" for number in numbered])


_EXPECTED = {"JSON": "one JSON object per line", "CSV": "a header and one row per line", "Parquet": "rows"}


# One format each: number -> row


def _json_rows(path: Path, content: bytes, is_array: bool) -> dict[int, Row]:
    """The objects of a JSONL file by line, or of a JSON array by element."""
    if is_array:
        values = dict(enumerate(_from_json(content, str(path)), 1))
    else:
        lines = enumerate(content.split(b"\n"), 1)
        values = {number: _from_json(line, f"line {number} of {path}") for number, line in lines if line.strip()}
    for number, row in values.items():
        if not isinstance(row, dict):
            unit = "row" if is_array else "line"
            raise UsageError(f"{unit} {number} of {path} is {reprlib.repr(row)}: expected a JSON object.")
    return values


def _from_json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UsageError(
            f"{where} is not valid JSON: {error.msg} at {line}column {error.colno}. Expected one JSON object per line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {first_line(error)}.") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return row


def _csv_rows(path: Path, text: str) -> dict[int, Row]:
    """The rows by the line where they begin; empty lines are skipped."""
    records = _csv_records(path, text)
    _, names = next(records, (0, []))
    _check_names(names, path)
    if len(names) == 1 and (separator := re.search("[;\t]", names[0])):
        raise UsageError(
            f"{path} has one column, {names[0]!r}: expected commas between columns, found {separator.group()!r}."
        )
    rows = {}
    for number, fields in records:
        if len(fields) != len(names):
            raise UsageError(
                f"line {number} of {path} has {len(fields)} field(s) and the header {len(names)} ({', '.join(names)}): "
                "put a field that contains a comma into double quotes."
            )
        rows[number] = dict(zip(names, fields, strict=True))
    return rows


def _csv_records(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    with _long_fields(len(text)):
        while True:
            number = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                what = "a quoted field has no closing quote" if "end of data" in str(error) else first_line(error)
                raise UsageError(
                    f"line {number} of {path} is not valid CSV: {what}; a quote inside a quoted field is written twice."
                ) from error
            if fields:
                yield number, fields


@contextmanager
def _long_fields(size: int) -> Iterator[None]:
    before = csv.field_size_limit(max(size, 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path) -> dict[int, Row]:
    from datasets import Features
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, path)
            _refuse_media(Features.from_arrow_schema(file.schema_arrow), str(path))
            return dict(enumerate(file.read().to_pylist(), 1))
    except (OSError, ArrowException) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}. Expected a Parquet file.") from error


def _content_of(path: Path) -> bytes:
    """The bytes of a text file, unpacked, without a byte order mark."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        expected = _EXPECTED[str(_format(path))]
        raise UsageError(f"{path} cannot be read: {first_line(error)}. Expected {expected}.") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path} is UTF-16: save it as UTF-8.")
    return content.removeprefix(b"\xef\xbb\xbf")


def _text_of(path: Path) -> str:
    content = _content_of(path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line} of {path} is not valid UTF-8: {error.reason} at byte {error.start} of the file: save it as "
            "UTF-8 (a spreadsheet calls it `CSV UTF-8`)."
        ) from error


def _check_names(names: Collection[str], where: str | Path) -> None:
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise UsageError(
                f"column {number} of {where} has no name: name it, or remove it (pandas writes its index without "
                "index=False)."
            )
        if list(names).count(name) > 1:
            raise UsageError(f"{where} has two columns {name!r}: rename one of them.")


def _refuse_media(features: Mapping[str, Any], where: str) -> None:
    for name, feature in features.items():
        kind = type(getattr(feature, "feature", feature)).__name__  # also a list of them
        if kind in MEDIA:
            raise UsageError(f"{where}: column {name!r} has the type {kind}, which is not supported: remove it.")


# Several files, and the Hub


def _read_folder(folder: Path, split: str) -> Table:
    """The files of one split, which ``datasets`` finds by their names: all files, where no name says test."""
    from datasets.data_files import FILES_TO_IGNORE, DataFilesDict, get_data_patterns

    if any(folder.glob("**/*.arrow")):
        raise UsageError(f"{folder} has Arrow files, as save_to_disk writes them: write the rows with to_parquet.")
    shown = [path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder)]
    found = {path.resolve() for path in shown if _format(path) and path.name not in FILES_TO_IGNORE}
    if not found:
        raise UsageError(f"{folder} has no data files: expected names that end in {', '.join(FORMATS)}.")
    root = str(folder.resolve())
    by_split = {
        str(name): sorted(path for file in files if (path := Path(file)) in found)
        for name, files in DataFilesDict.from_patterns(get_data_patterns(root), base_path=root).items()
    }
    if left_out := found.difference(*by_split.values()):
        raise UsageError(
            f"{min(left_out)} belongs to no split of {folder} ({', '.join(by_split)}): move it, or put the name of a "
            "split into its name."
        )
    if not by_split.get(split):
        raise UsageError(f"{folder} has no split {split!r}: it has {', '.join(by_split)} (--split).")
    tables = [read_file(folder / path.relative_to(folder.resolve())) for path in by_split[split]]
    formats = {_format(path): path for path in by_split[split]}
    if len(formats) > 1:
        raise UsageError(f"{folder} has {' and '.join(map(str, formats))} files: expected one format in a folder.")
    for table in tables:
        if "JSON" not in formats and set(table.columns) != set(tables[0].columns):
            raise UsageError(
                f"{table.name} has the columns {', '.join(table.columns)}, and {tables[0].name} has "
                f"{', '.join(tables[0].columns)}: expected the same in all files of a split."
            )
    columns = list(dict.fromkeys(name for table in tables for name in table.columns))
    rows = [{name: row.get(name) for name in columns} for table in tables for row in table.rows]
    return Table(str(folder), columns, rows, [place for table in tables for place in table.places])


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)


def _read_hub(hub_id: str, config: str | None, split: str) -> Table:
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
    _refuse_media(data.features, hub_id)
    places = [f"row {number} of {hub_id}" for number in range(1, len(data) + 1)]
    return Table(hub_id, data.column_names, data.to_list(), places)


def _format(path: Path) -> str | None:
    name = path.name.lower()
    return next((format_ for ending, format_ in FORMATS.items() if name.endswith(ending)), None)
