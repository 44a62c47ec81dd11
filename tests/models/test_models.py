"""LoRA policies, and the errors before and during the loading of a model."""

import errno
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from helpers.files import read_json, write_json
from helpers.refusals import refused
from helpers.settings import parsed
from helpers.unsloth import FakeUnsloth
from helpers.weights import Weights, same_weights
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import AutoConfig, AutoModelForCausalLM

from gtpo.arguments import GTPOArguments, ModelArguments
from gtpo.files import fingerprint
from gtpo.models.hub import check_model_files
from gtpo.models.load import (
    build_policy,
    load_base,
    load_policy,
    resolve_model,
    sequences_of,
    source_options,
    why_not_loaded,
)
from gtpo.models.memory import shape_of
from gtpo.training.export import merge_adapter

# ---- LoRA policies ----


def policy(directory: Path, seed: int = 0, **settings: Any) -> Any:
    arguments = ModelArguments(model=str(directory), **({"lora_rank": 8} | settings))
    return build_policy(arguments, "transformers", seed)[0]


EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # the default: Listing 1


@pytest.mark.parametrize(
    ("names", "expected"), [(["q_proj", "v_proj"], ["q_proj", "v_proj"]), (["all-linear"], EVERY), (None, EVERY)]
)
def test_only_the_adapter_on_the_named_layers_is_trained(tiny: Path, names: Any, expected: list[str]) -> None:
    model = policy(tiny, **({"lora_target_modules": names} if names else {}))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained}
    assert adapted == {*expected}
    assert len(trained) == 2 * 2 * len(adapted)  # two layers, A and B
    lora = model.peft_config["default"]
    assert lora.r == lora.lora_alpha == 8 and lora.task_type == "CAUSAL_LM" and lora.lora_dropout == 0


def test_a_new_policy_is_the_base_by_its_seed(tiny: Path) -> None:
    torch.manual_seed(5)
    first = policy(tiny, seed=3)
    torch.manual_seed(6)
    second = policy(tiny, seed=3)
    other = policy(tiny, seed=4)

    def adapter(model: Any) -> Weights:
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    assert same_weights(adapter(first), adapter(second)) and not same_weights(adapter(first), adapter(other))
    ids = torch.arange(10, 40)[None]
    base, tokenizer = load_base(str(tiny))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, base(ids).logits)
    assert tokenizer.padding_side == "left" and base.dtype == torch.float32


@pytest.mark.parametrize(("backend", "said"), [("transformers", 1), ("unsloth", 0)])
def test_a_cpu_run_beside_a_gpu_says_so(
    backend: str, said: int, unsloth: FakeUnsloth, caplog: LogCaptureFixture
) -> None:
    load_policy(parsed("--model", "tiny", "--run_name", "x"), backend)
    lines = [line for line in caplog.messages if "--backend unsloth" in line]
    assert len(lines) == said and lines == caplog.messages[:said]  # the first line


# ---- errors ----


