"""configs/paper: one file per training run of the paper, in the right figures, with the right values, and it trains.

The meaning of a file name is written here by hand from the paper's text.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.settings import parsed

import gtpo.cli.parse
from gtpo.files import CONFIGS, read_yaml

PARTS: dict[str, dict[str, Any]] = tables_of(__file__)
FILES = sorted((CONFIGS / "paper").glob("*.yaml"))


# The values: those in the name of a file, and Listing 1 for the rest


def method_of(path: Path) -> str:
    return path.stem.partition("-")[0]


def differs(path: Path) -> str:
    """The part of the name after method, model and dataset."""
    return "-".join(path.stem.split("-")[3:])


def named_values(path: Path) -> dict[str, Any]:
    """The values in the name of the file; G is 8 in an ablation, whose name does not have it."""
    method, model, dataset = path.stem.split("-")[:3]
    values: dict[str, Any] = {"model": model, "dataset": dataset}
    if method != "sft":
        values["num_generations"] = 8
    rest = differs(path)
    while rest:
        part = re.match(rf"({'|'.join(PARTS)})(\d+(?:\.\d+)?(?:e-\d+)?)?(?:-|$)", rest)
        assert part, f"{path.name}: {rest!r} is not a known part of a name"
        values |= {key: json.loads(part[2]) if value == "NUMBER" else value for key, value in PARTS[part[1]].items()}
        rest = rest[part.end() :]
    return values


@functools.cache
def resolved(method: str, *argv: str) -> dict[str, Any]:
    """The settings on a GPU, where the preset is that of Listing 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        patch.setattr(gtpo.cli.parse, "gpu_is_available", lambda: True)
        return parsed("--use_cpu", "true", *argv, method=method).to_dict()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_listing_1(path: Path) -> None:
    method = method_of(path)
    values = named_values(path)
    preset = ["--model", values["model"]]
    if method != "sft":
        preset += ["--G", str(values["num_generations"])]  # the batch follows from G
    run_name = differs(path) or "paper"
    expected = resolved(method, *preset) | values
    expected |= {"run_name": run_name, "output_dir": f"outputs/{'-'.join(path.stem.split('-')[:3])}-{run_name}"}
    assert resolved(method, "--config", str(path)) == expected
    # The file sets every value of its name, even one that equals the preset's.
    assert {key: value for key, value in read_yaml(path).items() if key != "run_name"} == values


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", "auto"),  # Eq. 10
        ("qwen", "off"),  # Section 6.2: "the standard approach for Qwen [...] does not apply the completion filtering"
        ("Qwen/Qwen2.5-3B-Instruct", "off"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "auto"),  # takes Qwen's preset, but the paper says nothing about it
    ],
)
def test_each_model_has_the_filter_of_the_paper(model: str, expected: str) -> None:
    assert resolved("gtpo", "--model", model)["entropy_filter"] == expected
