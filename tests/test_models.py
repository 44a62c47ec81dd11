"""The tiny model and its tokenizer, LoRA policies, and the refusals before anything is loaded."""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canned import make_trainer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

import models
from config import ModelArguments, UsageError
from data import arithmetic
from models import (
    build_tiny,
    check_tokenizer,
    ensure_tiny,
    load_backend,
    load_base,
    load_policy,
    resolve_model,
    save_adapter,
)
from prompts import TAGS, to_completion, to_messages
from rewards import extract_answer, is_correct, score_format


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the tiny model ----


def test_tiny_is_the_same_for_the_same_seed_only(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever happened before
    again, other = build_tiny(tmp_path / "again"), build_tiny(tmp_path / "other", seed=1)
    assert same(weights(tiny), weights(again))
    assert not same(weights(tiny), weights(other))
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        assert (tiny / file).read_bytes() == (again / file).read_bytes(), file


def test_tiny_has_about_a_million_parameters(tiny: Path) -> None:
    assert 5e5 < sum(weight.numel() for weight in weights(tiny).values()) < 1.5e6


def test_tiny_pad_bos_eos_are_distinct_and_agree_with_the_model(tiny: Path, tokenizer: Any) -> None:
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert None not in ids and len(set(ids)) == 3
    config = json.loads((tiny / "config.json").read_text())
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == ids
    assert config["vocab_size"] == len(tokenizer)


def test_prompt_is_a_prefix_of_the_conversation(tokenizer: Any) -> None:
    """Otherwise SFT would train on other prompts than GTPO samples from."""
    for row in arithmetic("train", 50, seed=0):
        prompt = to_messages(row["question"])
        answer = {"role": "assistant", "content": to_completion(row["reasoning"], row["gold"])}
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*prompt, answer])["input_ids"]
        assert whole[: len(start)] == start and len(whole) > len(start)
        assert whole[-1] == tokenizer.eos_token_id and whole[0] == tokenizer.bos_token_id
        assert whole[len(start) : -1] == tokenizer.encode(answer["content"], add_special_tokens=False)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_gives_back_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tags_survive_decoding_without_special_tokens(tokenizer: Any) -> None:
    text = to_completion("3 + 4 = 7", "7")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(tag in text for tag in TAGS)
    assert score_format(tokenizer.decode(ids, skip_special_tokens=True)) == 10


def test_tiny_prompts_are_short(tokenizer: Any) -> None:
    """What a CPU can train on: about fifty tokens of prompt and thirty of completion."""
    for row in arithmetic("train", 200, seed=0):
        prompt = tokenizer.apply_chat_template(to_messages(row["question"]), add_generation_prompt=True)["input_ids"]
        completion = tokenizer.encode(to_completion(row["reasoning"], row["gold"]), add_special_tokens=False)
        assert len(prompt) < 100 and len(completion) < 63  # max_completion_length 64 of the preset, EOS included


# ---- the tiny base ----


def test_imperfect_targets_are_spoiled_as_often_as_configured() -> None:
    targets = list(models._imperfect_targets())
    assert targets == list(models._imperfect_targets())
    golds = [row["gold"] for row in arithmetic("train", len(targets), seed=1 + int(models.TINY["seed"]))]
    questions = [row["question"] for row in arithmetic("train", len(targets), seed=1 + int(models.TINY["seed"]))]
    assert [question for question, _ in targets] == questions
    assert len(targets) == models.TINY["steps"] * models.TINY["batch_size"]

    whole = [score_format(target) == 10 for _, target in targets]
    # Only in the whole ones can every answer be read; spoiling one and the other is drawn independently.
    right = [
        is_correct(extract_answer(target), gold)
        for (_, target), gold, fine in zip(targets, golds, whole, strict=True)
        if fine
    ]
    for found, share in ((whole, models.TINY["spoiled_format"]), (right, models.TINY["spoiled_answer"])):
        deviation = math.sqrt(share * (1 - share) / len(found))
        assert abs(found.count(False) / len(found) - share) < 4 * deviation
    assert all(score_format(target) == 1 for (_, target), fine in zip(targets, whole, strict=True) if not fine)
    # A wrong answer is the one that the working arrives at, and all of the working but its last result is right.
    rows = arithmetic("train", 2000, seed=1 + int(models.TINY["seed"]))
    for (_, target), row in zip(targets[:2000], rows, strict=True):
        if score_format(target) == 10:
            reasoning = target.split("<reasoning>\n")[1].split("\n</reasoning>")[0]
            expected = row["reasoning"].rpartition("= ")[0] + "= " + str(extract_answer(target))
            assert reasoning == expected


