"""Flags are checked before TRL is imported, against the names in its source."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.files import tables_of, write_lines
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.scripts import ROOT, run_process
from helpers.settings import parsed
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import GTPOArguments
from gtpo.cli.flags import annotations_of, check_flags, spelled_out
from gtpo.cli.parse import load_backend_of, read_command_line
from train_gtpo import SETTINGS
from train_sft import SETTINGS as OF_SFT

TABLES = tables_of(__file__)
SCRIPTS = ("train_gtpo", "train_grpo", "train_sft")
NARROW = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}  # a terminal of 80 columns


@pytest.mark.parametrize(("config", "cls"), [("grpo_config", GRPOConfig), ("sft_config", SFTConfig)])
def test_names_in_the_source_are_those_of_the_dataclass(config: str, cls: type) -> None:
    assert set(annotations_of(config)) == {field.name for field in dataclasses.fields(cls) if field.init}


@pytest.mark.parametrize("argv", TABLES["valid_flags_pass"])
def test_valid_flags_pass(argv: list[str]) -> None:
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_two_screens_and_loads_no_trl(script: str) -> None:
    page = run_process([sys.executable, "-c", HELP.format(script=script)], env=NARROW).stdout
    lines = page.splitlines()
    assert len(lines) <= 80
    assert all(len(line) <= 80 for line in lines if line.startswith("  --"))
    flags = re.findall(r"^  --(\w+)", page, re.MULTILINE)
    assert len(flags) == len({*flags})
    expected = "model dataset max_steps learning_rate output_dir run_name resume overwrite dry_run prompt_column tags"
    assert {*expected.split(), "lora_rank", "report_to", "seed"} <= {*flags}
    assert ({"G", "max_completion_length", "reward"} <= {*flags}) is (script != "train_sft")
    assert ({"gamma", "entropy_filter", "conflict_correction"} <= {*flags}) is (script == "train_gtpo")
    assert ("beta" in flags) is (script == "train_grpo")
    if script == "train_gtpo":
        assert "[0.001]" in page and "[150]" in page  # of the preset


def test_the_help_of_an_evaluation_has_its_own_texts() -> None:
    page = run_process([sys.executable, str(ROOT / "evaluate.py"), "--help"]).stdout
    words = " ".join(page.split())
    assert re.findall(r"^  --(\w+)", page, re.MULTILINE)[0] == "benchmarks"
    assert "Directory of completions and scores. (default: outputs/evaluation)" in words
    assert "The same seed gives the same completions. (default: 0)" in words
    assert "default: None" not in words and "default: []" not in words


@pytest.fixture
def inputs(here: Path) -> Path:
    """The working directory with data, a reward, a run, a directory of another program."""
    (here / "two.csv").write_text("prompt,answer\n1 + 1?,2\n2 + 2?,4\n")
    (here / "prompts.csv").write_text("prompt\n1 + 1?\n")
    (here / "mine.py").write_text("def speed(completions, **columns):\n    return [0.0] * len(completions)\n")
    (here / "hidden.py").write_text("exec('def speed(): pass')\nfrom mine import *\n")
    (here / "torn.py").write_text("def speed(:\n")
    (here / "gaps.csv").write_text('prompt,answer\na,\n" ",2\nc,N/A\n')
    (here / "few.csv").write_text('prompt,answer\na,1\n" ",2\nc,3\n')
    (here / "true.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": true}\n')
    (here / "number.jsonl").write_text('{"prompt": 3, "answer": "1"}\n')
    (here / "broken.jsonl").write_text("[1]\n")
    rows = [{"task": "1 + 1?"}] * 1100 + [{"task": "1 + 1?", "late": "2", "answer": "2"}]
    write_lines(here / "long.jsonl", rows)
    (here / "reward.yaml").write_text("reward: [format, speed]\n")
    (here / "words.yaml").write_text("reward: format\ntags: <a> </a> <b> </b>\n")
    stored = {"model": "tiny", "gamma": 0.1, "num_generations": 4, "prompts_per_step": 1, "dataset": "two.csv"}
    fake_run(here / "mine", stored, steps=[5])
    (here / "other").mkdir()
    (here / "other" / "notes.txt").write_text("mine")
    (here / "settings.yaml").write_text("output_dir: mine\n")
    (here / "quoted.yaml").write_text("limit: '2'\n")
    return here


REFUSAL = """
import json, sys
from argparse import ArgumentError
import {script}
for words in json.loads(sys.argv[1]):
    sys.argv = ["{script}.py", *words]
    try:
        {script}.main()
    except (ValueError, ArgumentError) as error:
        print(json.dumps([str(error), sorted({{"torch", "transformers", "trl", "datasets"}} & sys.modules.keys())]))
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_inputs_are_refused_before_torch_is_imported(script: str, inputs: Path) -> None:
    rows = TABLES["wrong_inputs_are_refused_before_torch_is_imported"]
    if script != "train_sft":
        rows = rows + TABLES["wrong_rewards_are_refused_before_torch_is_imported"]
    rows = rows + TABLES.get(f"wrong_values_of_{script.removeprefix('train_')}", [])
    argv = json.dumps([flags.split(" ") for flags, _ in rows])
    ended = run_process([sys.executable, "-c", REFUSAL.format(script=script), argv], cwd=inputs, env=NARROW)
    for (flags, text), line in zip(rows, ended.stdout.splitlines(), strict=True):
        message, imported = json.loads(line)
        assert text in message and imported == [], flags


@pytest.mark.parametrize("flags", TABLES["right_inputs_pass"])
def test_right_inputs_pass(flags: str, inputs: Path, no_gpu: None) -> None:
    assert load_backend_of(read_command_line("gtpo", flags.split()), SETTINGS) == "transformers"


def test_a_message_names_the_short_and_the_long_flag() -> None:
    with refused(r"unknown argument '--num_generations' \(--G\)"):
        check_flags("sft", spelled_out(["--G", "8"]), OF_SFT)


def test_settings_are_checked_in_a_subclass_with_slots() -> None:
    @dataclasses.dataclass(slots=True)
    class Mine(GTPOArguments):
        mine: int = 1

    with refused("--gamma is -1: expected a finite number >= 0"):
        Mine(gamma=-1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("G: 4\nnum_generations: 8\n", "'G' and 'num_generations' are one setting"),
        ("gpu_memory_utilization: 0.4\nvllm_gpu_memory_utilization: 0.3\n", "'gpu_memory_utilization' and 'vllm_gpu"),
    ],
)
def test_a_setting_named_twice_in_a_file_is_refused(text: str, message: str, here: Path) -> None:
    Path("settings.yaml").write_text(text)
    with refused(f"settings.yaml: {message}"):
        parsed("--config", "settings.yaml")


def test_an_overridden_or_null_setting_is_given_once(here: Path) -> None:
    Path("settings.yaml").write_text("num_generations: 8\nG: null\n")
    for words, expected in (([], 8), (["--G", "4", "--G", "6"], 6)):  # as appended
        assert parsed("--config", "settings.yaml", *words).trainer.num_generations == expected