def test_a_base_padded_with_eos_gets_another_token(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    settings = read_json(tmp_path / "tokenizer_config.json")
    write_json(tmp_path / "tokenizer_config.json", settings | {"pad_token": "</s>"})
    _, tokenizer = load_base(str(tmp_path))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_an_unusable_tokenizer_is_refused_before_the_weights(model: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for template in ("{% if %}", "{{ raise_exception('no') }}"):
        (model / "chat_template.jinja").write_text(template)
        with refused(rf"--chat_template.*{model}.*Template(Syntax)?Error: "):
            load_base(str(model))


def test_unsloth_is_refused_where_only_eos_can_pad(unsloth: FakeUnsloth, model: Path) -> None:
    """Its masks take every EOS token for padding."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text().replace('"<pad>"', '"<end>"')
        (model / name).write_text(text)
    settings = read_json(model / "tokenizer_config.json")
    write_json(model / "tokenizer_config.json", settings | {"pad_token": "</s>"})
    with refused("--backend transformers"):
        build_policy(ModelArguments(model=str(model), lora_rank=8), "unsloth", 0)


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_completions_stop_at_the_end_of_a_turn(
    backend: str, unsloth: FakeUnsloth, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.models.load.end_of_turn", lambda tokenizer: 7)
    model, tokenizer = build_policy(ModelArguments(model=str(tiny), lora_rank=8), backend, 0)
    assert model.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, 7])


@pytest.mark.parametrize("sequences", [24, None])
def test_fast_inference_is_set_by_use_vllm(sequences: int | None, unsloth: FakeUnsloth, tiny: Path) -> None:
    arguments = ModelArguments(model=str(tiny), lora_rank=8, load_in_4bit=True, max_seq_length=99)
    model, tokenizer = build_policy(arguments, "unsloth", seed=5, sequences=sequences)
    assert unsloth.options["fast_inference"] is (sequences is not None)
    assert unsloth.options.get("max_num_seqs", "absent") == (sequences or "absent")
    expected = {"load_in_4bit": True, "max_seq_length": 99, "max_lora_rank": 8, "gpu_memory_utilization": 0.4, "r": 8}
    expected |= {"lora_alpha": 8, "random_state": 5, "use_gradient_checkpointing": "unsloth"}
    assert {name: unsloth.options[name] for name in expected} == expected
    # The adapter names the requested model, and beside it the 4-bit copy that Unsloth loads instead.
    config = model.peft_config["default"]
    assert config.base_model_name_or_path == str(tiny)
    copy = {"loaded_from": "unsloth/its-own-copy-bnb-4bit"}
    assert config.auto_mapping == copy | {"base_fingerprint": fingerprint(tiny)}
    assert tokenizer.pad_token != tokenizer.eos_token


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
        build_policy(ModelArguments(model=str(tiny), lora_rank=8), "unsloth", 0)


def test_a_shorter_engine_is_refused(unsloth: FakeUnsloth, tiny: Path) -> None:
    """Unsloth prints it and goes on; vLLM then refuses the longest prompts in the middle of the run."""
    load = unsloth.from_pretrained

    def with_engine(length: int) -> Any:
        def from_pretrained(**options: Any) -> tuple[Any, Any]:
            model, tokenizer = load(**options)
            config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))
            model.vllm_engine = SimpleNamespace(llm_engine=config)
            return model, tokenizer

        return from_pretrained

    arguments = ModelArguments(model=str(tiny), lora_rank=4, max_seq_length=1500)
    unsloth.from_pretrained = with_engine(1500)  # type: ignore[method-assign]
    build_policy(arguments, "unsloth", 0, sequences=8)
    unsloth.from_pretrained = with_engine(1499)  # type: ignore[method-assign]
    with refused("--max_seq_length 1499"):
        build_policy(arguments, "unsloth", 0, sequences=8)


@pytest.mark.parametrize(
    ("lora_rank", "bf16", "dtype"), [(8, True, torch.bfloat16), (8, False, torch.float32), (0, True, torch.float32)]
)
def test_trained_weights_are_in_full_precision_on_a_gpu(
    lora_rank: int, bf16: bool, dtype: torch.dtype, gpu: None, tiny: Path, monkeypatch: MonkeyPatch
) -> None:
    """Every GPU emulates bfloat16, slowly."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    model, _ = build_policy(ModelArguments(model=str(tiny), lora_rank=lora_rank), "transformers", 0)
    assert model.get_input_embeddings().weight.dtype == dtype


# ---- files of other people ----


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


def test_code_of_a_model_is_refused_without_a_question(model: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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
        write_json(model / name, json.loads(old) | change)
        with refused("Python code"):
            load_base(str(model))
        (model / name).write_text(old)
    assert not (tmp_path / "ran").exists()


# A stranger's config.json: what it names, and where.
HUGE = [
    {"num_hidden_layers": 1_000_000},
    {"num_hidden_layers": 1e6},
    {"num_local_experts": 1001},
    {"text_config": {"num_hidden_layers": 10**12}},
]


@pytest.mark.parametrize("change", HUGE, ids=str)
def test_a_million_layers_are_refused_before_they_are_built(
    change: dict[str, Any], model: Path, unsloth: FakeUnsloth, monkeypatch: MonkeyPatch
) -> None:
    for cls in (AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(cls, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    write_json(model / "config.json", json.loads((model / "config.json").read_text()) | change)
    loads = [load_base, shape_of, lambda path: build_policy(ModelArguments(model=path), "unsloth", 0)]
    for load in loads:
        with refused(r"has num_\w+ 1,?0.*: expected at most 1,000"):
            load(str(model))


def test_a_merge_runs_no_code_of_a_model(model: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Even where a user has answered yes to Transformers' question."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    policy(model).save_pretrained(adapter := tmp_path / "adapter")
    load_base(str(model))[1].save_pretrained(adapter)
    (model / "theirs.py").write_text(code := f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (adapter / "theirs.py").write_text(code)
    merge_adapter(adapter, str(model), tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    tokenizer = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", None]}}
    for path, change in (
        (adapter / "tokenizer_config.json", tokenizer),
        (model / "config.json", {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}}),
    ):
        write_json(path, json.loads(path.read_text()) | change)
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            merge_adapter(adapter, str(model), tmp_path / "merged")
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


def test_without_a_connection_only_the_cache_is_searched(monkeypatch: MonkeyPatch) -> None:
    """huggingface_hub retries each request for half a minute, two lines on the screen for each attempt."""

    class Session:
        def head(self, url: str, timeout: float) -> None:
            raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    assert source_options("some/model") == {"local_files_only": True}
    with refused("some/model"):
        load_base("some/model")
    monkeypatch.setattr(Session, "head", lambda *_, **__: None)
    assert source_options("some/model") == {"local_files_only": False}


def test_a_model_is_a_hub_id_or_absolute_path(tiny: Path, monkeypatch: MonkeyPatch) -> None:
    ids = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "some/model")
    assert tuple(map(resolve_model, ("llama", "qwen", "some/model"))) == ids
    monkeypatch.chdir(tiny.parent)
    assert resolve_model(tiny.name) == resolve_model(f"./{tiny.name}") == str(tiny)
    assert policy(Path(resolve_model(tiny.name))).peft_config["default"].base_model_name_or_path == str(tiny)


@pytest.mark.parametrize(
    "name", ["./nomodel", "/no/model", "a/b/c", "~/model", "../x", "qwenn", "https://me:pa/ss@host/model"]
)
def test_an_impossible_model_is_not_looked_up(name: str) -> None:
    with refused("--model") as caught:
        resolve_model(name)
    assert "pa/ss" not in str(caught.value)


def test_what_a_model_adds_to_sampling_is_named(tiny: Path, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    """What TRL overrides stays in the file, for those who use a saved model; token ids and lengths do too."""
    model = shutil.copytree(tiny, tmp_path / "model")
    adds = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "min_new_tokens": 4, "typical_p": 0.5}
    keeps = {"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20, "do_sample": True, "repetition_penalty": 1.05}
    write_json(model / "generation_config.json", adds | keeps)
    loaded, _ = load_base(str(model))
    config = loaded.generation_config
    assert [getattr(config, name) for name in adds] == [None] * 4
    assert {name: getattr(config, name) for name in keeps} == keeps
    said = [text.partition(" adds ")[2] for text in caplog.messages if "generation_config.json" in text]
    left_out = ["min_new_tokens 4", "no_repeat_ngram_size 3", "suppress_tokens [5]", "typical_p 0.5"]
    assert said == [f"{setting}: left out of sampling" for setting in left_out]
    caplog.clear()
    load_base(str(tiny))
    assert not [message for message in caplog.messages if "generation_config" in message]
