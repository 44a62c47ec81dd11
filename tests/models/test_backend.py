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

from gtpo.cli.parse import find_backend, load_backend_of, read_command_line
from gtpo.models import backend
from gtpo.models.backend import backend_of, check_backend, load_backend
from gtpo.models.hub import TINY_BASE
from gtpo.processes import limit_openmp_spinning
from train_gtpo import SETTINGS

TABLES = tables_of(__file__)


def loaded(argv: str) -> str:
    """The backend of ``train_gtpo.py argv``."""
    return load_backend_of(read_command_line("gtpo", SETTINGS, argv.split()))


def test_a_gpu_without_kernels_is_refused(gpu: None, monkeypatch: MonkeyPatch) -> None:
    """A V100: the wheels of PyTorch for CUDA 13, bitsandbytes and vLLM start at 7.5."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 0))
    for name in ("auto", "transformers"):
        with refused(r"7\.0"):
            load_backend(name)
    with refused(r"7\.0"):
        check_backend("transformers")  # of an evaluation
    assert loaded("--model llama --dry_run") == "unsloth"  # which needs neither GPU nor Unsloth
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    assert load_backend("transformers") == "transformers"


OF_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [
        ((8, 0), {}, "0"),  # without nvcc and ninja its kernels cannot be compiled
        ((8, 0), {OF_SAMPLER: "1"}, "1"),  # the choice of the user, or of Unsloth, which has looked for both
        ((7, 5), {OF_SAMPLER: "1"}, "0"),  # Unsloth's, which vLLM refuses there
    ],
)
def test_vllm_samples_with_its_own_kernels(
    capability: tuple[int, int], given: dict[str, str], expected: str, gpu: None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    with mock.patch.dict(os.environ, given, clear=True):
        load_backend("transformers")
        assert os.environ[OF_SAMPLER] == expected
        assert ("UNSLOTH_VLLM_NO_FLASHINFER" in os.environ) == (expected == "0")  # Unsloth would set 1 again


@pytest.mark.parametrize(
    ("asked", "use_cpu", "has_gpu", "expected"),
    [
        ("auto", False, True, "fast"),
        ("auto", True, True, "transformers"),
        ("auto", False, False, "transformers"),
        ("auto", True, False, "transformers"),
        ("fast", True, False, "fast"),  # check_backend refuses it where it cannot run
        ("transformers", False, True, "transformers"),
    ],
)
def test_auto_is_the_fast_backend_on_a_gpu(asked: str, use_cpu: bool, has_gpu: bool, expected: str) -> None:
    assert backend_of(asked, use_cpu, has_gpu, "fast") == expected


def test_an_unknown_backend_is_refused() -> None:
    with refused("--backend 'vllm' is unknown: pick one of auto, unsloth, transformers"):
        backend_of("vllm", use_cpu=False, has_gpu=True)


@pytest.mark.parametrize("argv", ["", "--model smol", "--backend=transformers", "--model llama --dry_run"])
def test_without_gpu_the_backend_is_transformers(argv: str, no_gpu: None) -> None:
    assert loaded(argv) == "transformers"


BASES = sorted(str(path) for path in TINY_BASE.parent.glob("base-*"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", "transformers"),  # the default is --model tiny
        ("--model=tiny", "transformers"),
        *[(f"--model {base}", "transformers") for base in BASES],  # as the study names them
        ("--model llama --backend transformers", "transformers"),
        ("--config mine.yaml", "transformers"),  # a YAML key is a flag
        ("--config on_cpu.yaml", "transformers"),
        ("--config on_cpu.yaml --use_cpu false", "unsloth"),
        ("--model llama", "unsloth"),
        ("--model a/b", "unsloth"),
        ("--model a/b --use_cpu true", "transformers"),
        ("--model a/b --use_cpu", "transformers"),
        ("--model tiny --use_cpu false", "unsloth"),
        ("--backend unsloth", "unsloth"),
        ("--backend unsloth --use_cpu", "unsloth"),
    ],
)
def test_with_gpu_model_flags_and_files_choose_the_backend(
    argv: str, expected: str, unsloth: FakeUnsloth, here: Path
) -> None:
    """The same in a plan, which needs no packages, and in the check of a study, which does not import them."""
    (here / "mine.yaml").write_text("backend: transformers\nmodel: llama\n")
    (here / "on_cpu.yaml").write_text("model: a/b\nuse_cpu: true\n")
    assert loaded(argv) == loaded(f"{argv} --dry_run") == expected
    assert find_backend(read_command_line("gtpo", SETTINGS, argv.split())) == expected


def test_unsloth_in_several_processes_is_refused(unsloth: FakeUnsloth, monkeypatch: MonkeyPatch) -> None:
    """vLLM of each process would be on the first GPU."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():  # as torchrun sets them
        monkeypatch.setenv(name, value)
    with refused("add --backend transformers"):
        loaded("--model llama")


@pytest.mark.parametrize("package", backend.GPU_PACKAGES)
def test_another_version_of_a_gpu_package_is_refused(
    package: str, unsloth: FakeUnsloth, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM 0.28 and later need a plugin for 4-bit weights, and Unsloth does not stop if a package is missing."""
    pinned = backend.GPU_PACKAGES[package]
    found = backend.GPU_PACKAGES | {package: "9.9"}
    monkeypatch.setattr(backend, "installed_version", found.get)
    with refused(f"{package} {pinned}.*9.9"):
        loaded("--model llama")
    monkeypatch.setenv("GTPO_ALLOW_VERSIONS", "1")
    assert loaded("--model llama") == "unsloth" and package in caplog.text
    del found[package]
    with refused(f"{package} {pinned}.*none"):
        loaded("--model llama")


def test_an_unpatched_trainer_is_refused(unsloth: FakeUnsloth, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("trl.GRPOTrainer", type("GRPOTrainer", (), {}))
    with refused("unsloth_compiled_cache"):
        loaded("--model llama")


@pytest.mark.parametrize("package", ["trl", "transformers", "peft"])
def test_a_package_imported_before_unsloth_is_named(package: str, unsloth: Any, monkeypatch: MonkeyPatch) -> None:
    for name in {"unsloth", "trl", "transformers", "peft"} - {package}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with refused(f"{package} was imported before Unsloth"):
        load_backend("unsloth")


@pytest.mark.parametrize(("given", "expected"), TABLES["threads_spin_for_a_moment_unless_the_user_says_otherwise"])
def test_threads_spin_briefly_unless_the_user_decides(given: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(given)
    limit_openmp_spinning(environment)
    assert environment == expected


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft", "evaluate"])
def test_scripts_limit_the_spinning_before_torch_is_imported(script: str) -> None:
    code = f"import sys, os, {script}; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    completed = run_process([sys.executable, "-c", code], env={"OMP_NUM_THREADS": "1"})
    assert completed.stdout.split() == ["3000", "False"], completed.stderr
