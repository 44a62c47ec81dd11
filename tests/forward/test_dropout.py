"""Dropout of all kinds is found and set to 0, and completions are sampled without it."""

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import _Canned, make_trainer, trained_weights
from helpers.files import read_json, write_json
from helpers.settings import parsed
from helpers.weights import same_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gtpo.forward.dropout import disable_dropout, dropouts_of, in_eval_mode
from gtpo.forward.hidden_states import can_encode_prompts_once
from gtpo.training.trainer import GTPOConfig

SIZES: dict[str, dict[str, Any]] = {  # with the dropouts that the family has by default
    "llama": {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 32},
    "opt": {"hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "word_embed_proj_dim": 8, "dropout": 0.1},
    "falcon": {"hidden_size": 8, "num_attention_heads": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox": {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "attention_dropout": 0.3},
}
DROPOUTS = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_first_dropout": 0.1},
    "opt": {"dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox": {"attention_dropout": 0.3, "classifier_dropout": 0.1},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 1, "vocab_size": 16} | SIZES[family]
    if family == "llama":
        options["attention_dropout"] = 0.5
    config = AutoConfig.for_model(family, **options, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


@pytest.mark.parametrize("family", SIZES)
def test_every_dropout_is_set_to_0(family: str) -> None:
    """In train mode the model then is what it is in eval mode, and two forwards are equal."""
    model = model_of(family)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear")).train()
    ids = torch.arange(3, 11)[None]
    torch.manual_seed(0)
    assert not torch.equal(adapted(ids).logits, adapted(ids).logits)
    assert not can_encode_prompts_once(model, inspect.signature(model.forward).parameters)
    assert dropouts_of(adapted) == disable_dropout(adapted) == DROPOUTS[family]
    assert dropouts_of(adapted) == {} and {*dropouts_of(model)} == set()
    first = adapted(ids).logits
    assert torch.equal(first, adapted(ids).logits) and torch.equal(first, adapted.eval()(ids).logits)


def test_eval_mode_ends_where_it_began() -> None:
    model = nn.Sequential(nn.Dropout(0.5)).train()
    with pytest.raises(KeyError), in_eval_mode(model):
        assert not model[0].training
        raise KeyError
    assert model[0].training
    with in_eval_mode(model.eval()):
        pass
    assert not model[0].training


@pytest.fixture
def train(tiny: Path, tmp_path: Path) -> Any:
    """``train(dropout, **settings)``: weights, prompts and completions of two steps from a base with this dropout."""

    def train(dropout: float, method: str = "grpo", **settings: Any) -> tuple[Any, list[str]]:
        base = tmp_path / f"base-{dropout}"
        if not base.exists():
            shutil.copytree(tiny, base)
            config = base / "config.json"
            write_json(config, read_json(config) | {"attention_dropout": dropout})
        seen: list[str] = []

        def reward(completions: Any, completion_ids: Any, **columns: Any) -> Any:
            seen.extend(completions)
            return [float(sum(ids) % 3) for ids in completion_ids]

        options = {"max_steps": 2, "max_completion_length": 6, "rewards": [reward], "lr_scheduler_type": "constant"}
        trainer = make_trainer(method, base, tmp_path / "run", **options | settings)
        trainer._generate_single_turn = super(_Canned, trainer)._generate_single_turn
        return trained_weights(trainer), seen

    return train


def test_completions_are_sampled_without_dropout(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With dropout in the loss, the first batch is still that of the base without dropout."""
    plain, completions = train(0.0)
    for dropout, flag in ((0.5, False), (0.5, True), (0.0, True)):
        caplog.clear()
        weights, found = train(dropout, disable_dropout=flag)
        assert found[:12] == completions[:12] and len(found) == 24
        assert same_weights(weights, plain) is (flag or not dropout)
        assert ("The dropout of the base is off (attention_dropout 0.5)" in caplog.text) is (flag and dropout > 0)
        assert "the model's cache changes" not in caplog.text


def test_dropout_is_off_by_default(here: Path) -> None:
    assert parsed("--output_dir", "run").trainer.disable_dropout is True
    assert parsed("--output_dir", "run", "--disable_dropout", "false").trainer.disable_dropout is False
    assert GTPOConfig("run", use_cpu=True, bf16=False).disable_dropout is True
    assert GTPOConfig("run", use_cpu=True, bf16=False, disable_dropout=False).disable_dropout is False
    assert not hasattr(parsed("--output_dir", "run", method="sft").trainer, "disable_dropout")
