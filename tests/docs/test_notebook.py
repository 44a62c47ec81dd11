"""The notebooks: stored with outputs, and each runs from top to bottom."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nbformat
from helpers.notebooks import RESULTS, WALKTHROUGH, clean, code_cells, execute
from helpers.runs import metrics_of
from helpers.scripts import ROOT
from pytest import MonkeyPatch, mark

GPUS = """
qwen, Tesla T4, 512, --use_vllm false --max_prompt_length 1024 --max_completion_length 512
llama, Tesla T4, 1500, --gpu_memory_utilization 0.58
llama, NVIDIA L4, 1500, --gpu_memory_utilization 0.6
qwen, NVIDIA L4, 1500, --save_steps 20 --save_total_limit 2
llama, NVIDIA A100-SXM4-40GB, 1500, --save_steps 20 --save_total_limit 2
"""


def shown(notebook: Any) -> dict[str, list[str]]:
    """What each cell shows: texts, and a word for an image."""
    return {cell.id: [text_of(output) for output in cell.outputs] for cell in code_cells(notebook)}


def text_of(output: Any) -> str:
    text = output.get("text") or output.data.get("text/html") or output.data.get("text/markdown")
    return text or "an image"


@mark.slow
def test_it_runs_and_leaves_both_runs(tiny: Path, tmp_path: Path) -> None:
    """With the files of the repository, started in notebooks/."""
    for path in (*ROOT.glob("*.py"), ROOT / "gtpo", ROOT / "configs"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "notebooks").mkdir()
    settings = {"GTPO_NOTEBOOK_MODEL": str(tiny), "GTPO_NOTEBOOK_STEPS": "2", "GTPO_NOTEBOOK_PROBLEMS": "2"}
    small = ["--limit", "100", "--max_completion_length", "16"]
    notebook = execute(WALKTHROUGH, tmp_path / "notebooks", small, **settings)
    clean(notebook)
    assert shown(notebook)["install"] == [] == [*(tmp_path / "notebooks").iterdir()]
    for method in ("gtpo", "grpo"):
        run = tmp_path / f"outputs/notebook-{method}"
        logged = metrics_of(run)
        assert [line["step"] for line in logged if "loss" in line] == [1, 2]
        assert [line["step"] for line in logged if "eval_loss" in line] == [0, 1, 2]
        assert (run / "adapter/adapter_model.safetensors").is_file()
        assert "<table" in (run / "report.html").read_text()


@mark.parametrize("case", GPUS.strip().splitlines())
def test_colab_chooses_flags_by_gpu_and_resumes_on_drive(case: str, monkeypatch: MonkeyPatch) -> None:
    """The cells without their commands, with stand-ins for Colab's module and for a checkpoint of GRPO on Drive."""
    model, gpu, tokens, flags = case.split(", ")
    monkeypatch.setenv("GTPO_NOTEBOOK_MODEL", model)
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, colab := MagicMock())
    monkeypatch.setattr("torch.cuda", MagicMock(get_device_name=lambda: gpu))
    monkeypatch.setattr("glob.glob", lambda pattern: "notebook-grpo/checkpoint-*/files.json" in pattern)
    names: dict[str, Any] = {"_exit_code": 0}
    for cell in nbformat.read(WALKTHROUGH, as_version=4).cells:
        if cell.id in ("settings", "machine", "plan"):
            exec(re.sub("(?m)^!.*", "", cell.source), names)
    colab.drive.mount.assert_called_once_with("/content/drive")
    assert names["TOKENS"] == int(tokens) and names["SHARED"].endswith(flags)
    for method, ending in (("GTPO", "gtpo --overwrite"), ("GRPO", "grpo --resume")):
        assert names[method].endswith(f"--output_dir /content/drive/MyDrive/gtpo/notebook-{ending}")


@mark.parametrize("path", [WALKTHROUGH, RESULTS], ids=lambda path: path.stem)
def test_a_command_that_fails_stops_the_notebook(path: Path) -> None:
    """Not a later cell, which finds no file; a command that prepares the next one is checked with it."""
    for cell in code_cells(nbformat.read(path, as_version=4)):
        lines = [line.strip() for line in cell.source.splitlines()]
        for line, following in pairwise([*lines, ""]):
            if line.startswith("!"):
                assert following.startswith(("assert _exit_code == 0", "!")), (cell.id, line)


@mark.slow
def test_the_results_notebook_draws_every_figure_as_stored() -> None:
    notebook = execute(RESULTS, RESULTS.parent, GTPO_NOTEBOOK_SEARCH="results/tiny")
    clean(notebook)
    found = shown(notebook)
    assert found == shown(nbformat.read(RESULTS, as_version=4))
    figures = ("fig1", "fig2", "fig3", "fig4a", "fig4b", "fig4c", "fig4d", "fig5a", "fig5b", "fig6", "baselines")
    assert [found[name] for name in figures] == [["an image"]] * len(figures)


@mark.parametrize("path", [WALKTHROUGH, RESULTS], ids=lambda path: path.stem)
def test_it_is_stored_with_outputs_that_name_no_machine(path: Path) -> None:
    """Neither paths nor times; `make notebooks` stores them."""
    for cell, texts in shown(nbformat.read(path, as_version=4)).items():
        found = re.search(r"/(home|root|tmp|work|usr|Users)/|\d:\d\d:\d\d|\bit/s|\x1b|\r", "".join(texts))
        assert not found, cell
