"""Which backend trains, and the refusals before anything is loaded."""

import importlib.util
import sys
from pathlib import Path

import pytest
from helpers.unsloth import StandIn

from gtpo import backend
from gtpo.cli import load_backend_from_flags
from gtpo.errors import UsageError


@pytest.mark.parametrize("argv", [[], ["--model", "llama"], ["--backend", "auto"], ["--backend=transformers"]])
def test_without_gpu_the_backend_is_transformers(argv: list[str], no_gpu: None) -> None:
    assert load_backend_from_flags(argv) == "transformers"


def test_unsloth_without_gpu_is_refused(no_gpu: None) -> None:
    with pytest.raises(UsageError, match=r"--backend unsloth needs a GPU.*--backend transformers"):
        load_backend_from_flags(["--backend", "unsloth"])


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="'vllm' is unknown: pick one of auto, unsloth, transformers"):
        load_backend_from_flags(["--backend", "vllm"])


@pytest.mark.parametrize(
    "argv", [["--model", "tiny"], ["--model=tiny"], ["--model", "llama", "--backend", "transformers"]]
)
def test_with_gpu_the_backend_can_still_be_transformers(argv: list[str], gpu: None) -> None:
    assert load_backend_from_flags(argv) == "transformers"


def test_with_gpu_no_model_named_is_the_tiny_one(gpu: None) -> None:
    """The default of --model is tiny, whether it is written out or not."""
    assert load_backend_from_flags([]) == "transformers"


@pytest.mark.parametrize("text", ["backend: transformers\nmodel: llama\n", "model: tiny\n"])
def test_backend_and_model_of_the_file_count(text: str, gpu: None, tmp_path: Path) -> None:
    """A YAML key is a flag: --config has to choose the backend as the command line does."""
    (tmp_path / "settings.yaml").write_text(text)
    assert load_backend_from_flags(["--config", str(tmp_path / "settings.yaml")]) == "transformers"


def test_unknown_backend_of_the_file_is_refused(no_gpu: None, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("backend: vllm\n")
    with pytest.raises(UsageError, match="'vllm' is unknown"):
        load_backend_from_flags(["--config", str(tmp_path / "settings.yaml")])


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="Unsloth is installed")
def test_missing_unsloth_says_what_to_install(gpu: None) -> None:
    with pytest.raises(UsageError, match=r"unsloth is not installed: `pip install -r requirements\.txt`"):
        load_backend_from_flags(["--model", "llama"])


def test_a_plan_needs_no_unsloth(gpu: None) -> None:
    assert load_backend_from_flags(["--model", "llama", "--dry_run"]) == "unsloth"


# with a stand-in for Unsloth


def test_on_a_gpu_unsloth_is_the_backend(unsloth: StandIn) -> None:
    assert (
        load_backend_from_flags(["--model", "llama"]) == load_backend_from_flags(["--backend", "unsloth"]) == "unsloth"
    )


@pytest.mark.parametrize("package", backend.GPU_PACKAGES)
def test_another_version_of_a_gpu_package_is_refused(
    package: str, unsloth: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM from 0.28 on wants a plugin for 4-bit weights, and Unsloth goes on without what it misses."""
    versions = backend.GPU_PACKAGES | {package: "9.9"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    with pytest.raises(UsageError, match=rf"{package} 9.9 is installed, {backend.GPU_PACKAGES[package]} is needed"):
        load_backend_from_flags(["--model", "llama"])
    monkeypatch.setattr(backend, "is_installed", lambda name: name != package)
    with pytest.raises(UsageError, match=f"{package} is not installed"):
        load_backend_from_flags(["--model", "llama"])


def test_what_unsloth_patches_must_not_be_imported_before_it(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unsloth")
    with pytest.raises(UsageError, match=r"(peft|transformers|trl) was imported before Unsloth"):
        load_backend_from_flags(["--model", "llama"])


def test_a_trainer_that_was_not_patched_is_refused(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.GRPOTrainer", type("GRPOTrainer", (), {}))
    with pytest.raises(UsageError, match=r"Unsloth did not patch trl\.GRPOTrainer: delete unsloth_compiled_cache/"):
        load_backend_from_flags(["--model", "llama"])


def test_standby_is_told(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY", "1")
    load_backend_from_flags(["--model", "llama"])
    assert "Unsloth sets its own GPU memory share" in caplog.text
