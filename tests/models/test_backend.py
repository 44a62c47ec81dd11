"""Backend selection, and the errors raised before anything is loaded; how idle threads wait."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.scripts import run_process
from helpers.unsloth import FakeUnsloth
from pytest import MonkeyPatch

from gtpo.cli.parse import load_backend_of, read_command_line
from gtpo.evaluation import sampling
from gtpo.models import backend
from gtpo.models.backend import load_backend
from gtpo.processes import limit_openmp_spinning
from train_gtpo import SETTINGS

TABLES = tables_of(__file__)


def test_a_gpu_without_kernels_is_refused(gpu: None, monkeypatch: MonkeyPatch) -> None:
    """A V100: the wheels of PyTorch for CUDA 13, bitsandbytes and vLLM start at 7.5."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 0))
    for load in (lambda: load_backend("auto", "llama"), lambda: load_backend("transformers"), choose_sampler):
        with refused(r"7\.0"):
            load()
    assert load_backend_of(read_command_line("gtpo", ["--model", "llama", "--dry_run"]), SETTINGS) == "unsloth"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    assert load_backend("transformers") == "transformers"


def choose_sampler() -> None:
    sampling.choose_sampler("auto", tiny=True)


@pytest.mark.parametrize(
    ("capability", "before", "after"),
    [
        ((8, 0), None, "0"),  # without nvcc and ninja its kernels cannot be compiled
        ((8, 0), "1", "1"),  # the choice of the user, or of Unsloth, which has looked for both
        ((7, 5), "1", "0"),  # Unsloth's, which vLLM refuses there
    ],
)
def test_vllm_samples_with_its_own_kernels(
    capability: tuple[int, int], before: str | None, after: str, gpu: None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    with mock.patch.dict(os.environ, {} if before is None else {"VLLM_USE_FLASHINFER_SAMPLER": before}):
        if before is None:
            os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER", None)
        os.environ.pop("UNSLOTH_VLLM_NO_FLASHINFER", None)
        load_backend("transformers")
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == after
        assert ("UNSLOTH_VLLM_NO_FLASHINFER" in os.environ) == (after == "0")  # Unsloth would set 1 again


LLAMA = ["--model", "llama"]


@pytest.mark.parametrize("argv", [[], LLAMA, ["--backend", "auto"], ["--backend=transformers"]])
def test_without_gpu_the_backend_is_transformers(argv: list[str], no_gpu: None) -> None:
    assert load_backend_of(read_command_line("gtpo", argv), SETTINGS) == "transformers"


@pytest.mark.parametrize(
    ("argv", "text", "expected"),
    [
        ([], "", "transformers"),  # the default is --model tiny
        (["--model=tiny"], "", "transformers"),
        ([*LLAMA, "--backend", "transformers"], "", "transformers"),
        ([], "backend: transformers\nmodel: llama\n", "transformers"),  # a YAML key is a flag
        ([], "model: tiny\n", "transformers"),
        ([*LLAMA, "--dry_run"], "", "unsloth"),  # which needs no Unsloth
    ],
)
def test_with_gpu_flags_and_files_choose_the_backend(
    argv: list[str], text: str, expected: str, gpu: None, tmp_path: Path
) -> None:
    if text:
        (tmp_path / "settings.yaml").write_text(text)
        argv = ["--config", str(tmp_path / "settings.yaml")]
    assert load_backend_of(read_command_line("gtpo", argv), SETTINGS) == expected


# with a fake Unsloth


@pytest.mark.parametrize("argv", [LLAMA, ["--backend", "unsloth"]])
def test_on_a_gpu_unsloth_is_the_backend(argv: list[str], unsloth: FakeUnsloth) -> None:
    assert load_backend_of(read_command_line("gtpo", argv), SETTINGS) == "unsloth"


@pytest.mark.parametrize("package", backend.GPU_PACKAGES)
def test_another_version_of_a_gpu_package_is_refused(
    package: str, unsloth: FakeUnsloth, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM 0.28 and later need a plugin for 4-bit weights, and Unsloth does not stop if a package is missing."""
    for found, allowed in (("9.9", False), ("9.9", True), (None, True)):
        monkeypatch.setattr(backend, "installed_version", (backend.GPU_PACKAGES | {package: found}).get)
        monkeypatch.setenv("GTPO_ALLOW_VERSIONS", str(int(allowed)))
        if found and allowed:
            assert load_backend_of(read_command_line("gtpo", LLAMA), SETTINGS) == "unsloth" and package in caplog.text
            continue
        with refused(f"{package} {backend.GPU_PACKAGES[package]}.*{found or 'none'}"):
            load_backend_of(read_command_line("gtpo", LLAMA), SETTINGS)
        assert found is None or caplog.messages == []


def test_an_unpatched_trainer_is_refused(unsloth: FakeUnsloth, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("trl.GRPOTrainer", type("GRPOTrainer", (), {}))
    with refused("unsloth_compiled_cache"):
        load_backend_of(read_command_line("gtpo", LLAMA), SETTINGS)


@pytest.mark.parametrize("package", ["trl", "transformers", "peft"])
def test_a_package_imported_before_unsloth_is_named(package: str, unsloth: Any, monkeypatch: MonkeyPatch) -> None:
    for name in {"unsloth", "trl", "transformers", "peft"} - {package}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with refused(f"{package} was imported before Unsloth"):
        load_backend("unsloth", "llama")


@pytest.mark.parametrize(
    ("given", "expected"),
    TABLES["threads_spin_for_a_moment_unless_the_user_says_otherwise"],
)
def test_threads_spin_briefly_unless_the_user_decides(given: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(given)
    limit_openmp_spinning(environment)
    assert environment == expected


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft", "evaluate"])
def test_scripts_limit_the_spinning_before_torch_is_imported(script: str) -> None:
    code = f"import sys, os, {script}; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP"))}
    completed = run_process([sys.executable, "-c", code], env=environment)
    assert completed.stdout.split() == ["3000", "False"], completed.stderr


@pytest.mark.parametrize(
    ("version", "gpu_name", "named", "expected"),
    [
        ("0.27.1", "NVIDIA H100 80GB HBM3", None, "0.27"),
        ("0.27.9", "NVIDIA H100 80GB HBM3", None, "0.27"),
        ("0.28.0", "NVIDIA H100 80GB HBM3", None, None),  # other kernels
        ("0.27.1", "NVIDIA H100 PCIe", None, None),
        ("0.27.1", "NVIDIA H100 80GB HBM3", "/mine", "/mine"),
        (None, "NVIDIA H100 80GB HBM3", None, None),
    ],
)
def test_tuned_kernels_are_those_of_this_gpu_and_vllm(
    version: str | None,
    gpu_name: str,
    named: str | None,
    expected: str | None,
    gpu: None,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    (tmp_path / "0.27").mkdir()
    (tmp_path / "0.27" / "NVIDIA_H100_80GB_HBM3_SHRINK.json").write_text("{}")
    monkeypatch.setattr(backend, "TUNED_KERNELS", tmp_path)
    monkeypatch.setattr(backend, "installed_version", lambda package: version)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: gpu_name)
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    if named:
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", named)
    backend.use_tuned_kernels()
    found = os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    assert found == (str(tmp_path / expected) if expected else None)
