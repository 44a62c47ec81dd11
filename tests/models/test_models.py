"""LoRA policies, and the errors before and during the loading of a model."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.unsloth import FakeUnsloth
from safetensors.torch import load_file
from transformers import AutoConfig

from gtpo.arguments import ModelArguments
from gtpo.errors import UsageError
from gtpo.models import load as models
from gtpo.models.load import build_policy, load_base, resolve_model, source_options, why_not_loaded


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- LoRA policies ----


def policy(directory: Path, seed: int = 0, **settings: Any) -> Any:
    arguments = ModelArguments(model=str(directory), **({"lora_rank": 8} | settings))
    return build_policy(arguments, "transformers", seed)[0]


def test_only_the_adapter_on_the_named_layers_is_trained(tiny: Path) -> None:
    model = policy(tiny, lora_target_modules=["q_proj", "v_proj"])
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    layers = 2
    assert len(trained) == layers * 2 * 2  # q and v, A and B
    assert all(("q_proj.lora_" in name) or ("v_proj.lora_" in name) for name in trained)
    lora = model.peft_config["default"]
    assert lora.r == lora.lora_alpha == 8 and lora.task_type == "CAUSAL_LM" and lora.lora_dropout == 0
    assert {len(weight) for name, weight in model.named_parameters() if "lora_A" in name} == {8}


def test_default_layers_are_listing_1(tiny: Path) -> None:
    model = policy(tiny)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 7 * 2


def test_all_linear_adapts_every_linear_module_but_the_head(tiny: Path) -> None:
    model = policy(tiny, lora_target_modules=["all-linear"])
    trained = {
        name.partition(".lora_")[0].rpartition(".")[2] for name, w in model.named_parameters() if w.requires_grad
    }
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_an_unknown_module_is_refused_beside_a_known_one(tiny: Path) -> None:
    """PEFT would train the known one only."""
    with pytest.raises(
        UsageError, match=r"--lora_target_modules: \S+ has no module 'q_prj' \(did you mean 'q_proj'\?\)"
    ):
        policy(tiny, lora_target_modules=["v_proj", "q_prj"])


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


def test_a_base_that_pads_with_eos_gets_another_padding_token(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    _, tokenizer = load_base(str(tmp_path))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_a_tokenizer_that_cannot_be_used_is_refused_before_the_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (model / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load_base(str(model))


def test_unsloth_is_refused_where_only_eos_can_pad(unsloth: FakeUnsloth, model: Path) -> None:
    """Its masks take every EOS token for padding."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text().replace('"<pad>"', '"<end>"')
        (model / name).write_text(text)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    with pytest.raises(UsageError, match=r"Unsloth takes every EOS token for padding.*use --backend transformers"):
        build_policy(ModelArguments(model=str(model), lora_rank=8), "unsloth", 0)


