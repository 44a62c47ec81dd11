"""JSON, JSON lines and YAML files in one call."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), "utf-8")


def read_lines(path: Path) -> list[Any]:
    """The values of a JSON lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, values: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")


def read_settings(path: Path) -> Any:
    """A YAML file, such as the ``config.yaml`` of a run."""
    return yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)  # a tenth of the time of yaml.safe_load


def write_settings(path: Path, values: Any) -> None:
    path.write_text(yaml.safe_dump(values), "utf-8")


def tables_of(file: str) -> dict[str, Any]:
    """Inputs and expected values of a test file, by the name of the test: the YAML file beside it."""
    return read_settings(Path(file).with_suffix(".yaml"))
