"""configs/paper: one file per training run of the paper, with the values of its name; the rest is Listing 1's.

The meaning of a file name is written here by hand from the paper's text.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.settings import parsed

from gtpo.files import CONFIGS, read_yaml

PARTS: dict[str, dict[str, Any]] = tables_of(__file__)
FILES = sorted((CONFIGS / "paper").glob("*.yaml"))


def differs_by(path: Path) -> str:
    """The part of the name after method, model and dataset."""
    return "-".join(path.stem.split("-")[3:])


def named_values(path: Path) -> dict[str, Any]:
    """The values in the name of the file; G is 8 in an ablation, whose name does not have it."""
    method, model, dataset = path.stem.split("-")[:3]
    values: dict[str, Any] = {"model": model, "dataset": dataset}
    if method != "sft":
        values["num_generations"] = 8
    rest = differs_by(path)
    while rest:
        part = re.match(rf"({'|'.join(PARTS)})(\d+(?:\.\d+)?(?:e-\d+)?)?(?:-|$)", rest)
        assert part, f"{path.name}: {rest!r} is not a known part of a name"
        values |= {key: json.loads(part[2]) if value == "NUMBER" else value for key, value in PARTS[part[1]].items()}
        rest = rest[part.end() :]
    return values


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_the_name(path: Path, gpu: None) -> None:
    """All of them, even one that equals the preset's, and no others; the script takes them."""
    values = named_values(path)
    assert read_yaml(path) == values | {"run_name": differs_by(path) or "paper"}
    settings = parsed("--use_cpu", "true", "--config", str(path), method=path.stem.partition("-")[0]).to_dict()
    assert {name: settings[name] for name in values} == values


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", "auto"),  # Eq. 10
        ("qwen", "off"),  # Section 6.2: "the standard approach for Qwen [...] does not apply the completion filtering"
        ("Qwen/Qwen2.5-3B-Instruct", "off"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "auto"),  # takes Qwen's preset, but the paper says nothing about it
    ],
)
def test_each_model_has_the_filter_of_the_paper(model: str, expected: str, gpu: None) -> None:
    assert parsed("--use_cpu", "true", "--model", model).to_dict()["entropy_filter"] == expected
