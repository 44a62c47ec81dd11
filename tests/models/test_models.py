"""LoRA policies, and the errors before and during the loading of a model."""

import errno
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.files import read_json, write_json
from helpers.refusals import refused
from helpers.scripts import ROOT
from helpers.settings import parsed
from helpers.unsloth import FakeUnsloth
from helpers.weights import same_weights
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gtpo.arguments import GTPOArguments, ModelArguments
from gtpo.errors import UsageError
from gtpo.files import CONFIGS, fingerprint
from gtpo.models.hub import check_model_files
from gtpo.models.load import (
    build_policy,
    load_base,
    load_policy,
    sequences_of,
    why_not_loaded,
)
from gtpo.models.shape import shape_of
from gtpo.models.source import model_source
from gtpo.training.export import merge_adapter

# ---- LoRA policies ----


def policy(directory: Path, seed: int = 0, **settings: Any) -> Any:
    arguments = ModelArguments(**({"lora_rank": 8} | settings))
    return build_policy(model_source(directory), arguments, "transformers", seed)[0]


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to change."""
    return shutil.copytree(tiny, tmp_path / "model")


def edit(path: Path, change: dict[str, Any]) -> None:
    write_json(path, read_json(path) | change)


EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("names", "expected"), [(["q_proj", "v_proj"], {"q_proj", "v_proj"}), (["all-linear"], EVERY)])
def test_the_adapter_is_on_the_named_layers(tiny: Path, names: list[str], expected: set[str]) -> None:
    lora = policy(tiny, lora_target_modules=names).peft_config["default"]
    assert {name.rpartition(".")[2] for name in lora.target_modules} == expected
    assert (lora.r, lora.lora_alpha, lora.task_type, lora.lora_dropout) == (8, 8, "CAUSAL_LM", 0)


def test_a_new_policy_is_the_base_by_its_seed(tiny: Path) -> None:
    first = policy(tiny, seed=3)
    torch.manual_seed(6)  # must have no effect
    again, other = (dict(policy(tiny, seed=seed).named_parameters()) for seed in (3, 4))
    weights = dict(first.named_parameters())
    assert same_weights(weights, again) and not same_weights(weights, other)
    ids = torch.arange(10, 40)[None]
    base, tokenizer = load_base(model_source(tiny))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, base(ids).logits)
    assert tokenizer.padding_side == "left" and base.dtype == torch.float32


def test_a_cpu_run_beside_a_gpu_says_so(
    unsloth: FakeUnsloth, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """Its weights are those of a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    settings = parsed("--model", "tiny", "--run_name", "x")
    load_policy(settings, "unsloth")
    assert "--backend unsloth" not in caplog.text
    caplog.clear()
    policy, _ = load_policy(settings, "transformers")
    assert "--backend unsloth" in caplog.messages[0]
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}


# ---- errors ----


