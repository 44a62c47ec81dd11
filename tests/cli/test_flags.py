"""Flags are checked before TRL is imported, against the names in its source."""

import dataclasses
import json
import subprocess
import sys

import pytest
from helpers.scripts import ROOT
from trl import GRPOConfig, SFTConfig

from gtpo.cli.parse import check_flags, names_of, spelled_out
from gtpo.errors import UsageError
from train_gtpo import SETTINGS


@pytest.mark.parametrize(("config", "cls"), [("grpo_config", GRPOConfig), ("sft_config", SFTConfig)])
def test_the_names_in_the_source_are_those_of_the_dataclass(config: str, cls: type) -> None:
    assert set(names_of(config)) == {field.name for field in dataclasses.fields(cls) if field.init}


@pytest.mark.parametrize("argv", [["--modle", "x"], ["--help_me", "4"], ["--gamma=1", "--frobnicate", "4"]])
def test_an_unknown_flag_is_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=f"unknown option {argv[-2]}"):
        check_flags(spelled_out(argv), "grpo_config", SETTINGS)


@pytest.mark.parametrize(
    "argv",
    [
        ["--resume"],
        ["--resume", "outputs/a", "--dry_run", "--overwrite", "false", "--G=4", "--report_to", "wandb", "tensorboard"],
        ["--no_log_completions", "--lr_scheduler_kwargs", '{"a": 1}', "--reward", "format", "a.py:f"],
        ["--lora-rank", "4", "--unsloth_num_chunks", "4", "--config", "a.yaml", "--bf16", "--max_grad_norm=1e-3"],
    ],
)
def test_valid_flags_pass(argv: list[str]) -> None:
    check_flags(spelled_out(argv), "grpo_config", SETTINGS)


def test_the_scripts_refuse_a_flag_before_torch_is_imported() -> None:
    """The check is quick because nothing heavy is imported."""
    code = """
import json, sys
import {script}
sys.argv = ["{script}.py", "--modle", "x"]
try:
    {script}.main()
except ValueError as error:
    print(json.dumps([str(error), sorted({{"torch", "transformers", "trl", "datasets"}} & sys.modules.keys())]))
"""
    for script in ("train_gtpo", "train_grpo", "train_sft"):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(script=script)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        message, imported = json.loads(ended.stdout)
        assert message.startswith("unknown option --modle (did you mean '--model'?)") and imported == []
