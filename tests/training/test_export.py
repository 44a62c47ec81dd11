"""The saved adapter, its model card, the merged model, and the upload."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import canned
from helpers.settings import parsed
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gtpo.arguments import Settings
from gtpo.errors import RunError
from gtpo.runs.directory import RunDirectory
from gtpo.training.export import save_adapter

Trained = tuple[Any, Path]


def settings_of(directory: Path, model: Path, *argv: str, push_to_hub: bool = False) -> Settings:
    words = ["--output_dir", str(directory), "--model", str(model), "--lora_rank", "4", "--gamma", "0.125"]
    settings = parsed(*words, *argv)
    settings.given["push_to_hub"] = push_to_hub  # bypasses the check for a token
    return settings


def save(trainer: Any, settings: Settings) -> None:
    save_adapter(trainer, settings, RunDirectory(trainer.args.output_dir))


@pytest.fixture
def trained(build: Any, tmp_path: Path) -> Trained:
    """A trainer with a non-zero adapter, and its run directory."""
    trainer = build("gtpo", "run")
    generator = torch.Generator().manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1, generator=generator)
    return trainer, tmp_path / "run"


def test_the_adapter_has_its_card_and_no_pickles(trained: Trained, tiny: Path) -> None:
    trainer, run = trained
    trainer.create_model_card()  # as TRL does at a checkpoint
    save(trainer, settings_of(run, tiny))
    card = (run / "adapter" / "README.md").read_text()
    assert "2508.03772" in card and "gamma: 0.125" in card and "hub_model_id" not in card
    assert f'path = "{run / "adapter"}"' in card
    assert sorted(path.name for path in run.iterdir()) == ["adapter"]
    assert not list((run / "adapter").glob("*.bin")) + list((run / "adapter").glob("*.pt"))


def test_a_card_that_fails_does_not_fail_the_run(
    trained: Trained, tiny: Path, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, run = trained
    monkeypatch.setattr("gtpo.training.export.Card.text", lambda *arguments: 1 / 0)
    save(trainer, settings_of(run, tiny))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "ZeroDivisionError" in caplog.text


def test_merged_weights_are_base_plus_adapter_in_16_bits(trained: Trained, tiny: Path) -> None:
    trainer, run = trained
    save(trainer, settings_of(run, tiny, "--merge", "16bit"))
    merged = load_file(run / "merged" / "model.safetensors")
    base = load_file(tiny / "model.safetensors")
    adapted = dict(trainer.model.named_parameters())
    name = "model.layers.1.self_attn.q_proj"
    a, b = (adapted[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
    scaling = trainer.model.peft_config["default"].lora_alpha / trainer.model.peft_config["default"].r
    expected = base[f"{name}.weight"] + scaling * b @ a
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    assert (expected - base[f"{name}.weight"]).abs().max() > 0.01
    torch.testing.assert_close(merged[f"{name}.weight"].float(), expected.detach(), rtol=2**-7, atol=2e-3)
    assert merged.keys() == base.keys()
    assert AutoTokenizer.from_pretrained(run / "merged").chat_template
    card = (run / "merged" / "README.md").read_text()
    assert "2508.03772" in card and f'path = "{run / "merged"}"' in card


class Hub:
    """Records the calls to huggingface_hub.HfApi."""

    calls: list[tuple[Any, ...]] = []
    fails = False

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> Any:
        if self.fails:
            raise OSError("no route to the Hub\nand more")
        self.calls.append(("create", name, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path: Path, repo_id: str, commit_message: str) -> None:
        self.calls.append(("upload", sorted(path.name for path in folder_path.iterdir()), repo_id))


@pytest.mark.parametrize(("merge", "weights"), [("none", "adapter_model.safetensors"), ("16bit", "model.safetensors")])
def test_the_final_weights_are_uploaded(
    merge: str, weights: str, trained: Trained, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    trainer, run = trained
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    private = merge == "16bit" or None
    settings = settings_of(run, tiny, "--hub_model_id", "mine", "--merge", merge, push_to_hub=True)
    settings.trainer.hub_private_repo = private
    save(trainer, settings)
    create, (call, files, repository) = Hub.calls
    assert create == ("create", "mine", private, True)
    assert (call, repository) == ("upload", "me/mine") and {weights, "README.md", "tokenizer.json"} <= set(files)
    directory = run / ("merged" if merge == "16bit" else "adapter")
    assert 'path = "me/mine"' in (directory / "README.md").read_text()  # where the quick start finds it now


def test_a_failed_upload_error_names_the_adapter_directory(
    trained: Trained, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    trainer, run = trained
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "fails", True)
    with pytest.raises(RunError, match=f"no route to the Hub.*hf upload run {run / 'adapter'}"):
        save(trainer, settings_of(run, tiny, push_to_hub=True))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_the_reference_adapter_is_not_published(build: Any, tmp_path: Path) -> None:
    trainer = build("grpo", "run", beta=0.04)
    trainer.save_model(str(tmp_path / "as_trl_saves"))
    assert (tmp_path / "as_trl_saves" / "ref").is_dir()
    save(trainer, canned.settings_of(trainer))
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "run" / "adapter" / "ref").exists()


def test_files_of_a_killed_save_are_not_published(trained: Trained, tiny: Path) -> None:
    trainer, run = trained
    for name in ("adapter", "merged"):
        (run / f"{name}.tmp").mkdir(parents=True)
        (run / f"{name}.tmp" / "left_over.safetensors").write_bytes(b"")
    save(trainer, settings_of(run, tiny, "--merge", "16bit"))
    assert (run / "merged" / "model.safetensors").is_file() and not list(run.rglob("left_over*"))
