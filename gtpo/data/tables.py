"""Your rows: JSONL, CSV and Parquet files, and datasets of the Hub.

Values are read as they are stored: everything in a CSV file is text ("007", "TRUE", "1,000"), and no type is inferred.
What cannot be read is an error that names file and line. ``datasets`` and ``pyarrow`` are imported when needed.
"""

import csv
import json
import os
import re
import reprlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gtpo.arguments import DataArguments
from gtpo.errors import UsageError, first_line, nearest

Row = dict[str, Any]
FORMATS = (".jsonl", ".csv", ".parquet")
NOT_READ = (".json", ".gz", ".arrow")  # data of other formats, which is refused rather than taken for a Hub id
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Table:
    """Rows, each with its place: ``line 3 of my.csv``, the last of its lines. All have all columns, perhaps None."""

    name: str  # the file or Hub id
    columns: list[str]
    rows: list[tuple[Row, str]]

    @classmethod
    def of(cls, name: str, rows: Iterable[tuple[Row, str]]) -> "Table":
        rows = list(rows)
        if not rows:
            raise UsageError(f"{name} has no rows.")
        columns = list(dict.fromkeys(chain.from_iterable(row for row, _ in rows)))
        return cls(name, columns, [({column: row.get(column) for column in columns}, place) for row, place in rows])


def check_source(flag: str, source: str, known: Collection[str]) -> None:
    """Refuse what is none of ``known`` and cannot be your data: an existing path, the name of a file, or a Hub id."""
    if source not in known and (source == "" or (is_on_hub(source) and not _HUB_ID.fullmatch(source))):
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
    short = path.stem if path.suffix.lower() in FORMATS else path.name
    if short not in taken:
        return short
    return path.name if short != path.name else f"{path.parent.name}-{path.name}"


def read_table(source: str, flags: DataArguments, default_split: str, most: int | None = None) -> Table:
    """The first ``most`` rows of a file, or of one split of a dataset of the Hub."""
    if is_on_hub(source):
        return read_hub(source, flags.dataset_config, flags.split or default_split, most)
    for flag in ("dataset_config", "split"):
        if (value := getattr(flags, flag)) is not None:
            raise UsageError(f"--{flag} {value} is for a dataset of the Hub, and {source} is a path: remove it.")
    return read_file(Path(source), most=most)


def read_file(path: Path, most: int | None = None) -> Table:
    """The first rows of a file, whose ending names the format."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if (ending := path.suffix.lower()) not in readers:
        raise UsageError(f"{path}: unknown format, expected .jsonl (a JSON object per line), .csv or .parquet.")
    try:
        rows = list(islice(readers[ending](path), most))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}.") from error
    unit = "row" if ending == ".parquet" else "line"
    return Table.of(str(path), ((row, f"{unit} {number} of {path}") for number, row in rows))


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
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return row


def _read_csv(path: Path) -> Iterable[tuple[int, Row]]:
    """Numbered by the line where they end. Not by pandas, which shifts the columns of a row longer than the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        if len(header) == 1 and (mark := next((mark for mark in ";\t" if mark in header[0]), None)):
            raise ValueError(
                f"the header {header[0]!r} has {mark!r} between the columns: save it with commas between columns and "
                "points in decimal numbers"
            )
        if len({*header, ""}) <= len(header):
            raise ValueError(f"duplicate or empty column name in the header {header}")
        for row in filter(None, reader):
            if len(row) != len(header):
                where = f"line {reader.line_num} has more or fewer fields than the header ({', '.join(header)})"
                raise ValueError(f"{where}: put a field that contains a comma into double quotes")
            yield reader.line_num, dict(zip(header, row, strict=True))


def _read_parquet(path: Path) -> Iterable[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(1024)), 1)


def read_hub(hub_id: str, config: str | None, split: str, most: int | None = None) -> Table:
    """The first rows of one split of a dataset of the Hub."""
    from datasets import load_dataset

    try:
        data = load_dataset(hub_id, config, split=split)
    except Exception as error:  # of the network, of the Hub, and of the reader of each format
        what = f"cannot read {hub_id}, split {split!r}, from the Hub: {' '.join(str(error).split()).rstrip('.')[:300]}"
        raise UsageError(f"{what}. Check the name, --split, --dataset_config, the network.") from error
    rows = data.select(range(len(data))[:most]).to_list()
    return Table.of(hub_id, ((row, f"row {number} of {hub_id}") for number, row in enumerate(rows, 1)))