def test_tiny_base_is_trained_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TINY", models.TINY | {"steps": 2, "batch_size": 4})
    first = ensure_tiny(tmp_path / "a")
    assert json.loads((first / "tiny.json").read_text()) == models.TINY
    assert {path.name for path in first.parent.iterdir()} == {first.name, f"{first.name}.lock"}  # nothing unfinished
    assert not same(weights(first), weights(build_tiny(tmp_path / "untrained")))
    assert same(weights(first), weights(ensure_tiny(tmp_path / "b")))  # made again: the same
    model, tokenizer = load_base(str(first))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and model.dtype == torch.float32

    def trained_again(folder: Path) -> None:
        raise AssertionError("the cache was not used")

    monkeypatch.setattr(models, "_warm_start", trained_again)
    assert ensure_tiny(tmp_path / "a") == first
    monkeypatch.setattr(models, "TINY", models.TINY | {"seed": 1})
    with pytest.raises(AssertionError, match="cache"):  # other settings: another base
        ensure_tiny(tmp_path / "a")


# ---- LoRA policies ----


def policy(folder: Path, seed: int = 0, **settings: Any) -> Any:
    arguments = ModelArguments(model=str(folder), **({"lora_rank": 8} | settings))
    return load_policy(arguments, "transformers", seed)[0]


def test_only_the_adapter_on_the_named_layers_is_trained(tiny: Path) -> None:
    model = policy(tiny, lora_target_modules=["q_proj", "v_proj"])
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    layers = models.TINY["num_hidden_layers"]
    assert len(trained) == layers * 2 * 2  # q and v, A and B
    assert all(("q_proj.lora_" in name) or ("v_proj.lora_" in name) for name in trained)
    lora = model.peft_config["default"]
    assert lora.r == lora.lora_alpha == 8 and lora.task_type == "CAUSAL_LM" and lora.lora_dropout == 0
    assert {len(weight) for name, weight in model.named_parameters() if "lora_A" in name} == {8}


def test_default_layers_are_listing_1(tiny: Path) -> None:
    model = policy(tiny)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == models.TINY["num_hidden_layers"] * 7 * 2


def test_fresh_policy_is_the_base_and_depends_on_the_seed_alone(tiny: Path) -> None:
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


# ---- refusals ----


def test_tokenizer_that_pads_with_its_end_is_refused(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny, pad_token="</s>")
    with pytest.raises(UsageError, match=r"pads with its end-of-text token '</s>'.*pad_token"):
        check_tokenizer(tokenizer, "some/model")


