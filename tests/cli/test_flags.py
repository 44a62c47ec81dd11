"""Flags are checked before TRL is imported, against the names in its source."""

import dataclasses
import json
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of, write_lines
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.scripts import ROOT, run_process
from helpers.settings import parsed
from trl import GRPOConfig, SFTConfig, TrlParser

import train_gtpo
from gtpo.arguments import GTPOArguments
from gtpo.cli.flags import SettingsParser
from gtpo.cli.parse import load_backend_of, read_command_line
from train_gtpo import SETTINGS
from train_sft import SETTINGS as OF_SFT

TABLES = tables_of(__file__)
SCRIPTS = ("train_gtpo", "train_grpo", "train_sft")
NARROW = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}  # a terminal of 80 columns


@pytest.mark.parametrize(("config", "cls"), [("grpo_config", GRPOConfig), ("sft_config", SFTConfig)])
def test_flags_read_from_the_source_are_those_of_trl(config: str, cls: type) -> None:
    """But for switches, which take --x and --no_x, several reporters, and names of an enumeration as text."""
    ours = SettingsParser([], config)
    theirs = TrlParser([cls])
    words = {"str": "a", "int": "7", "float": "0.5", "string_to_bool": "F", "dict": "{}"}
    assert ours.settings.keys() == {field.name for field in dataclasses.fields(cls) if field.init}
    for name, got in ours.settings.items():
        expected: Any = theirs._option_string_actions[f"--{name}"]
        assert (name, [*(got.choices or ())]) == (name, [*(expected.choices or ())]) or name == "debug"
        kind = expected.type.__name__
        shape = ("?", True) if kind == "string_to_bool" else (expected.nargs, expected.const)
        assert (name, got.nargs, got.const) == (name, *shape) or name == "report_to"
        if kind in words and not expected.choices:
            assert (name, outcome(got.type, words[kind])) == (name, outcome(expected.type, words[kind]))
            assert outcome(got.type, "none") in (None, outcome(expected.type, "none")), (
                name
            )  # some revisions of TRL refuse it


def outcome(kind: Any, word: str) -> object:
    """What a type reads, or the kind of error."""
    try:
        return kind(word)
    except (ValueError, ArgumentTypeError) as error:
        return type(error)


@pytest.mark.parametrize("argv", TABLES["valid_flags_pass"])
def test_valid_flags_pass(argv: list[str]) -> None:
    read_command_line("gtpo", SETTINGS, argv)


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
    assert "[auto]" in page and "[prompt]" in page  # of our classes
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
    (here / "typed.yaml").write_text("learning_rate: fast\n")
    (here / "unknown.yaml").write_text("learnin_rate: 1\n")
    (here / "both.yaml").write_text("max_steps: 7\nnum_train_epochs: 4\n")
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
    assert load_backend_of(read_command_line("gtpo", SETTINGS, flags.split())) == "transformers"


def test_a_command_line_is_parsed_once(monkeypatch: pytest.MonkeyPatch, inputs: Path, no_gpu: None) -> None:
    """By train_gtpo.py, with a file, a preset and settings of a class that is imported later."""
    parses = []
    original = ArgumentParser.parse_known_args

    def counted(parser: ArgumentParser, *arguments: Any, **options: Any) -> Any:
        parses.append(parser.prog)
        return original(parser, *arguments, **options)

    monkeypatch.setattr(ArgumentParser, "parse_known_args", counted)  # parse_args calls it
    monkeypatch.setattr("sys.argv", ["train_gtpo.py", "--config", "words.yaml", "--gamma", "0.5"])
    trained = []
    monkeypatch.setattr("gtpo.training.loop.train_policy", lambda trainer, settings, *_: trained.append(settings))
    train_gtpo.main()
    assert (trained[0].gtpo.gamma, trained[0].reward.reward, len(parses)) == (0.5, ["format"], 1)


def test_a_message_names_the_short_and_the_long_flag() -> None:
    with refused(r"unknown argument '--num_generations' \(--G\)"):
        read_command_line("sft", OF_SFT, ["--G", "8"])


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
