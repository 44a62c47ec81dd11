"""The notebooks: stored with outputs, and each runs from top to bottom."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nbformat
from helpers.notebooks import RESULTS, WALKTHROUGH, clean, code_cells, execute
from helpers.runs import metrics_of
from helpers.scripts import ROOT
from pytest import MonkeyPatch, TempPathFactory, fixture, mark

STEPS = 2
GPUS = """
qwen, Tesla T4, 512, --use_vllm false --max_prompt_length 1024 --max_completion_length 512
llama, Tesla T4, 1500, --gpu_memory_utilization 0.58
llama, NVIDIA L4, 1500, --gpu_memory_utilization 0.6
qwen, NVIDIA L4, 1500, --save_steps 20 --save_total_limit 2
llama, NVIDIA A100-SXM4-40GB, 1500, --save_steps 20 --save_total_limit 2
"""


def kinds(cell: Any) -> list[str]:
    """What a cell shows: "text" or MIME types."""
    return ["text" if output.output_type == "stream" else " ".join(sorted(output.data)) for output in cell.outputs]


@fixture(scope="module")
def executed(tiny: Path, tmp_path_factory: TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A copy of the repository in which the walkthrough ran, started in notebooks/; and its cells by id, as stored."""
    folder = tmp_path_factory.mktemp("repository")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for name in ("gtpo", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").mkdir()
    settings = {"GTPO_NOTEBOOK_MODEL": str(tiny), "GTPO_NOTEBOOK_STEPS": str(STEPS), "GTPO_NOTEBOOK_PROBLEMS": "2"}
    return folder, stored_cells(execute(WALKTHROUGH, folder / "notebooks", **settings))


def stored_cells(notebook: Any) -> dict[str, Any]:
    """The code cells of an executed notebook by id, as `make notebooks` stores them."""
    clean(notebook)
    return {cell.id: cell for cell in code_cells(notebook)}


@mark.slow
def test_it_runs_and_leaves_both_runs(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, cells = executed
    for method in ("gtpo", "grpo"):
        run = folder / "outputs" / f"notebook-{method}"
        logged = metrics_of(run)
        assert [line["step"] for line in logged if "loss" in line] == list(range(1, STEPS + 1))
        assert [line["step"] for line in logged if "eval_loss" in line] == list(range(STEPS + 1))
        assert (run / "adapter/adapter_model.safetensors").is_file()
        assert "<table" in (run / "report.html").read_text()
    assert not [path.name for path in (folder / "notebooks").iterdir()]  # all files are below the root
    assert cells["install"].outputs == [] and not [*folder.rglob(".git"), *folder.rglob(".venv")]  # all was there


@mark.parametrize("case", GPUS.strip().splitlines())
def test_colab_chooses_flags_by_gpu_and_resumes_on_drive(case: str, monkeypatch: MonkeyPatch) -> None:
    """The cells without their commands, with stand-ins for Colab's module and for a checkpoint of GRPO on Drive."""
    model, gpu, tokens, flags = case.split(", ")
    monkeypatch.setenv("GTPO_NOTEBOOK_MODEL", model)
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, colab := MagicMock())
    monkeypatch.setattr("torch.cuda", MagicMock(get_device_name=lambda: gpu))
    monkeypatch.setattr("glob.glob", lambda pattern: "notebook-grpo/checkpoint-*/files.json" in pattern)
    names: dict[str, Any] = {}
    for cell in nbformat.read(WALKTHROUGH, as_version=4).cells:
        if cell.id in ("settings", "machine", "plan"):
            exec(re.sub("(?m)^!.*", "", cell.source), names)
    colab.drive.mount.assert_called_once_with("/content/drive")
    assert names["TOKENS"] == int(tokens) and names["SHARED"].endswith(flags)
    assert names["GTPO"].endswith("--output_dir /content/drive/MyDrive/gtpo/notebook-gtpo --overwrite")
    assert names["GRPO"].endswith("--output_dir /content/drive/MyDrive/gtpo/notebook-grpo --resume")


@mark.slow
def test_the_results_notebook_draws_every_figure_as_stored() -> None:
    cells = stored_cells(execute(RESULTS, RESULTS.parent, GTPO_NOTEBOOK_SEARCH="results/tiny"))
    figures = ("fig1", "fig2", "fig3", "fig4a", "fig4b", "fig4c", "fig4d", "fig5a", "fig5b", "fig6")
    for name in (*figures, "baselines"):
        (output,) = cells[name].outputs
        assert len(output.data["image/png"]) > 5000, name
    for cell in code_cells(nbformat.read(RESULTS, as_version=4)):
        assert kinds(cell) == kinds(cells[cell.id])
        for stored, found in zip(cell.outputs, cells[cell.id].outputs, strict=True):
            if "image/png" not in stored.get("data", {}):
                assert stored == found, cell.id


@mark.parametrize("path", [WALKTHROUGH, RESULTS], ids=lambda path: path.stem)
def test_it_is_stored_with_outputs_that_name_no_machine(path: Path) -> None:
    """Neither paths nor times; `make notebooks` stores them."""
    for cell in code_cells(nbformat.read(path, as_version=4)):
        shown = "".join(output.get("text") or output.data.get("text/html", "") for output in cell.outputs)
        assert not re.search(r"/(home|root|tmp|work|usr|Users)/|\d:\d\d:\d\d|\bit/s|\x1b|\r", shown), cell.id