def test_a_base_padded_with_eos_gets_another_token(model: Path) -> None:
    edit(model / "tokenizer_config.json", {"pad_token": "</s>"})
    _, tokenizer = load_base(model_source(model))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_an_unusable_tokenizer_is_refused_before_the_weights(model: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for template in ("{% if %}", "{{ raise_exception('no') }}"):
        (model / "chat_template.jinja").write_text(template)
        with refused(rf"--chat_template.*{model}.*Template(Syntax)?Error: "):
            load_base(model_source(model))


def test_unsloth_is_refused_where_only_eos_can_pad(unsloth: FakeUnsloth, model: Path) -> None:
    """Its masks take every EOS token for padding."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text().replace('"<pad>"', '"<end>"')
        (model / name).write_text(text)
    edit(model / "tokenizer_config.json", {"pad_token": "</s>"})
    with refused("--backend transformers"):
        build_policy(model_source(model), ModelArguments(lora_rank=8), "unsloth", 0)


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_completions_stop_at_the_end_of_a_turn(
    backend: str, unsloth: FakeUnsloth, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.models.load.end_of_turn", lambda tokenizer: 7)
    model, tokenizer = build_policy(model_source(tiny), ModelArguments(lora_rank=8), backend, 0)
    assert model.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, 7])


def test_unsloth_gets_the_settings_of_the_policy(unsloth: FakeUnsloth, tiny: Path) -> None:
    arguments = ModelArguments(lora_rank=8, load_in_4bit=True, max_seq_length=99)
    model, tokenizer = build_policy(model_source(tiny), arguments, "unsloth", seed=5, sequences=24)
    expected = {"load_in_4bit": True, "max_seq_length": 99, "max_lora_rank": 8, "gpu_memory_utilization": 0.4, "r": 8}
    expected |= {"lora_alpha": 8, "random_state": 5, "use_gradient_checkpointing": "unsloth"}
    expected |= {"fast_inference": True, "max_num_seqs": 24}
    assert unsloth.options.items() >= expected.items()
    # The adapter names the requested model, and beside it the 4-bit copy that Unsloth loads instead.
    config = model.peft_config["default"]
    copy = {"loaded_from": "unsloth/its-own-copy-bnb-4bit"}
    assert config.base_model_name_or_path == str(tiny)
    assert config.auto_mapping == copy | {"base_fingerprint": fingerprint(tiny)}
    assert tokenizer.pad_token != tokenizer.eos_token

    unsloth.options.clear()
    build_policy(model_source(tiny), arguments, "unsloth", seed=5)
    assert unsloth.options["fast_inference"] is False and "max_num_seqs" not in unsloth.options


@pytest.mark.parametrize(
    ("completions", "gtpo", "resume", "expected"),
    [
        (12, None, False, 12),  # GRPO
        (12, GTPOArguments(), False, 32),  # 100 prompts of the initial entropy first
        (48, GTPOArguments(), False, 48),
        (12, GTPOArguments(), True, 12),  # it is read back
        (12, GTPOArguments(initial_entropy=0.3), False, 12),
        (12, GTPOArguments(entropy_filter="off"), False, 12),
    ],
)
def test_the_engine_has_room_for_the_completions_that_occur(
    completions: int, gtpo: Any, resume: bool, expected: int
) -> None:
    trainer = SimpleNamespace(generation_batch_size=completions)
    settings: Any = SimpleNamespace(trainer=trainer, gtpo=gtpo, run=SimpleNamespace(resume=resume))
    assert sequences_of(settings) == expected


def test_a_resized_embedding_is_refused(unsloth: FakeUnsloth, tiny: Path) -> None:
    """Unsloth resizes it where the tokenizer has more tokens; the merged model would not be the trained one."""
    rows = AutoConfig.from_pretrained(tiny).vocab_size + 1
    unsloth.rows = rows
    with refused(str(rows)):
        build_policy(model_source(tiny), ModelArguments(lora_rank=8), "unsloth", 0)


def test_a_shorter_engine_is_refused(unsloth: FakeUnsloth, tiny: Path, monkeypatch: MonkeyPatch) -> None:
    """Unsloth prints it and goes on; vLLM then refuses the longest prompts in the middle of the run."""
    config = SimpleNamespace(max_model_len=1500)
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    monkeypatch.setattr(LlamaForCausalLM, "vllm_engine", engine, raising=False)
    arguments = ModelArguments(lora_rank=4, max_seq_length=1500)
    build_policy(model_source(tiny), arguments, "unsloth", 0, sequences=8)
    config.max_model_len = 1499
    with refused("--max_seq_length 1499"):
        build_policy(model_source(tiny), arguments, "unsloth", 0, sequences=8)


@pytest.mark.parametrize(
    ("lora_rank", "bf16", "dtype"), [(8, True, torch.bfloat16), (8, False, torch.float32), (0, True, torch.float32)]
)
def test_trained_weights_are_in_full_precision_on_a_gpu(
    lora_rank: int, bf16: bool, dtype: torch.dtype, gpu: None, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    """Every GPU emulates bfloat16, slowly."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    model, _ = build_policy(model_source(tiny), ModelArguments(lora_rank=lora_rank), "transformers", 0)
    assert model.get_input_embeddings().weight.dtype == dtype


@pytest.mark.parametrize(("bf16", "half"), [(True, torch.bfloat16), (False, torch.float16)])
def test_4_bits_are_loaded_on_the_gpu_of_the_process(
    bf16: bool, half: torch.dtype, gpu: None, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, **options: asked.append(options) or 1 / 0)
    with refused(f"cannot load model '{tiny}': division by zero"):
        load_base(model_source(tiny), load_in_4bit=True)
    [options] = asked
    config = options.pop("quantization_config")
    assert options == {
        "dtype": half,
        "device_map": {"": 1},
        "use_safetensors": True,
        "trust_remote_code": False,
        "local_files_only": True,
    }
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == config.bnb_4bit_quant_storage == half


def test_4_bits_without_a_gpu_are_refused(no_gpu: None, tiny: Path) -> None:
    with refused("--load_in_4bit needs a GPU and PyTorch sees none: set --load_in_4bit false"):
        load_base(model_source(tiny), load_in_4bit=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("Access to the gated repo is restricted."), "it is gated, accept its license on the Hub, then"),
        (ValueError("set trust_remote_code=True"), "it contains its own Python code, which is not executed"),
        (KeyError(), "'a/b': KeyError$"),
        (ValueError(f"{'x' * 300}y"), f"'a/b': {'x' * 300}$"),
        (ValueError("one\n  line. "), "'a/b': one line$"),
    ],
)
def test_why_a_model_is_not_loaded(error: Exception, said: str) -> None:
    found = why_not_loaded("a/b", error)
    assert isinstance(found, UsageError) and re.search(said, str(found)), found


# ---- files of other people ----


CONFIG = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}}
TOKENIZER = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", None]}}