@pytest.mark.parametrize("name", ["nobody/nothing", "{directory}/missing", "{directory}"])
def test_unknown_model_gives_a_one_line_error(name: str, tmp_path: Path) -> None:
    path = name.format(directory=tmp_path)  # the directory exists but has no model in it
    with pytest.raises(UsageError, match="cannot load model") as caught:
        load_base(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    assert "Expected tiny, smol, llama, qwen" in str(caught.value)


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
    model, tokenizer = build_policy(arguments, "unsloth", seed=5, use_vllm=use_vllm)
    assert unsloth.options["fast_inference"] is use_vllm
    expected = {"load_in_4bit": True, "max_seq_length": 99, "max_lora_rank": 8, "gpu_memory_utilization": 0.4, "r": 8}
    expected |= {"lora_alpha": 8, "random_state": 5, "use_gradient_checkpointing": "unsloth"}
    assert {name: unsloth.options[name] for name in expected} == expected
    # The adapter names the requested model, not the 4-bit copy that Unsloth loads instead.
    assert model.peft_config["default"].base_model_name_or_path == str(tiny)
    assert tokenizer.pad_token != tokenizer.eos_token


def test_a_resized_embedding_is_refused(unsloth: FakeUnsloth, tiny: Path) -> None:
    """Unsloth resizes it where the tokenizer has more tokens; the merged model would not be the trained one."""
    rows = AutoConfig.from_pretrained(tiny).vocab_size + 1
    unsloth.rows = rows
    expected = rf"has {rows} rows after loading, but its config.json says {rows - 1}: remove"
    with pytest.raises(UsageError, match=expected):
        build_policy(ModelArguments(model=str(tiny), lora_rank=8), "unsloth", 0)


AUTO = "Unsloth: Failed to load model. Both AutoConfig and PeftConfig loading failed.\n\nAutoConfig error: {}\n\n"
PEFT = "PeftConfig error: Can't find 'adapter_config.json' at '{}'\n\n"


NOT_THERE = "it is not a directory, and not a model on the Hub that you can read (a private one needs `hf auth login`)"


@pytest.mark.parametrize(
    ("auto", "reason"),
    [
        ("Unrecognized model in {}. Should have a `model_type` key.", "it has no config.json with a model_type"),
        (
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cache.\n",
            "it is not a directory, not in the cache of the Hub, and the Hub cannot be reached",
        ),
        ("{} is not a local folder and is not a valid model identifier listed on the Hub\nIf this is", NOT_THERE),
        ("Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{}'. Use `repo_type`", NOT_THERE),
    ],
    ids=["no model", "unreachable", "unknown", "bad path"],
)
def test_errors_of_unsloths_loader_are_one_sentence(
    auto: str, reason: str, unsloth: FakeUnsloth, tmp_path: Path
) -> None:
    """It raises RuntimeError with both texts: of AutoConfig and of PeftConfig."""
    path = str(tmp_path)
    unsloth.error = RuntimeError((AUTO.replace("{}", auto) + PEFT).replace("{}", path))
    with pytest.raises(UsageError) as caught:
        build_policy(ModelArguments(model=path), "unsloth", 0)
    expected = "Expected tiny, smol, llama, qwen, a Hub id or a directory with a config.json."
    assert str(caught.value) == f"cannot load model {path!r}: {reason}. {expected}"


def test_a_gated_model_is_told_by_unsloth_too(unsloth: FakeUnsloth, tmp_path: Path) -> None:
    unsloth.error = RuntimeError(AUTO.format("You are trying to access a gated repo.") + PEFT)
    with pytest.raises(UsageError, match=r"is gated, accept its license on the Hub, then `hf auth login`"):
        build_policy(ModelArguments(model=str(tmp_path)), "unsloth", 0)


@pytest.mark.parametrize(
    ("lora_rank", "use_vllm", "dtype"),
    [(8, False, torch.bfloat16), (8, True, torch.float32), (0, False, torch.float32)],
    ids=["LoRA", "merged for vLLM", "all weights"],
)
def test_weights_that_training_changes_are_in_full_precision_on_a_gpu(
    lora_rank: int, use_vllm: bool, dtype: torch.dtype, gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    arguments = ModelArguments(model=str(tiny), lora_rank=lora_rank)
    model, _ = build_policy(arguments, "transformers", 0, use_vllm)
    assert model.get_input_embeddings().weight.dtype == dtype


# ---- 4-bit weights ----


def test_4bit_without_gpu_is_refused(no_gpu: None, tiny: Path) -> None:
    with pytest.raises(UsageError, match="--load_in_4bit needs a GPU"):
        build_policy(ModelArguments(model=str(tiny), load_in_4bit=True), "transformers", 0)


def test_4bit_without_bitsandbytes_is_refused(gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(models, "is_installed", lambda package: package != "bitsandbytes")
    with pytest.raises(UsageError, match="--load_in_4bit needs bitsandbytes"):
        load_base(str(tiny), load_in_4bit=True)


# ---- files of other people ----


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


def test_code_of_a_model_is_refused_without_a_question(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers asks on the terminal whether to run it, unless it is told not to."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (model / "theirs.py").write_text(code)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(code)
    load_base(str(model))
    for name, change in (
        ("tokenizer_config.json", {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", None]}}),
        ("config.json", {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}}),
    ):
        old = (model / name).read_text()
        (model / name).write_text(json.dumps(json.loads(old) | change))
        with pytest.raises(UsageError, match=r"it contains its own Python code, which is not executed, use an arch"):
            load_base(str(model))
        (model / name).write_text(old)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('\x1b[31mno\x07') }}", r"fails on a user message \(TemplateError: \\x1b\[31mno\\x07\)"),
        ("{% if %}", r"fails on a user message \(TemplateSyntaxError: "),
        ("{{ 1 / 0 }}", r"fails on a user message \(ZeroDivisionError: division by zero\): correct its chat_template"),
    ],
)
def test_a_chat_template_that_raises_is_refused(model: Path, template: str, message: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=message) as caught:
        policy(model)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"hidden_size": "128"}, "Validation error for field 'hidden_size'"),
        ("config.json", {"num_attention_heads": 0}, "integer modulo by zero"),
        ("config.json", {"hidden_size": 64}, "its weights do not have the shapes of its config.json"),
        ("tokenizer.json", {"model": 3}, "data did not match any variant"),
    ],
)
def test_wrong_values_in_the_files_of_a_model_are_one_sentence(
    model: Path, name: str, change: dict[str, Any], message: str
) -> None:
    (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | change))
    with pytest.raises(UsageError, match=f"cannot load model '{model}': {message}.*Expected tiny, smol, llama, qwen"):
        load_base(str(model))


@pytest.mark.slow
def test_damaged_weights_are_refused_before_training(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"model/model.safetensors is incomplete or damaged"):
        policy(model)


def test_a_full_disk_is_not_a_fault_of_the_model() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert why_not_loaded("some/model", full) is full


def test_without_a_connection_only_the_cache_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub retries each request for half a minute, two lines on the screen for each attempt."""

    class Session:
        def head(self, url: str, timeout: float) -> None:
            raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    assert source_options("some/model") == {"local_files_only": True}
    with pytest.raises(UsageError, match=r"cannot load model 'some/model': it is not a directory, not in the cache of"):
        load_base("some/model")
    monkeypatch.setattr(Session, "head", lambda *_, **__: None)
    assert source_options("some/model") == {"local_files_only": False}


def test_a_local_model_has_an_absolute_path(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    assert resolve_model(tiny.name) == resolve_model(f"./{tiny.name}") == str(tiny)
    assert policy(Path(resolve_model(tiny.name))).peft_config["default"].base_model_name_or_path == str(tiny)


@pytest.mark.parametrize("name", ["./nomodel", "/no/model", "a/b/c", "~/model", "../x"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"--model '{name}' is not a directory: pick tiny, smol, llama, qwen, a Hub id"
    ):
        resolve_model(name)
