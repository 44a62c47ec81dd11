"""Flags are checked before TRL is imported, against the names in its source."""

import dataclasses
import json
import os
import re
import sys
from argparse import ArgumentError
from pathlib import Path

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.scripts import ROOT, run_process
from helpers.settings import parsed
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import GTPOArguments
from gtpo.cli.flags import annotations_of, check_flags, spelled_out
from gtpo.errors import UsageError
from train_gtpo import SETTINGS

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("config", "cls"), [("grpo_config", GRPOConfig), ("sft_config", SFTConfig)])
def test_the_names_in_the_source_are_those_of_the_dataclass(config: str, cls: type) -> None:
    assert set(annotations_of(config)) == {field.name for field in dataclasses.fields(cls) if field.init}


@pytest.mark.parametrize(
    "argv",
    TABLES["valid_flags_pass"],
)
def test_valid_flags_pass(argv: list[str]) -> None:
    check_flags("gtpo", spelled_out(argv), SETTINGS)


@pytest.mark.parametrize(
    ("argv", "message"),
    TABLES["wrong_values_are_refused_without_trl"],
)
def test_wrong_values_are_refused_without_trl(argv: list[str], message: str) -> None:
    with pytest.raises((UsageError, ArgumentError), match=re.escape(message)):
        check_flags("gtpo", spelled_out(argv), SETTINGS)


def test_beta_is_a_setting_of_grpo() -> None:
    check_flags("grpo", ["--beta", "0.04"], SETTINGS)


HELP = """
import sys
import {script}
sys.argv = ["{script}.py", "--help"]
try:
    {script}.main()
finally:
    assert not {{"torch", "transformers", "trl", "datasets"}} & sys.modules.keys()
"""


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft"])
def test_help_fits_two_screens_and_loads_no_trl(script: str) -> None:
    code = HELP.format(script=script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    page = run_process([sys.executable, "-c", code], env=environment)
    lines = page.stdout.splitlines()
    flags = re.findall(r"^  --(\w+)", page.stdout, re.MULTILINE)
    assert len(lines) <= 80 and len(flags) == len(set(flags))
    settings = [line for line in lines if line.startswith("  --")]
    assert max(map(len, settings)) <= 80
    expected = {
        *("model", "dataset", "max_steps", "learning_rate", "output_dir", "run_name", "resume", "overwrite", "dry_run"),
        *("prompt_column", "tags", "lora_rank", "report_to", "seed"),
    }
    of_groups = {"G", "max_completion_length", "reward"}
    of_gtpo = {"gamma", "entropy_filter", "conflict_correction"}
    assert expected <= set(flags)
    assert (of_groups <= set(flags)) is (script != "train_sft")
    assert (of_gtpo <= set(flags)) is (script == "train_gtpo")
    assert ("beta" in flags) is (script == "train_grpo")
    if script == "train_gtpo":
        assert re.search(r"--learning_rate.*\n? *.*\[0.001\]", page.stdout) and "[150]" in page.stdout  # of the preset


def test_the_help_of_an_evaluation_has_its_own_texts() -> None:
    page = run_process([sys.executable, str(ROOT / "evaluate.py"), "--help"]).stdout
    words = " ".join(page.split())
    assert re.findall(r"^  --(\w+)", page, re.MULTILINE)[0] == "benchmarks"
    assert "Directory of completions and scores. (default: outputs/evaluation)" in words
    assert "The same seed gives the same completions. (default: 0)" in words
    assert "default: None" not in words and "default: []" not in words


def test_the_scripts_refuse_names_of_flags_before_torch_is_imported(tmp_path: Path) -> None:
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
        command = [sys.executable, "-c", code.format(script=script)]
        ended = run_process(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        message, imported = json.loads(ended.stdout)
        assert "'model'" in message and imported == []


def test_stop_on_collapse_needs_the_accuracy_reward() -> None:
    assert parsed("--stop_on_collapse").reward.stop_on_collapse
    with refused("--stop_on_collapse watches the accuracy reward, which --reward leaves out"):
        parsed("--stop_on_collapse", "--reward", "format")


def test_the_settings_of_gtpo_are_checked_in_a_subclass_with_slots() -> None:
    @dataclasses.dataclass(slots=True)
    class Mine(GTPOArguments):
        mine: int = 1

    for name in ("gamma", "entropy_threshold", "conflict_positive_weight", "initial_entropy"):
        with refused(f"--{name} is -1: expected a finite number >= 0"):
            Mine(**{name: -1})
