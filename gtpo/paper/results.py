import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gtpo.errors import UsageError
from gtpo.runs import read_metrics, run_directory


@dataclass(frozen=True)
class Results:
    """What figures are drawn from.

    Attributes:
        metrics: Run name -> seed -> the rows of its ``metrics.jsonl``.
        scores: Run name -> benchmark -> seed -> its entry of an evaluation (docs/evaluation.md).
    """

    metrics: dict[str, dict[int, list[dict[str, Any]]]]
    scores: dict[str, dict[str, dict[int, dict[str, Any]]]]


def split_name(folder: Path) -> tuple[str, int | None]:
    """Name and seed of a run from its directory: ``gtpo-g8-s2`` is run gtpo-g8 with seed 2; no seed, then None.

    An ending ``-paper`` is left out: the files of SFT in configs/paper/ call their runs so.
    """
    match = re.fullmatch(r"(.+)-s(\d+)", folder.name)
    name, seed = (match[1], int(match[2])) if match else (folder.name, None)
    return name.removesuffix("-paper"), seed


def read_results(places: list[Path]) -> Results:
    """Every run and evaluation under some folders; of two with one name and seed the newer.

    A folder of condensed results (``metrics.parquet`` and ``evaluation.json``, as in results/tiny) is read too.
    """
    results = Results({}, {})
    for place in places:
        if (place / "metrics.parquet").is_file():
            _read_condensed(place, results)
    found = {path for place in places for path in run_directory(place).rglob("metrics.jsonl")}
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        name, seed = split_name(path.parent)
        if seed is None:
            settings = path.parent / "config.yaml"
            seed = int(yaml.safe_load(settings.read_text()).get("seed", 0)) if settings.is_file() else 0
        if rows := _rows(path.parent):
            results.metrics.setdefault(name, {})[seed] = rows
    scored = {path for place in places for path in place.rglob("results.json")}
    for path in sorted(scored, key=lambda path: path.stat().st_mtime):
        for entry in json.loads(path.read_text())["results"]:
            if entry["adapter"]:
                add_score(results, entry)
    return results


def _rows(run: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(run)
    except UsageError:  # it has just started
        return []


def add_score(results: Results, entry: dict[str, Any]) -> None:
    """Put an entry of an evaluation where its run and seed belong."""
    name, seed = split_name(Path(entry["adapter"]).parent)
    results.scores.setdefault(name, {}).setdefault(entry["benchmark"], {})[seed or 0] = entry


def _read_condensed(folder: Path, results: Results) -> None:
    from pyarrow.parquet import read_table

    for row in read_table(folder / "metrics.parquet").to_pylist():
        name, seed = row.pop("run"), row.pop("seed")
        values = {key: value for key, value in row.items() if value is not None}
        results.metrics.setdefault(name, {}).setdefault(seed, []).append(values)
    for entry in json.loads((folder / "evaluation.json").read_text()):
        add_score(results, entry)
