"""Every command of the pages, with its values: training as a dry run, evaluation until a model is loaded, what
``study`` and ``make`` would do."""

import re
import shlex
import shutil
from pathlib import Path

from helpers.scripts import ROOT, RunScript, run_process
from pytest import MonkeyPatch, TempPathFactory, fixture, mark

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("[!l]*.md"))]  # not log.md
STANDS_FOR = {  # models of the Hub, a variable of the shell, a benchmark
    "Qwen/Qwen2.5-0.5B-Instruct": "tiny-model",
    "Qwen/Qwen3-4B": "tiny-model",
    "outputs/sft": "outputs/RUN",
    "$i/4": "1/4",
    "NAME": "amc23",
}
DATA = "prompt,answer\nHow much is 2 + 3?,5\n"
FILES = {
    "my_rows.jsonl": '{"prompt": "How much is 2 + 3?", "answer": "5"}\n',
    "my_train.csv": DATA,
    "my_test.csv": DATA,
    "my_objective.py": "from gtpo import GRPOTrainer\n\n\nclass Mine(GRPOTrainer):\n    pass\n",
    "my_reward.py": "def concise(completions, **columns):\n    return [0.0] * len(completions)\n",
}


def commands(page: Path) -> list[str]:
    """The lines of the page's bash blocks, and the commands in its text."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    programs = "python3?|make|pip|hf|tensorboard|torchrun|accelerate|trl"
    words = re.findall(rf"`((?:{programs})\s[^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "".join(blocks).splitlines() + [" ".join(line.split()) for line in words]


LINES = sorted({line.partition(" #")[0] for page in PAGES for line in commands(page)})
COMMANDS = [
    (found[1], [STANDS_FOR.get(word, word) for word in shlex.split(found[2])])
    for line in LINES
    if (found := re.search(r"\b(train_\w+\.py|evaluate\.py)((?: +(?![&|>.])\S+)*)", line))
]


@fixture(scope="module")
def folder(tmp_path_factory: TempPathFactory, tiny: Path) -> Path:
    """A working directory with the data, reward, model and run that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("configs", "examples", "gtpo"):  # the study runs in the root of a clone
        (folder / name).symlink_to(ROOT / name)
    for name in ("tiny-model", "my_model"):
        (folder / name).symlink_to(tiny)
    shutil.copytree(ROOT / "tests/stored/run_of_eada378", folder / "outputs/RUN")
    config = folder / "outputs/RUN/config.yaml"
    config.write_text(config.read_text().replace("letters.py:letters", "accuracy"))  # a file that is not there
    return folder


@mark.parametrize("line", [line for line in LINES if re.match("make |python reproduce|python3? -m [sg]", line)])
def test_what_runs_much_takes_its_command(line: str, folder: Path, run_script: RunScript) -> None:
    """``make``, ``study`` and ``reproduce.py`` list what they would run; other modules show their help."""
    program, script, *words = shlex.split(line.partition(">")[0])
    if program == "make":
        run_process(["make", "--dry-run", script, *words])
        return
    flag = "--list"
    if script == "-m":
        module = words.pop(0)
        flag = "--list" if module == "study" and words else "--help"
        if words[:2] == ["compare", "--arms"]:
            words += ["--set", "limit=100"]  # it reads every row of each arm
        script = f"{module.replace('.', '/')}.py".replace("study.py", "study/__main__.py")
    run_script(folder, script, *words, flag, before=f"sys.path[0] = {str(ROOT)!r}")


@mark.parametrize(("script", "words"), COMMANDS)
def test_every_command_of_the_documentation(
    script: str,
    words: list[str],
    folder: Path,
    data_dir: Path,
    run_script: RunScript,
    monkeypatch: MonkeyPatch,
) -> None:
    if script == "evaluate.py":
        monkeypatch.chdir(folder)
        from gtpo.evaluation.benchmarks import select_benchmarks

        flags, _ = parse_evaluation(EvaluationArguments, [*words, "--data_dir", str(data_dir)])
        if flags.benchmarks and not any("/" in name for name in flags.benchmarks):  # data sets of the Hub
            assert select_benchmarks(flags)
        return
    more = ["--hub_token", "of-a-user"] if "--push_to_hub" in words else []  # a dry run uploads nothing
    if not {"--limit", "--resume"} & {*words}:  # a resume keeps its rows
        more += ["--limit", "200"]  # a dry run reads every row
    if "--output_dir" in words:
        more.append("--overwrite")  # the run that other commands read is there, and a dry run removes nothing
    ended = run_script(folder, script, *words, *more, "--dry_run", "--data_dir", str(data_dir))
    assert "training rows" in ended.stdout
