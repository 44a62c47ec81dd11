"""What the documents point at is there: functions, tests, files, headings."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from as_a_user import ROOT, Ended

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if ".template" not in path.name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


def test_the_paper_map_names_functions_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "paper_map.md").read_text()
    tests = re.findall(r"`(test_\w+)::(test_\w+)`", text)
    assert len(tests) > 40
    for file, name in tests:
        assert f"def {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}::{name}"
    for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", text, re.MULTILINE):
        files = re.findall(r"\(`(\w+\.py)`\)", cell)
        sources = "".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)?)`(?!\))", cell):
            assert (ROOT / name).is_file() or not files or re.search(rf"\b{name.split('.')[-1]}\b", sources), name


def test_every_module_is_in_the_file_list_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in ROOT.glob("*.py") if f"`{path.name}`" not in readme] == []


@pytest.fixture(scope="module")
def help_of(run_script: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The whole help of a script, asked for once."""
    texts: dict[str, str] = {}

    def ask(script: str) -> str:
        if script not in texts:
            flag = "--help_all" if script.startswith("train_") else "--help"
            texts[script] = run_script(tmp_path_factory.mktemp("help"), script, flag).stdout
        return texts[script]

    return ask


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_command_exists(page: Path, help_of: Callable[..., str]) -> None:
    text = page.read_text().replace("\\\n", " ")
    for script, words in re.findall(r"(?<![\w/])(\w+\.py) ((?:[^`#\n]*))", text):
        if (ROOT / script).is_file():
            for name in re.findall(r"--(\w+)", words):
                assert f"--{name}" in help_of(script) + " --debug", f"{script} --{name}"
