"""What the pages refer to exists: functions, tests, files, headings, flags."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.scripts import ROOT, RunScript
from pytest import TempPathFactory, approx, fixture, mark

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if ".template" not in path.name)]
PAST = [ROOT / "docs/log.md"]  # names what was there at the time
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


@mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, link


def test_the_paper_map_names_functions_that_exist() -> None:
    text = (ROOT / "docs/method.md").read_text().partition("## From the paper to the code")[2]
    rows = tables_in(text)[0][2:]
    assert len(rows) >= 16
    for _, cell in rows:
        files = re.findall(r"\(`([\w/]+\.py)`\)", cell)
        sources = "".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)?)`(?!\))", cell):
            assert (ROOT / name).is_file() or not files or re.search(rf"\b{name.split('.')[-1]}\b", sources), name


@mark.parametrize("page", [page for page in PAGES if page not in PAST], ids=lambda page: page.name)
def test_a_function_stands_in_the_file_beside_it(page: Path) -> None:
    """`save_adapter` (`gtpo/training/export.py`)."""
    for name, file in re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", page.read_text()):
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text()), (name, file)


def test_the_simulated_drift_is_that_of_the_page() -> None:
    """With fewer groups: the standard error is 0.002."""
    page = (ROOT / "docs/method.md").read_text()
    code, _, rest = page.partition("```python\n")[2].partition("\nfor case in")
    names: dict[str, Any] = {}
    exec(code, names)
    rows = tables_in(rest)[0][2:]
    assert len(rows) == 4
    for share, rights, *drifts in rows:
        right = [float(text.strip(" %")) / 100 for text in rights.split(",")]
        for weights, shown in zip(((1, 1), (2, 0), (1, 0)), drifts, strict=True):
            found = names["drift"](float(share), *right, *weights, groups=20_000)
            assert found == approx(float(shown.strip("*")), abs=0.008)


def tables_in(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; GitHub splits at a pipe also in code."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    return [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        for block in blocks
    ]


@mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    """Paths of the repository, `gtpo/training/trainer.py` or `tests/grading/`; bare names may be files of a user."""
    places = "gtpo|study|tests|configs|docs|benchmarks|examples|requirements|notebooks"
    for name in re.findall(rf"`((?:{places})/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists() or page in PAST, name


@fixture(scope="module")
def flags_of(run_script: RunScript, tmp_path_factory: TempPathFactory) -> Callable[[str], set[str]]:
    """The flags in the complete help of a script, requested once."""
    flags: dict[str, set[str]] = {}

    def ask(script: str) -> set[str]:
        if script not in flags:
            flag = "--help_all" if script.startswith("train_") else "--help"
            ended = run_script(tmp_path_factory.mktemp("help"), script, flag)
            flags[script] = {*re.findall(r"--(\w+)", ended.stdout), "debug"}
        return flags[script]

    return ask


@mark.parametrize("page", [page for page in PAGES if page not in PAST], ids=lambda page: page.name)
def test_every_flag_in_the_text_exists(page: Path, flags_of: Callable[[str], set[str]]) -> None:
    """Those of commands are taken by their scripts: tests/docs/test_docs_commands.py."""
    known = OTHER_PROGRAMS.union(*map(flags_of, SCRIPTS))
    assert [name for name in re.findall(r"`--(\w+)", page.read_text()) if name not in known] == []
