"""Every command of the pages, with its values: training as a dry run, evaluation until a model is loaded, what
``study`` and ``make`` would do; others are in NEEDS. tests/docs/test_readme.py runs those of the README, small."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.scripts import ROOT, Ended

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAST = ROOT / "docs" / "log.md"
STANDS_FOR = {  # models of the Hub, a variable of the shell
    "Qwen/Qwen2.5-0.5B-Instruct": "tiny-model",
    "Qwen/Qwen3-4B": "tiny-model",
    "outputs/sft": "outputs/RUN",
    "$i/4": "1/4",
}
NEEDS = """
git clone: the published address (test_readme.py clones the checkout)
source: a shell
pip: the network
hf: an account of the Hub
docker: Docker
vllm serve: a GPU (tests/backends)
trl vllm-serve: a GPU
VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm: a GPU
accelerate launch: several GPUs (tests/scripts/test_processes.py has processes on a CPU)
torchrun: several processes (tests/scripts/test_processes.py)
for i in 1 2 3 4: several GPUs (the script is run below)
sbatch: Slurm (test_repository_files.py and tests/scripts/test_machines.py have stand-ins)
sky: SkyPilot (test_repository_files.py runs its line)
grep: GNU parallel
tensorboard: the package
python llama.cpp/: a clone of llama.cpp
python3 -m venv: nothing installed
python -c "import torch: PyTorch alone
python benchmarks/bench_generation.py: minutes (tests/benchmarks/test_benchmarks.py)
python examples/tiny_base.py: minutes (tests/models/test_tiny.py)
"""
STARTS = tuple(line.rpartition(": ")[0] for line in NEEDS.strip().splitlines())


def commands(page: Path) -> list[str]:
    """The lines of the page's bash blocks, and what starts with a program's name in its text."""
    text = page.read_text().replace("\\\n", " ")
    block = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    lines = [line for language, body in block.findall(text) if language == "bash" for line in body.splitlines()]
    programs = {start.split()[0] for start in STARTS} | {"make"}
    for words in re.findall("`([^`]+)`", block.sub("", text)):
        if words.split()[0] in programs and " " in words:
            lines.append(" ".join(words.split()))
    return [line for line in lines if line.strip()]


OTHERS = {line.partition(" #")[0].strip() for page in PAGES if page != PAST for line in commands(page)}
MODULES = sorted(line for line in OTHERS if re.match("python3? -m (study|gtpo)", line))
COMMANDS = [
    pytest.param(
        found[1],
        [STANDS_FOR.get(word, word) for word in shlex.split(found[2], comments=True)],
        id=f"{page.stem}: {found[1]} {found[2][:60].strip()}",
    )
    for page in PAGES[2:]
    if page != PAST
    for line in commands(page)
    if (found := re.search(r"\b(train_\w+\.py|evaluate\.py|reproduce\.py)((?: +(?![&|>.])\S+)*)", line))
    and "--page" not in found[2]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A working directory with the data, reward, model and run that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    rows = '{"prompt": "How much is 2 + 3?", "answer": "5"}\n{"prompt": "How much is 2 + 4?", "answer": "6"}\n'
    (folder / "my_rows.jsonl").write_text(rows)
    (folder / "my_test.csv").write_text("prompt,answer\nHow much is 2 + 3?,5\n")
    (folder / "my_objective.py").write_text("from gtpo import GRPOTrainer\n\n\nclass Mine(GRPOTrainer):\n    pass\n")
    (folder / "my_reward.py").write_text("def concise(completions, **columns):\n    return [0.0] * len(completions)\n")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "tiny-model").symlink_to(tiny)
    shutil.copytree(ROOT / "tests" / "stored" / "run_of_eada378", folder / "outputs" / "RUN")
    config = folder / "outputs" / "RUN" / "config.yaml"
    config.write_text(config.read_text().replace("letters.py:letters", "accuracy"))  # a file that is not there
    return folder


def test_every_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    scripts = re.compile(r"python (train_\w+|evaluate|reproduce)\.py ")  # run below, the README's in test_readme.py
    left = {line for line in OTHERS.difference(MODULES) if not scripts.match(line) and not line.startswith("make ")}
    assert [line for line in left if not line.startswith(STARTS)] == []
    assert [start for start in STARTS if not any(line.startswith(start) for line in left)] == []


@pytest.mark.parametrize("line", MODULES)
def test_every_module_takes_its_command(line: str, folder: Path) -> None:
    """``study`` lists what it would run; the others show their help."""
    line += " --list" if line.startswith("python -m study ") and "--list" not in line else ""
    line += " --help" if "--list" not in line else ""
    command = re.sub("^python3?", shlex.quote(sys.executable), line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout, shown.stderr[-2000:]


@pytest.mark.parametrize("line", sorted(line for line in OTHERS if line.startswith("make ")))
def test_make_has_every_target(line: str) -> None:
    subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(("script", "words"), COMMANDS)
def test_every_command_of_the_documentation(
    script: str,
    words: list[str],
    folder: Path,
    data_dir: Path,
    run_script: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if script == "evaluate.py":
        monkeypatch.chdir(folder)
        from gtpo.evaluation.jobs import select_benchmarks

        flags, _ = parse_evaluation(EvaluationArguments, [*words, "--data_dir", str(data_dir)])
        if flags.benchmarks and not any("/" in name for name in flags.benchmarks):  # data sets of the Hub
            assert select_benchmarks(flags)
        return
    if script == "reproduce.py":
        words = ["--only" if word == "--policy" else word for word in words]
        ended = run_script(folder, script, *words, *([] if "--commands" in words else ["--list"]))
        assert ended.code == 0 and ended.stdout, ended.stderr[-2000:]
        return
    token = ["--hub_token", "of-a-user"] if "--push_to_hub" in words else []  # a dry run uploads nothing
    ended = run_script(folder, script, *words, *token, "--dry_run", "--data_dir", str(data_dir))
    assert ended.code == 0 and "training rows" in ended.stdout, ended.stderr[-2000:]
