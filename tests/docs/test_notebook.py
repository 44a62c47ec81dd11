"""The notebooks: stored without outputs, without functions of their own, and each runs from top to bottom."""

import ast
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.scripts import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

WALKTHROUGH, RESULTS = (ROOT / "notebooks" / f"{name}.ipynb" for name in ("gtpo_colab", "results"))
STEPS = 2


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def statements(path: Path) -> list[ast.stmt]:
    """The statements of the code cells, %magics as the calls that IPython makes of them."""
    cells = code_cells(nbformat.read(path, as_version=4))
    return ast.parse("\n".join(TransformerManager().transform_cell(cell.source) for cell in cells)).body


@pytest.mark.parametrize("path", [WALKTHROUGH, RESULTS], ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    assert len(code_cells(stored)) >= 5
    for cell in code_cells(stored):
        assert cell.outputs == [] and cell.execution_count is None, cell.id
    assert stored.metadata.kernelspec.name == "python3"
    assert "widgets" not in stored.metadata


@pytest.mark.parametrize("path", [WALKTHROUGH, RESULTS], ids=lambda path: path.stem)
def test_it_defines_no_functions_or_classes(path: Path) -> None:
    defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert not [node.lineno for node in ast.walk(ast.Module(statements(path), [])) if isinstance(node, defining)]


def lines(body: list[ast.stmt]) -> list[str]:
    """Statements as text; an import of several names counts as one import of each."""
    texts = []
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            texts += [f"from {statement.module} import {alias.name}" for alias in statement.names]
        else:
            texts.append(ast.unparse(statement))
    return texts


def test_it_trains_as_the_script_does() -> None:
    """The notebook has every line of train_gtpo.py except those that read the command line or plan a dry run."""
    script = ast.parse((ROOT / "train_gtpo.py").read_text())
    main = next(node for node in script.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    in_notebook = lines(statements(WALKTHROUGH))
    missing = [line for line in lines(main.body) if line not in in_notebook]
    differing = ("load_backend_from_flags(", "import describe_dry_run", "parse('gtpo'", "if settings.run.dry_run:")
    assert len(missing) == len(differing), missing
    assert all(part in line for line, part in zip(missing, differing, strict=True)), missing


def execute(path: Path, folder: Path, last: str | None = None, **environment: str) -> dict[str, Any]:
    """Run a notebook in a directory, as a user without a GPU, up to the cell ``last``; its code cells by id."""
    notebook = nbformat.read(path, as_version=4)
    if last:
        notebook.cells = notebook.cells[: [cell.id for cell in notebook.cells].index(last) + 1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU would take its own preset, with 4-bit weights and vLLM
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # a test run may have set another
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return {cell.id: cell for cell in code_cells(notebook)}


def images(cell: Any) -> list[int]:
    """The size of each image that a cell shows, in characters of base64."""
    return [len(output.data["image/png"]) for output in cell.outputs if "image/png" in output.get("data", {})]


@pytest.fixture(scope="module")
def executed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A copy of the repository in which the walkthrough ran, started in notebooks/; and its cells by id."""
    folder = tmp_path_factory.mktemp("repository")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for name in ("gtpo", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").mkdir()
    settings = {"GTPO_NOTEBOOK_MODEL": str(tiny), "GTPO_NOTEBOOK_STEPS": str(STEPS), "GTPO_NOTEBOOK_PROBLEMS": "2"}
    return folder, execute(WALKTHROUGH, folder / "notebooks", **settings)


@pytest.mark.slow
def test_it_runs_and_leaves_both_runs(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = executed
    for method in ("gtpo", "grpo"):
        run = folder / "outputs" / f"notebook-{method}"
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
        assert (run / "adapter" / "adapter_model.safetensors").is_file()
        assert "<table" in (run / "report.html").read_text()
    assert not [path.name for path in (folder / "notebooks").iterdir()]  # all files are below the root


@pytest.mark.slow
def test_it_evaluates_before_and_after(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, cells = executed
    results = json.loads((folder / "outputs" / "notebook-evaluation" / "results.json").read_text())["results"]
    scored = {entry["adapter"] and Path(entry["adapter"]).parent.name for entry in results}
    assert scored == {None, "notebook-gtpo", "notebook-grpo"}
    shown = "".join(output.text for output in cells["evaluate"].outputs)
    assert "2 problems, k = 8" in shown, shown


@pytest.mark.slow
def test_nothing_is_installed_or_cloned_if_all_is_there(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, cells = executed
    assert cells["install"].outputs == []
    assert not list(folder.rglob(".git"))


@pytest.mark.slow
def test_a_machine_that_cannot_train_stops_it_before_the_installation(tmp_path: Path) -> None:
    """12 GB would be installed otherwise. This machine has no nvidia-smi on its PATH."""
    (tmp_path / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    settings = {"GTPO_NOTEBOOK_MODEL": "qwen", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{tmp_path}"}
    settings["PIP_NO_INDEX"] = "1"  # if it went on, it would install nothing
    with pytest.raises(CellExecutionError, match="fix the errors above first") as caught:
        execute(WALKTHROUGH, WALKTHROUGH.parent, last="install", **settings)
    assert "this machine has no NVIDIA GPU: run the checks on the machine that trains." in str(caught.value)


@pytest.mark.slow
def test_it_shows_groups_and_curves(executed: tuple[Path, dict[str, Any]]) -> None:
    _, cells = executed
    for name in ("group", "after"):
        (page,) = [output.data["text/html"] for output in cells[name].outputs if "data" in output]
        assert page.count("<tr>") == 1 + 12
    for name in ("entropy", "train", "curves"):  # "train" updates its image
        (size,) = images(cells[name])
        assert size > 5000, name


@pytest.mark.slow
def test_the_results_notebook_draws_every_figure() -> None:
    cells = execute(RESULTS, RESULTS.parent, GTPO_NOTEBOOK_SEARCH="results/tiny")
    figures = ("fig1", "fig2", "fig3", "fig4a", "fig4b", "fig4c", "fig4d", "fig5a", "fig5b", "fig6")
    for name in ("effects", *figures, "baselines"):
        (size,) = images(cells[name])
        assert size > 10000, name
    for name in ("table1", "caption"):
        (output,) = cells[name].outputs
        assert output.data["text/markdown"].count("|") > 30
