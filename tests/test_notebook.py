"""The notebook: stored without outputs, without logic of its own, and it runs from top to bottom."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "gtpo_colab.ipynb"
STEPS = 2


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def stored() -> Any:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture(scope="module")
def statements(stored: Any) -> list[ast.stmt]:
    """What the code cells say, %magics as the calls that IPython makes of them."""
    source = [TransformerManager().transform_cell(cell.source) for cell in code_cells(stored)]
    return ast.parse("\n".join(source)).body


def test_it_is_stored_without_outputs(stored: Any) -> None:
    assert len(code_cells(stored)) >= 5
    for cell in code_cells(stored):
        assert cell.outputs == [] and cell.execution_count is None, cell.id
    assert stored.metadata.kernelspec.name == "python3"
    assert "widgets" not in stored.metadata


def test_it_defines_no_functions_or_classes(statements: list[ast.stmt]) -> None:
    defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert not [node.lineno for node in ast.walk(ast.Module(statements, [])) if isinstance(node, defining)]


def test_it_trains_as_the_script_does(statements: list[ast.stmt]) -> None:
    """Every line of train_gtpo.py stands in the notebook, but for those that read the command line or resume."""
    script = ast.parse((ROOT / "train_gtpo.py").read_text())
    main = next(node for node in script.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    in_notebook = {ast.unparse(statement) for statement in statements}
    for statement in statements:  # an import of several names counts for each of them
        if isinstance(statement, ast.ImportFrom):
            in_notebook |= {f"from {statement.module} import {alias.name}" for alias in statement.names}
    missing = [line for line in map(ast.unparse, main.body) if line not in in_notebook]
    differing = ("load_backend()", "parse('gtpo'", "import check_run", "checkpoint = check_run", "train(trainer, ")
    assert len(missing) == len(differing), missing
    assert all(part in line for line, part in zip(missing, differing, strict=True)), missing


@pytest.fixture(scope="module")
def executed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A copy of the repository in which the notebook ran, started inside notebooks/; and its cells by name."""
    folder = tmp_path_factory.mktemp("repository")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "notebooks").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(folder / "notebooks")}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GTPO_NOTEBOOK_MODEL", str(tiny))
        patch.setenv("GTPO_NOTEBOOK_STEPS", str(STEPS))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU would take its own preset, with 4-bit weights and vLLM
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # a test run may have set another
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return folder, {cell.id: cell for cell in code_cells(notebook)}


def test_it_runs_and_leaves_a_run(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = executed
    (run,) = (folder / "outputs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "<table" in (run / "report.html").read_text()
    assert not [path.name for path in (folder / "notebooks").iterdir()]  # all of it lies in the repository's root


def test_nothing_is_installed_where_all_is_there(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, cells = executed
    assert cells["install"].outputs == []
    assert not (folder / "gtpo").exists()


def test_it_shows_groups_and_curves(executed: tuple[Path, dict[str, Any]]) -> None:
    _, cells = executed
    for name in ("group", "after"):
        (output,) = cells[name].outputs
        assert output.data["text/html"].count("<tr>") == 1 + 12
    for name in ("entropy", "curves"):
        (output,) = cells[name].outputs
        assert len(output.data["image/png"]) > 5000, name