def test_code_of_a_model_is_refused_without_a_question(model: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Transformers asks on the terminal whether to run it, unless it is told not to."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    (model / "custom_generate").mkdir()
    for name in ("theirs.py", "custom_generate/generate.py"):
        (model / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load_base(model_source(model))
    for name, change in (("tokenizer_config.json", TOKENIZER), ("config.json", CONFIG)):
        old = (model / name).read_text()
        edit(model / name, change)
        with refused("Python code"):
            load_base(model_source(model))
        (model / name).write_text(old)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1_000_000},
        {"num_hidden_layers": 1e6},
        {"num_local_experts": 1001},
        {"text_config": {"num_hidden_layers": 10**12}},
    ],
    ids=str,
)
def test_a_million_layers_are_refused_before_they_are_built(
    change: dict[str, Any], model: Path, unsloth: FakeUnsloth, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    edit(model / "config.json", change)
    for load in (load_base, shape_of, lambda source: build_policy(source, ModelArguments(), "unsloth", 0)):
        with refused(r"has num_\w+ 1,?0.*: expected at most 1,000"):
            load(model_source(model))


def test_a_merge_runs_no_code_of_a_model(model: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Even where a user has answered yes to Transformers' question."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    policy(model).save_pretrained(adapter := tmp_path / "adapter")
    load_base(model_source(model))[1].save_pretrained(adapter)
    for directory in (model, adapter):
        (directory / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    merge_adapter(adapter, tmp_path / "merged")
    for path, change in ((adapter / "tokenizer_config.json", TOKENIZER), (model / "config.json", CONFIG)):
        edit(path, change)
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "adapter_model.bin"])
def test_pickled_weights_are_refused_and_not_read(model: Path, tmp_path: Path, name: str) -> None:
    class Malicious:
        def __reduce__(self) -> tuple:
            return open, (str(tmp_path / "ran"), "w")

    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Malicious()))
    for load in (check_model_files, policy):
        with refused(f"{name} is a pickle"):
            load(model)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_is_no_fault_of_the_model() -> None:
    for error in (OSError(errno.ENOSPC, "No space left on device"), torch.OutOfMemoryError()):
        assert why_not_loaded("some/model", error) is error


def test_smollm2_without_the_hub_names_the_command_that_builds_it(tmp_path: Path, no_gpu: None) -> None:
    """With its preset as --config all settings are those of ``--model smol``."""
    error = OSError("We couldn't connect to 'https://huggingface.co'.")
    target = "outputs/SmolLM2-135M-Instruct"
    said = str(why_not_loaded("HuggingFaceTB/SmolLM2-135M-Instruct", error))
    assert f"huggingface.co'; `make {target}/model.safetensors` builds it" in said
    assert f"REAL_MODEL := {target}\n" in (ROOT / "Makefile").read_text()
    assert "make" not in str(why_not_loaded("some/model", error))
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    LlamaConfig(**shape, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True).save_pretrained(tmp_path)
    for method in ("gtpo", "grpo", "sft"):
        built = ["--model", str(tmp_path), "--config", str(CONFIGS / method / "smol.yaml")]
        settings = [
            parsed(*argv, "--output_dir", "run", method=method).to_dict() for argv in (["--model", "smol"], built)
        ]
        assert settings[0] | {"model": str(tmp_path)} == settings[1]


@pytest.mark.parametrize("reachable", [True, False])
def test_without_a_connection_only_the_cache_is_searched(reachable: bool, monkeypatch: MonkeyPatch) -> None:
    """huggingface_hub retries each request for half a minute, two lines on the screen for each attempt."""
    monkeypatch.setattr("gtpo.models.source.hub_is_reachable", lambda: reachable)
    assert model_source("some/model").options == {"local_files_only": not reachable}


def test_a_model_is_a_hub_id_or_absolute_path(tiny: Path, monkeypatch: MonkeyPatch) -> None:
    ids = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "some/model")
    assert tuple(model_source(name).base for name in ("llama", "qwen", "some/model")) == ids
    monkeypatch.chdir(tiny.parent)
    assert policy(Path(tiny.name)).peft_config["default"].base_model_name_or_path == str(tiny)


@pytest.mark.parametrize(
    "name", ["./nomodel", "/no/model", "a/b/c", "~/model", "../x", "qwenn", "https://me:pa/ss@host/model"]
)
def test_an_impossible_model_is_not_looked_up(name: str) -> None:
    with refused("--model") as caught:
        model_source(name)
    assert "pa/ss" not in str(caught.value)


def test_what_a_model_adds_to_sampling_is_named(model: Path, caplog: LogCaptureFixture) -> None:
    """What TRL overrides stays in the file, for those who use a saved model; token ids and lengths do too."""
    adds = {"min_new_tokens": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [5], "typical_p": 0.5}
    keeps = {"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20, "do_sample": True, "repetition_penalty": 1.05}
    write_json(model / "generation_config.json", adds | keeps)
    config = load_base(model_source(model))[0].generation_config.to_dict()
    assert config.items() >= keeps.items()
    assert not any(config.get(name) for name in adds)
    said = [text.partition(" adds ")[2] for text in caplog.messages if "generation_config.json" in text]
    assert said == [f"{name} {value}: left out of sampling" for name, value in adds.items()]
