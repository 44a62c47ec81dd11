"""``python -m study compare`` where PyTorch sees a GPU, with and without Unsloth: its base is named by path."""

import os
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process, user_environment

from gtpo.models.backend import GPU_PACKAGES
from gtpo.runs.directory import RunDirectory
from paper.results import read_results

SEES_GPU = '''
"""PyTorch sees a GPU; what goes there stays on the CPU."""

import functools

import safetensors.torch
import torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (8, 0)
torch.cuda.is_bf16_supported = lambda *_, **__: True
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_: torch.get_rng_state()
to = torch.nn.Module.to
torch.nn.Module.to = lambda module, *where, **options: module if where == ("cuda",) else to(module, *where, **options)
load = safetensors.torch.load_file  # PEFT asks it for the weights of an adapter on the GPU
safetensors.torch.load_file = functools.wraps(load)(lambda path, device="cpu": load(path))
'''
IMPORTED = "raise RuntimeError('Unsloth is imported for a run on the CPU')\n"


def install(site: Path, package: str, version: str) -> None:
    """What says that a package is installed."""
    directory = site / f"{package}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.slow
@pytest.mark.parametrize("installed", [[], list(GPU_PACKAGES)], ids=["without Unsloth", "with Unsloth"])
def test_the_tiny_base_is_compared_on_the_cpu(installed: list[str], tmp_path: Path) -> None:
    """Both arms are trained and scored from the shipped base, in the precision of the CPU."""
    site = tmp_path / "site"
    checkout = tmp_path / "checkout"
    site.mkdir()
    checkout.mkdir()
    (site / "sitecustomize.py").write_text(SEES_GPU)
    for package in installed:
        install(site, package, GPU_PACKAGES[package])
        (site / "unsloth.py").write_text(IMPORTED)
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git", ".venv"):
            (checkout / path.name).symlink_to(path)
    command = "study compare --arms grpo gtpo --n_seeds 1 --steps 2"
    environment = user_environment() | {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-m", *command.split(), "--problems", "4", "--set", "limit=100", "--dirty"]
    shown = run_process(words, cwd=checkout, env=environment).stdout
    assert "failed" not in shown
    place = checkout / "outputs/study/compare"
    assert "| GTPO minus GRPO | wrong-mode | pass@1 sampled | 1 of 1 |" in (place / "comparison.md").read_text()
    assert read_results([place / "wrong-mode"]).metrics["grad_norm"].gt(0).sum() == 2 * 2
    for arm in ("grpo", "gtpo"):
        stored = RunDirectory(place / f"wrong-mode/{arm}-0.3e-3-s1").read_config()
        assert (stored["use_cpu"], stored["bf16"], stored["load_in_4bit"]) == (True, False, False)
