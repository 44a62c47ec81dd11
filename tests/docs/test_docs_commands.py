"""Every command of the pages in docs/, with its values: training as a dry run, evaluation until a model is loaded, and
the list of what would run. tests/docs/test_readme.py runs the commands of the README."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.scripts import ROOT, Ended

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments

PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")
STANDS_FOR = {  # models of the Hub, a variable of the shell
    "Qwen/Qwen2.5-0.5B-Instruct": "tiny-model",
    "Qwen/Qwen3-4B": "tiny-model",
    "$i/4": "1/4",
}
COMMANDS = [
    pytest.param(
        found[1],
        [STANDS_FOR.get(word, word) for word in shlex.split(found[2], comments=True)],
        id=f"{page.stem}: {found[1]} {found[2][:60].strip()}",
    )
    for page in PAGES
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
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
    (folder / "my_reward.py").write_text("def concise(completions, **columns):\n    return [0.0] * len(completions)\n")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "tiny-model").symlink_to(tiny)
    shutil.copytree(ROOT / "tests" / "stored" / "run_of_eada378", folder / "outputs" / "RUN")
    config = folder / "outputs" / "RUN" / "config.yaml"
    config.write_text(config.read_text().replace("letters.py:letters", "accuracy"))  # a file that is not there
    return folder


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
