"""What the pages refer to exists: functions, files, headings, flags."""

import re
from pathlib import Path

from helpers.scripts import ROOT, RunScript
from pytest import CaptureFixture, TempPathFactory, fixture, mark

from gtpo.data import arithmetic

PAST = ROOT / "docs/log.md"  # names what was there at the time
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!l]*.md"))]
SCRIPTS = [path.name for path in ROOT.glob("*.py") if "run_script(main)" in path.read_text()] + ["examples/demo.py"]
OTHER_PROGRAMS = {
    "rdzv_backend",
    "cpu",
    "num_processes",
    "num_machines",
    "config_file",
    "nproc_per_node",
    "tensor_parallel_size",
    "plan",
    "rates",
    "base",
    "set",
    "jobs",  # of study compare
    "signal",  # of Slurm
}


def headings_of(page: Path) -> list[str]:
    """As GitHub links them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@mark.parametrize("page", [*PAGES, PAST], ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|mailto:)([^)\s#]*)#?([^)\s]*)\)", page.read_text())
    for path, heading in links:
        target = page.parent / (path or page.name)
        assert target.exists(), path
        assert not heading or heading in headings_of(target), (path, heading)


@mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_stands_in_the_file_beside_it(page: Path) -> None:
    """`format_reward`, `accuracy_reward` (`rewards.py`)."""
    for names, file in re.findall(r"((?:`[\w.]+`[,;] )*`[\w.]+`) \(`([\w/]+\.py)`\)", page.read_text()):
        text = (ROOT / file).read_text()
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b|\b{name}(:| =)", text), (name, file)


NAMES, THINGS = ("|".join(words) for words in (arithmetic._NAMES, arithmetic._THINGS))
EVENTS = "|".join(event.format(r"(?:\d+)") for event in arithmetic._EVENTS.values())
QUESTION = re.compile(rf"({NAMES}) has \d+ ({THINGS})\.(?: \1 (?:{EVENTS})\.)+ How many \2 does \1 have\?")


def test_generated_problems_have_the_form_of_a_question() -> None:
    for row in arithmetic.arithmetic("test", 50, seed=0, steps=(1, 2, 3, 4, 5)):
        assert QUESTION.fullmatch(row.prompt)


@mark.parametrize("path", [*PAGES, ROOT / "notebooks/gtpo_colab.ipynb", ROOT / "gtpo/evaluation/chat.py"], ids=str)
def test_a_question_to_the_tiny_model_has_the_form_of_its_training(path: Path) -> None:
    """A shortened one is answered wrongly."""
    asked = re.findall(r"\b[A-Z]\w+ has \d+ [^\"\n?]*\?", path.read_text())
    for question in asked:
        assert QUESTION.fullmatch(question), question


def test_the_simulated_drift_is_that_of_the_page(capsys: CaptureFixture[str]) -> None:
    page = (ROOT / "docs/method.md").read_text()
    code, _, rest = page.partition("```python\n")[2].partition("```")
    exec(code, {})
    table = rest.partition("##")[0]
    drifts = r"[+-]0\.\d{3}"
    assert re.findall(drifts, capsys.readouterr().out) == re.findall(drifts, table)


def test_the_pages_are_twelve_and_short() -> None:
    """As `cat README.md docs/*.md | wc -w` counts, tables included."""
    words = {page.name: len(page.read_text().split()) for page in [*PAGES, PAST]}
    assert sum(words.values()) <= 17_500 and len(words) <= 1 + 12, words


@mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    """Paths of the repository, `gtpo/training/trainer.py` or `tests/grading/`; bare names may be files of a user."""
    places = "gtpo|study|tests|configs|docs|benchmarks|examples|requirements|notebooks"
    for name in re.findall(rf"`((?:{places})/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


@fixture(scope="module")
def flags(run_script: RunScript, tmp_path_factory: TempPathFactory) -> set[str]:
    """The flags in the complete help of every script."""
    folder = tmp_path_factory.mktemp("help")
    asks = {script: "--help_all" if script.startswith("train_") else "--help" for script in SCRIPTS}
    shown = [run_script(folder, script, flag).stdout for script, flag in asks.items()]
    return {*re.findall(r"--(\w+)", "".join(shown)), "debug", *OTHER_PROGRAMS}


@mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_in_the_text_exists(page: Path, flags: set[str]) -> None:
    """Those of commands are taken by their scripts: tests/docs/test_docs_commands.py."""
    assert {*re.findall(r"`--(\w+)", page.read_text())} <= flags
