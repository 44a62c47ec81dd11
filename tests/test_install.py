"""The wheel: what it holds, and what it requires."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process

from gtpo.models.backend import GPU_PACKAGES
from gtpo.models.hub import TINY_BASE


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_loss_alone(tmp_path: Path) -> None:
    """Built from a copy of the files: a build leaves files in its source directory."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "gtpo", source / "gtpo")
    for name in ("gtpo_loss.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run_process([*pip, "--wheel-dir", tmp_path, source])
    (wheel,) = tmp_path.glob("gtpo-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    parts = ("**/*.py", f"models/tiny_base/{TINY_BASE.name}/*", "*/*.yaml", "*/*.jinja")
    files = [path for part in parts for path in (ROOT / "gtpo").glob(part) if path.is_file()]
    assert held == {"gtpo_loss.py", *(str(path.relative_to(ROOT)) for path in files)}


def test_the_gpu_pins_are_those_of_the_requirements() -> None:
    lines = (ROOT / "requirements/gpu.txt").read_text().splitlines()
    assert {f"{name}=={version}" for name, version in GPU_PACKAGES.items()} <= {*lines}
