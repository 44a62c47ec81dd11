"""Every command of the README, in order, in one directory: small on the tiny model, as a dry run if it needs a GPU."""

import itertools
import re
import shlex
import sys
from pathlib import Path

from helpers.files import read_json
from helpers.scripts import ROOT, RunScript, run_process
from pytest import TempPathFactory, fixture, mark

from examples import demo

README = (ROOT / "README.md").read_text()
BASH = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
SCRIPTS = [line for line in BASH if line.startswith("python ") and "-m study" not in line]
SMALL = "--max_steps 2 --lora_rank 4 --G 4 --max_completion_length 12 --prompts_per_step 1"
MAX_LINES, MAX_COLUMNS = 115, 95
NEEDS_HUB = {"llama", "smol"}  # and a GPU, or minutes


def test_the_demo_in_the_readme_is_the_stored_one() -> None:
    stored = read_json(ROOT / "results/demo/summary.json")
    for name in ("accuracy", "formatting"):
        (row,) = re.findall(rf"^\| {name} \| (.+) \|$", README, re.MULTILINE)
        ways = itertools.product(("greedy", "sampled"), ("before", "after"))
        assert re.findall(r"\d+\.\d", row) == [f"{stored[f'{name}_{when}_{way}']:.1f}" for way, when in ways]


def test_the_question_to_the_demo_and_its_answers_are_the_stored_ones() -> None:
    """`make demo` asks it, and with --small, as CI runs it, fails if the trained model's answer is wrong."""
    asked = read_json(ROOT / "results/demo/summary.json")["asked"]
    assert (asked["question"], asked["gold"]) == (demo.QUESTION, demo.GOLD)
    assert f'outputs/demo/gtpo "{demo.QUESTION}"' in " ".join(README.replace("\\\n", "").split())
    printed = dict(re.findall(r"^# (before|after): (.+)$", README, re.MULTILINE))
    assert printed == {when: asked[when] for when in ("before", "after")}
    assert [demo.is_right(text, demo.GOLD) for text in printed.values()] == [False, True]


@fixture(scope="module")
def folder(tmp_path_factory: TempPathFactory) -> Path:
    """A working directory with the data that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    rows = "prompt,answer\nHow many minutes are there in two hours?,120\nWhat is 12 + 3?,15\n"
    for name in ("my_train.csv", "my_test.csv"):
        (folder / name).write_text(rows)
    for name in ("configs", "examples", "results"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def small(words: list[str], data_dir: Path) -> list[str]:
    """The flags that make a command short, or a dry run where it needs more than this machine."""
    if words[0] == "reproduce.py":
        return ["--list"]
    if "--compare" in words:
        return []  # of the scores that the line before stored
    if words[0] == "evaluate.py":
        return ["--limit", "1", "--max_new_tokens", "4", "--data_dir", str(data_dir)]
    if NEEDS_HUB.intersection(words):
        return ["--dry_run", "--data_dir", str(data_dir)]
    return shlex.split(SMALL)


@mark.slow
@mark.parametrize("line", sorted(SCRIPTS, key=lambda line: "chat" in line))  # the run that it asks is of another line
def test_every_script_runs_as_the_readme_calls_it(
    line: str, folder: Path, data_dir: Path, run_script: RunScript
) -> None:
    for trained in (folder / "outputs").glob("gtpo-tiny-arithmetic-*"):  # the run of the first line
        line = line.replace("outputs/demo/gtpo", str(trained))
    words = shlex.split(line.replace("Qwen/Qwen2.5-0.5B-Instruct", "tiny"))[1:]
    if words[0] == "-m":
        assert "--- base model (" in run_process([sys.executable, *words, "--max_new_tokens", "4"]).stdout
        return
    flags = small(words, data_dir)
    ended = run_script(folder, *words, *flags)
    if "--compare" in words:
        assert "Difference" in ended.stdout
    elif "--dry_run" in flags:
        assert "training rows" in ended.stdout and "GiB" in ended.stdout
    elif words[0].startswith("train_"):
        method = words[0][len("train_") : -len(".py")]
        assert list((folder / "outputs").glob(f"{method}*/adapter/adapter_model.safetensors"))
        suggested = re.findall(r"Evaluate: python (.+)", ended.stderr)
        assert len(suggested) == 1  # the next command that a run prints
        for command in suggested if "my_" not in line else []:  # whose my_test.csv another line names
            words = [*shlex.split(command), "--k", "1", "--output_dir", "scored"]
            scored = run_script(folder, *words, *small(words, data_dir))
            assert "Pass@k" in scored.stdout
    elif words[0] == "evaluate.py":
        assert "Pass@k (%)" in ended.stdout and "Maj@k (%)" in ended.stdout
        assert ("minus base" in ended.stdout) == ("--runs" in words)


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    prose = [line for line in lines if not line.startswith(("!", "[![", "<img", "Not published"))]
    assert max(map(len, prose)) <= MAX_COLUMNS, max(prose, key=len)


def test_the_readme_speaks_of_the_project_alone() -> None:
    """No paths of a machine, and no hosts of a package index."""
    assert not re.findall(r"/(?:work|tmp|home|root|mnt)/|\.local\b|simple/|index-url", README)
