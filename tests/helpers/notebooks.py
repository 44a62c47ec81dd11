"""Execute the notebooks without a GPU and store their outputs, without what differs from machine to machine.

make notebooks
"""

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.scripts import ROOT
from nbclient import NotebookClient
from PIL import Image

WALKTHROUGH, RESULTS = (ROOT / "notebooks" / f"{name}.ipynb" for name in ("gtpo_colab", "results"))
BAR = re.compile(r"%\||it/s|s/it")
TIME = re.compile(r" \(\d+:\d\d:\d\d\)")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(path: Path, folder: Path, flags: Sequence[str] = (), **environment: str) -> Any:
    """Run a notebook in a directory, as a user without a GPU, who gives ``FLAGS`` in its first cell."""
    notebook = nbformat.read(path, as_version=4)
    if flags:
        [settings] = [cell for cell in notebook.cells if cell.id == "settings"]
        settings.source, count = re.subn(r"(?m)^FLAGS = \[\]", f"FLAGS = {[*flags]}", settings.source)
        assert count == 1
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU would take its own preset, with 4-bit weights and vLLM
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # a test run may have set another
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where).execute()
    return notebook


def clean(notebook: Any) -> None:
    """Keep printed text without progress bars and times, HTML, Markdown, and images of 64 colors."""
    for cell in code_cells(notebook):
        cell.execution_count = None
        cell.metadata = {}
        text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        lines = [re.split(r"\r|\x1b\[A", line)[-1] for line in text.replace("\r\n", "\n").splitlines()]
        lines = [TIME.sub("", line) for line in lines if line.strip() and not BAR.search(line)]
        shown = [_smaller(output) for output in cell.outputs if output.output_type != "stream"]
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            shown.insert(0, nbformat.v4.new_output("stream", name="stdout", text=text))
        cell.outputs = shown
    notebook.metadata.language_info = {"name": "python"}


def _smaller(output: Any) -> Any:
    kept = {kind: output.data[kind] for kind in ("text/html", "text/markdown", "image/png") if kind in output.data}
    if "image/png" in kept:
        image = Image.open(io.BytesIO(base64.b64decode(kept["image/png"]))).convert("RGB")
        image.quantize(64).save(small := io.BytesIO(), "png", optimize=True)
        kept = {"image/png": base64.b64encode(small.getvalue()).decode()}
    return nbformat.v4.new_output("display_data", data=kept)


def main() -> None:
    for path in (WALKTHROUGH, RESULTS):
        notebook = execute(path, path.parent)
        clean(notebook)
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
