"""Flags are checked before TRL is imported, against the names in its source."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT
from trl import GRPOConfig, SFTConfig

from gtpo.cli.parse import check_flags, names_of, spelled_out
from train_gtpo import SETTINGS


@pytest.mark.parametrize(("config", "cls"), [("grpo_config", GRPOConfig), ("sft_config", SFTConfig)])
def test_the_names_in_the_source_are_those_of_the_dataclass(config: str, cls: type) -> None:
    assert set(names_of(config)) == {field.name for field in dataclasses.fields(cls) if field.init}


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


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--modle", "x"], "'--model'"),
        (["--dataset", "own.csv", "--answer_column", "gold"], "--answer_column"),
        (["--config", "own.yaml"], "--prompt_column"),
    ],
)
def test_the_scripts_refuse_names_of_flags_and_columns_before_torch_is_imported(
    argv: list[str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text("prompt,answer\na,1\n")
    (tmp_path / "own.yaml").write_text("dataset: own.csv\nprompt_column: task\n")
    code = """
import json, sys
import {script}
sys.argv = ["{script}.py", *{argv}]
try:
    {script}.main()
except ValueError as error:
    print(json.dumps([str(error), sorted({{"torch", "transformers", "trl", "datasets"}} & sys.modules.keys())]))
"""
    for script in ("train_gtpo", "train_grpo", "train_sft"):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(script=script, argv=argv)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        message, imported = json.loads(ended.stdout)
        assert named in message and imported == []
