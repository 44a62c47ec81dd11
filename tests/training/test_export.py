"""The saved adapter, its model card, the merged model, and the upload."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import canned
from helpers.settings import parsed
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gtpo.errors import RunError
from gtpo.runs.directory import RunDirectory
from gtpo.training.export import save_adapter


@pytest.fixture
def trainer(build: Any) -> Any:
    """One with a non-zero adapter."""
    trainer = build("gtpo")
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    return trainer


@pytest.fixture
def save(trainer: Any, tiny: Path, tmp_path: Path) -> Any:
    """``save(*argv, push_to_hub=False)``: save what is trained in ``tmp_path``."""

    def save(*argv: str, push_to_hub: bool = False) -> None:
        words = ["--output_dir", str(tmp_path), "--model", str(tiny), "--lora_rank", "4", "--gamma", "0.125"]
        settings = parsed(*words, *argv)
        settings.given["push_to_hub"] = push_to_hub  # bypasses the check for a token
        save_adapter(trainer, settings, RunDirectory(tmp_path))

    return save


def test_the_adapter_has_its_card_and_no_pickles(trainer: Any, save: Any, tmp_path: Path) -> None:
    trainer.create_model_card()  # as TRL does at a checkpoint
    save()
    adapter = tmp_path / "adapter"
    card = (adapter / "README.md").read_text()
    assert "2508.03772" in card and "gamma: 0.125" in card and f'model="{adapter}"' in card
    assert list(tmp_path.iterdir()) == [adapter]
    assert not [*adapter.glob("*.bin"), *adapter.glob("*.pt")]


def test_a_card_that_fails_does_not_fail_the_run(
    save: Any, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gtpo.training.export.Card.text", lambda *arguments: 1 / 0)
    save()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "ZeroDivisionError" in caplog.text


def test_merged_weights_are_base_plus_adapter_in_16_bits(trainer: Any, save: Any, tiny: Path, tmp_path: Path) -> None:
    save("--merge", "16bit")
    merged, base = (load_file(directory / "model.safetensors") for directory in (tmp_path / "merged", tiny))
    assert merged.keys() == base.keys()
    layer = trainer.model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    added = layer.scaling["default"] * layer.lora_B.default.weight @ layer.lora_A.default.weight
    assert added.abs().max() > 0.01
    name = "model.layers.1.self_attn.q_proj.weight"
    assert merged[name].dtype == torch.bfloat16
    torch.testing.assert_close(merged[name].float(), (base[name] + added).detach(), rtol=2**-7, atol=2e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert f'model="{tmp_path / "merged"}"' in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("weights", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_the_final_weights_are_uploaded(weights: str, save: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Without what a killed save has left."""
    directory = (tmp_path / weights).parent
    (tmp_path / f"{directory.name}.tmp").mkdir()
    (tmp_path / f"{directory.name}.tmp" / "left_over.safetensors").touch()
    hub = Mock()
    hub.create_repo.return_value.repo_id = "me/mine"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    private = ["--merge", "16bit", "--hub_private_repo", "true"] if directory.name == "merged" else []
    save("--hub_model_id", "mine", *private, push_to_hub=True)
    hub.create_repo.assert_called_once_with("mine", private=bool(private) or None, exist_ok=True)
    hub.upload_folder.assert_called_once_with(
        folder_path=directory, repo_id="me/mine", commit_message="Trained weights"
    )
    assert (tmp_path / weights).is_file() and (directory / "tokenizer.json").is_file()
    assert not list(tmp_path.rglob("left_over*"))
    assert 'model="me/mine"' in (directory / "README.md").read_text()  # where the quick start finds it now


def test_a_failed_upload_error_names_the_adapter_directory(save: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    failing = Mock(side_effect=OSError("no route to the Hub\nand more"))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", failing)
    adapter = tmp_path / "adapter"
    with pytest.raises(RunError, match=f"no route to the Hub.*hf upload {tmp_path.name} {adapter}"):
        save(push_to_hub=True)
    assert (adapter / "adapter_model.safetensors").is_file()


def test_the_reference_adapter_is_not_published(build: Any, tmp_path: Path) -> None:
    trainer = build("grpo", beta=0.04)
    trainer.save_model(str(tmp_path / "as_trl_saves"))
    assert (tmp_path / "as_trl_saves" / "ref").is_dir()
    save_adapter(trainer, canned.settings_of(trainer), RunDirectory(tmp_path))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "ref").exists()


def test_the_first_process_alone_writes(trainer: Any, save: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Every process takes part in the saving of the weights, which gathers them."""
    saved: list[str] = []
    trainer.save_model = saved.append
    (tmp_path / "adapter.tmp").mkdir()
    monkeypatch.setattr("gtpo.training.export.is_main_process", lambda: False)
    save("--merge", "16bit", push_to_hub=True)
    assert saved == [str(tmp_path / "adapter.tmp")]
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.tmp"]  # of the first process: it deletes it
