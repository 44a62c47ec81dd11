"""The wheel: what it holds, and what it requires."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process

from gtpo.models.hub import TINY_BASE

SHIPPED = ("gtpo", "gtpo_loss.py", "pyproject.toml", "README.md", "LICENSE")


def pins(name: str) -> list[str]:
    """The lines of a requirements file."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the files: a build leaves files in its source directory."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        path = ROOT / name
        shutil.copytree(path, source / name) if path.is_dir() else shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built]
    run_process([*pip, source])
    (wheel,) = built.glob("gtpo-*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_loss_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"gtpo", "gtpo_loss.py"}
    data = (
        path
        for part in (f"models/tiny_base/{TINY_BASE.name}/*", "*/*.yaml", "*/*.jinja")
        for path in ROOT.glob(f"gtpo/{part}")
    )
    files = [*ROOT.glob("gtpo/**/*.py"), *(path for path in data if path.is_file())]
    ours = {str(path.relative_to(ROOT)) for path in files}
    assert {name for name in names if name.startswith("gtpo/")} == ours


def test_the_gpu_pins_are_those_of_the_requirements() -> None:
    from gtpo.models.backend import GPU_PACKAGES

    assert GPU_PACKAGES.items() <= dict(line.split("==") for line in pins("gpu")).items()
