"""The wheel: what it holds, and what it requires."""

import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process
from packaging.requirements import Requirement
from packaging.version import Version

from gtpo.models.backend import GPU_PACKAGES
from gtpo.models.hub import TINY_BASE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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


def pins_of(file: str) -> dict[str, str]:
    """The exact versions of a requirements file and of the ones that it includes."""
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.startswith("-r "):
            pins |= pins_of(line.removeprefix("-r "))
        elif not line.startswith("#"):
            requirement = Requirement(line)
            pins[requirement.name] = str(requirement.specifier).removeprefix("==")
    return pins


def test_the_gpu_pins_are_those_of_the_requirements() -> None:
    gpu, earliest = pins_of("gpu.txt"), pins_of("earliest.txt")
    assert GPU_PACKAGES.items() <= gpu.items()
    extra = {Requirement(line).name: line.split("==")[1] for line in PROJECT["optional-dependencies"]["gpu"]}
    assert extra == gpu | {"trl": earliest["trl"]}
    assert gpu.keys().isdisjoint(earliest)


def test_the_ranges_end_at_what_is_tested() -> None:
    """From the earliest pin of what Unsloth decides, to the last release before the one after the newest pin."""
    newest, earliest = pins_of("cpu.txt"), pins_of("earliest.txt")
    given = [
        *PROJECT["dependencies"],
        *(line for name in ("plots", "wandb") for line in PROJECT["optional-dependencies"][name]),
    ]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, given)}
    assert ranges.keys() == newest.keys() == earliest.keys()
    for name, allowed in ranges.items():
        major, minor = Version(newest[name]).release[:2]
        assert newest[name] in allowed and earliest[name] in allowed, name
        assert f"{major}.{minor}.99" in allowed and f"{major}.{minor + 1}" not in allowed, name
    apart = {name for name in newest if newest[name] != earliest[name]}
    least = {name: f">={Version(earliest[name]).public.removesuffix('.0')}" for name in apart}
    assert apart == {"trl", "transformers", "datasets"}
    assert all(bound in str(ranges[name]).split(",") for name, bound in least.items())