def test_tokenizer_without_padding_gets_a_reserved_token(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.pad_token = None
    check_tokenizer(tokenizer, "some/model")
    assert tokenizer.pad_token == "<pad>"


def test_tokenizer_without_padding_or_reserved_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / name).read_text().replace('"<pad>"', '"<blank>"')
        (tmp_path / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = None
    with pytest.raises(UsageError, match="pads with its end-of-text"):
        check_tokenizer(tokenizer, "some/model")


def test_tokenizer_without_chat_template_is_refused(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="some/model has no chat template"):
        check_tokenizer(tokenizer, "some/model")


def test_base_that_pads_with_its_end_is_refused_when_it_loads(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    with pytest.raises(UsageError, match="pads with its end-of-text"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/nothing", "{folder}/missing", "{folder}"])
def test_unknown_model_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = name.format(folder=tmp_path)  # the folder itself is empty: no model in it
    with pytest.raises(UsageError, match="cannot load model") as caught:
        load_base(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    assert "Pick tiny, llama, qwen" in str(caught.value)


def test_a_number_in_the_name_does_not_make_a_model_gated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot load model"):
        load_base(str(tmp_path / "run-4013"))


def test_aliases_name_the_models_of_the_paper() -> None:
    assert resolve_model("llama") == "meta-llama/Llama-3.1-8B-Instruct"
    assert resolve_model("qwen") == "Qwen/Qwen2.5-3B-Instruct"
    assert resolve_model("some/model") == "some/model"


# ---- the backend ----


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "gpu_is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "gpu_is_available", lambda: False)


@pytest.mark.parametrize("argv", [[], ["--model", "llama"], ["--backend", "auto"], ["--backend=transformers"]])
def test_without_gpu_the_backend_is_transformers(argv: list[str], no_gpu: None) -> None:
    assert load_backend(argv) == "transformers"


def test_unsloth_without_gpu_is_refused(no_gpu: None) -> None:
    with pytest.raises(UsageError, match=r"--backend unsloth needs a GPU.*--backend transformers"):
        load_backend(["--backend", "unsloth"])


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="'vllm' is unknown: pick one of auto, unsloth, transformers"):
        load_backend(["--backend", "vllm"])


@pytest.mark.parametrize(
    "argv", [["--model", "tiny"], ["--model=tiny"], ["--model", "llama", "--backend", "transformers"]]
)
def test_with_gpu_the_backend_can_still_be_transformers(argv: list[str], gpu: None) -> None:
    assert load_backend(argv) == "transformers"


def test_with_gpu_no_model_named_is_the_tiny_one(gpu: None) -> None:
    """The default of --model is tiny, whether it is written out or not."""
    assert load_backend([]) == "transformers"


@pytest.mark.parametrize("text", ["backend: transformers\nmodel: llama\n", "model: tiny\n"])
def test_backend_and_model_of_the_file_count(text: str, gpu: None, tmp_path: Path) -> None:
    """A YAML key is a flag: --config has to choose the backend as the command line does."""
    (tmp_path / "settings.yaml").write_text(text)
    assert load_backend(["--config", str(tmp_path / "settings.yaml")]) == "transformers"


def test_unknown_backend_of_the_file_is_refused(no_gpu: None, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("backend: vllm\n")
    with pytest.raises(UsageError, match="'vllm' is unknown"):
        load_backend(["--config", str(tmp_path / "settings.yaml")])


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="Unsloth is installed")
def test_missing_unsloth_says_what_to_install(gpu: None) -> None:
    with pytest.raises(UsageError, match=r"unsloth is not installed: `pip install -r requirements\.txt`"):
        load_backend(["--model", "llama"])


def test_a_plan_needs_no_unsloth(gpu: None) -> None:
    assert load_backend(["--model", "llama", "--dry_run"]) == "unsloth"


# Unsloth itself cannot be imported without a GPU: a stand-in for its surface, none for our own steps around it.


class StandIn:
    """What unsloth offers: it patches trl when it is imported, and loads models."""

    def __init__(self, patches_trl: bool = True) -> None:
        self.__spec__ = None
        self.asked: dict[str, Any] = {}
        self.FastLanguageModel = self
        self.patches_trl = patches_trl

    def from_pretrained(self, **options: Any) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM

        self.asked |= options
        model = AutoModelForCausalLM.from_pretrained(options["model_name"])
        model.config._name_or_path = "unsloth/its-own-copy-bnb-4bit"
        return model, AutoTokenizer.from_pretrained(options["model_name"])

    def get_peft_model(self, model: Any, **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        self.asked |= options
        return get_peft_model(model, LoraConfig(r=options["r"], target_modules=options["target_modules"]))


@pytest.fixture
def unsloth(gpu: None, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "unsloth", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(models, "is_installed", lambda package: True)
    monkeypatch.setattr("importlib.metadata.version", lambda package: models.GPU_PACKAGES[package])
    monkeypatch.setattr("trl.GRPOTrainer", type("UnslothGRPOTrainer", (), {}))
    return stand_in


def test_on_a_gpu_unsloth_is_the_backend(unsloth: StandIn) -> None:
    assert load_backend(["--model", "llama"]) == load_backend(["--backend", "unsloth"]) == "unsloth"


@pytest.mark.parametrize("package", models.GPU_PACKAGES)
def test_another_version_of_a_gpu_package_is_refused(
    package: str, unsloth: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM from 0.28 on wants a plugin for 4-bit weights, and Unsloth goes on without what it misses."""
    versions = models.GPU_PACKAGES | {package: "9.9"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    with pytest.raises(UsageError, match=rf"{package} 9.9 is installed, {models.GPU_PACKAGES[package]} is needed"):
        load_backend(["--model", "llama"])
    monkeypatch.setattr(models, "is_installed", lambda name: name != package)
    with pytest.raises(UsageError, match=f"{package} is not installed"):
        load_backend(["--model", "llama"])


def test_what_unsloth_patches_must_not_be_imported_before_it(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unsloth")
    with pytest.raises(UsageError, match=r"(peft|transformers|trl) was imported before Unsloth"):
        load_backend(["--model", "llama"])


def test_a_trainer_that_was_not_patched_is_refused(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.GRPOTrainer", type("GRPOTrainer", (), {}))
    with pytest.raises(UsageError, match=r"Unsloth did not patch trl\.GRPOTrainer: delete unsloth_compiled_cache/"):
        load_backend(["--model", "llama"])


def test_standby_is_told(unsloth: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY", "1")
    load_backend(["--model", "llama"])
    assert "not --gpu_memory_utilization" in caplog.text


@pytest.mark.parametrize("use_vllm", [True, False])
def test_vllm_and_fast_inference_go_together(use_vllm: bool, unsloth: StandIn, tiny: Path) -> None:
    arguments = ModelArguments(model=str(tiny), lora_rank=8, load_in_4bit=True, max_seq_length=99)
    model, tokenizer = load_policy(arguments, "unsloth", seed=5, use_vllm=use_vllm)
    assert unsloth.asked["fast_inference"] is use_vllm
    expected = {"load_in_4bit": True, "max_seq_length": 99, "max_lora_rank": 8, "gpu_memory_utilization": 0.4, "r": 8}
    expected |= {"lora_alpha": 8, "random_state": 5, "use_gradient_checkpointing": "unsloth"}
    assert {name: unsloth.asked[name] for name in expected} == expected
    # The adapter names the model that was asked for, not the 4-bit copy that Unsloth took in its place.
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


# ---- what is left of a run ----

RESOLVED = {"merge": "none", "push_to_hub": False, "hub_model_id": None, "hub_private_repo": None, "lora_rank": 4}


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """A trainer whose adapter does something, and the settings of its run."""
    trainer = make_trainer("gtpo", tiny, tmp_path / "run")
    generator = torch.Generator().manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1, generator=generator)
    return trainer, RESOLVED | {"output_dir": str(tmp_path / "run"), "model": str(tiny), "gamma": 0.125}


def test_the_card_cites_the_paper_and_lists_the_settings(trained: tuple[Any, dict[str, Any]]) -> None:
    trainer, resolved = trained
    save_adapter(trainer, resolved)
    run = Path(resolved["output_dir"])
    card = (run / "adapter" / "README.md").read_text()
    assert "2508.03772" in card and "simoni2025gtpo" in card and "gamma: 0.125" in card
    assert "--max-lora-rank 4" in card and "hub_model_id" not in card
    assert sorted(path.name for path in run.iterdir()) == ["adapter"]
    assert not list((run / "adapter").glob("*.bin")) + list((run / "adapter").glob("*.pt"))  # no pickles


def test_merged_weights_are_base_plus_adapter_in_16_bits(trained: tuple[Any, dict[str, Any]], tiny: Path) -> None:
    trainer, resolved = trained
    save_adapter(trainer, resolved | {"merge": "16bit"})
    merged = load_file(Path(resolved["output_dir"]) / "merged" / "model.safetensors")
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
    assert AutoTokenizer.from_pretrained(Path(resolved["output_dir"]) / "merged").chat_template
    card = (Path(resolved["output_dir"]) / "merged" / "README.md").read_text()
    assert "2508.03772" in card and "stands alone" in card and "--enable-lora" not in card


class Hub:
    """What huggingface_hub.HfApi is asked."""

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
def test_what_was_written_last_is_uploaded(
    merge: str, weights: str, trained: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, resolved = trained
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    save_adapter(trainer, resolved | {"push_to_hub": True, "hub_model_id": "mine", "merge": merge})
    create, (verb, files, repository) = Hub.calls
    assert create == ("create", "mine", None, True)
    assert (verb, repository) == ("upload", "me/mine") and {weights, "README.md", "tokenizer.json"} <= set(files)


def test_a_failed_upload_says_where_the_adapter_is(
    trained: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, resolved = trained
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "fails", True)
    with pytest.raises(UsageError, match=r"saved in .*adapter, but not uploaded: no route to the Hub `hf upload run"):
        save_adapter(trainer, resolved | {"push_to_hub": True})
    assert (Path(resolved["output_dir"]) / "adapter" / "adapter_model.safetensors").is_file()
