"""LoRA policies, and the errors before and during the loading of a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.unsloth import FakeUnsloth
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gtpo import models
from gtpo.arguments import ModelArguments
from gtpo.errors import UsageError
from gtpo.models import check_tokenizer, load_base, load_policy, resolve_model
from gtpo.tiny import TINY


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- LoRA policies ----


def policy(directory: Path, seed: int = 0, **settings: Any) -> Any:
    arguments = ModelArguments(model=str(directory), **({"lora_rank": 8} | settings))
    return load_policy(arguments, "transformers", seed)[0]


def test_only_the_adapter_on_the_named_layers_is_trained(tiny: Path) -> None:
    model = policy(tiny, lora_target_modules=["q_proj", "v_proj"])
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    layers = TINY["num_hidden_layers"]
    assert len(trained) == layers * 2 * 2  # q and v, A and B
    assert all(("q_proj.lora_" in name) or ("v_proj.lora_" in name) for name in trained)
    lora = model.peft_config["default"]
    assert lora.r == lora.lora_alpha == 8 and lora.task_type == "CAUSAL_LM" and lora.lora_dropout == 0
    assert {len(weight) for name, weight in model.named_parameters() if "lora_A" in name} == {8}


def test_default_layers_are_listing_1(tiny: Path) -> None:
    model = policy(tiny)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == TINY["num_hidden_layers"] * 7 * 2


def test_new_policy_equals_the_base_and_depends_only_on_the_seed(tiny: Path) -> None:
    torch.manual_seed(5)
    first = policy(tiny, seed=3)
    torch.manual_seed(6)
    second, other = policy(tiny, seed=3), policy(tiny, seed=4)

    def adapter(model: Any) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    assert same(adapter(first), adapter(second)) and not same(adapter(first), adapter(other))
    ids = torch.arange(10, 40)[None]
    base, tokenizer = load_base(str(tiny))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, base(ids).logits)
    assert tokenizer.padding_side == "left" and base.dtype == torch.float32


# ---- errors ----


def test_tokenizer_that_pads_with_eos_is_refused(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny, pad_token="</s>")
    with pytest.raises(UsageError, match=r"pads with its EOS token '</s>'.*pad_token"):
        check_tokenizer(tokenizer, "some/model")


def test_tokenizer_without_pad_token_gets_a_reserved_token(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.pad_token = None
    check_tokenizer(tokenizer, "some/model")
    assert tokenizer.pad_token == "<pad>"


def test_tokenizer_without_pad_and_reserved_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / name).read_text().replace('"<pad>"', '"<blank>"')
        (tmp_path / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = None
    with pytest.raises(UsageError, match="pads with its EOS"):
        check_tokenizer(tokenizer, "some/model")


def test_tokenizer_without_chat_template_is_refused(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="some/model has no chat template"):
        check_tokenizer(tokenizer, "some/model")


def test_loading_a_base_that_pads_with_eos_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    with pytest.raises(UsageError, match="pads with its EOS"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/nothing", "{directory}/missing", "{directory}"])
def test_unknown_model_gives_a_one_line_error(name: str, tmp_path: Path) -> None:
    path = name.format(directory=tmp_path)  # the directory exists but has no model in it
    with pytest.raises(UsageError, match="cannot load model") as caught:
        load_base(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    assert "Expected tiny, llama, qwen" in str(caught.value)


def test_a_status_code_in_the_name_does_not_mean_gated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot load model"):
        load_base(str(tmp_path / "run-4013"))


def test_aliases_resolve_to_the_models_of_the_paper() -> None:
    assert resolve_model("llama") == "meta-llama/Llama-3.1-8B-Instruct"
    assert resolve_model("qwen") == "Qwen/Qwen2.5-3B-Instruct"
    assert resolve_model("some/model") == "some/model"


@pytest.mark.parametrize("use_vllm", [True, False])
def test_fast_inference_is_set_by_use_vllm(use_vllm: bool, unsloth: FakeUnsloth, tiny: Path) -> None:
    arguments = ModelArguments(model=str(tiny), lora_rank=8, load_in_4bit=True, max_seq_length=99)
    model, tokenizer = load_policy(arguments, "unsloth", seed=5, use_vllm=use_vllm)
    assert unsloth.options["fast_inference"] is use_vllm
    expected = {"load_in_4bit": True, "max_seq_length": 99, "max_lora_rank": 8, "gpu_memory_utilization": 0.4, "r": 8}
    expected |= {"lora_alpha": 8, "random_state": 5, "use_gradient_checkpointing": "unsloth"}
    assert {name: unsloth.options[name] for name in expected} == expected
    # The adapter names the requested model, not the 4-bit copy that Unsloth loads instead.
    assert model.peft_config["default"].base_model_name_or_path == str(tiny)
    assert tokenizer.pad_token != tokenizer.eos_token


# ---- 4-bit weights ----


def test_4bit_without_gpu_is_refused(no_gpu: None, tiny: Path) -> None:
    with pytest.raises(UsageError, match="--load_in_4bit needs a GPU"):
        load_policy(ModelArguments(model=str(tiny), load_in_4bit=True), "transformers", 0)


def test_4bit_without_bitsandbytes_is_refused(gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(models, "is_installed", lambda package: package != "bitsandbytes")
    with pytest.raises(UsageError, match="--load_in_4bit needs bitsandbytes"):
        load_base(str(tiny), load_in_4bit=True)
