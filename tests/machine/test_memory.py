"""The estimate of ``--dry_run`` against models built on the meta device and against published sizes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gtpo.arguments import (
    DataArguments,
    GTPOArguments,
    ModelArguments,
    PromptArguments,
    RewardArguments,
    RunArguments,
    Settings,
)
from gtpo.cli.parse import parse
from gtpo.errors import UsageError
from gtpo.files import CONFIGS
from gtpo.machine.memory import GIB, KNOWN, Shape, describe_plan, estimate, shape_of
from gtpo.machine.workload import Workload
from gtpo.models.tiny import TINY_BASE

SETTINGS: dict[str, Any] = {
    "model": "llama",
    "backend": "auto",
    "gpu_memory_utilization": 0.4,
    "bf16": True,
    "fp16": False,
    "load_in_4bit": False,
    "lora_rank": 128,
    "lora_target_modules": list(KNOWN["llama"].linear()),
    "optim": "paged_adamw_8bit",
    "max_prompt_length": 4000,
    "max_completion_length": 1500,
    "max_seq_length": 5500,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 12,
    "gradient_checkpointing": True,
    "num_generations": 12,
    "use_vllm": True,
}
OURS = (DataArguments, PromptArguments, ModelArguments, RunArguments)
CLASSES = {
    "gtpo": (*OURS, RewardArguments, GTPOArguments, trl.GRPOConfig),
    "grpo": (*OURS, RewardArguments, trl.GRPOConfig),
    "sft": (*OURS, trl.SFTConfig),
}


def estimated(shape: Shape, settings: dict[str, Any]) -> dict[str, float]:
    return estimate(shape, Workload.of(settings))


def settings_of(*argv: str, method: str = "gtpo", model: str = "llama") -> Settings:
    """The settings of a dry run, from the preset and the flags."""
    return parse(method, CLASSES[method], ["--model", model, "--run_name", "x", "--dry_run", *argv])


def comments(text: str) -> list[str]:
    """The lines of the plan; the settings stand above them."""
    return [line for line in text.splitlines() if line.startswith("# ")]


def on_meta(shape: Shape) -> Any:
    """The Transformers model of this shape on the meta device."""
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes)) if not shape.tied else Qwen2ForCausalLM(Qwen2Config(**sizes))


@pytest.mark.parametrize(("name", "rank"), [("llama", 128), ("qwen", 64), ("tiny", 32)])
def test_weights_and_adapter_match_the_built_model(name: str, rank: int) -> None:
    shape = KNOWN[name]
    parts = estimated(shape, SETTINGS | {"lora_rank": rank})
    model = on_meta(shape)
    assert parts["weights"] * GIB == pytest.approx(2 * sum(p.numel() for p in model.parameters()), rel=2e-3)  # norms
    lora = LoraConfig(r=rank, target_modules=SETTINGS["lora_target_modules"])
    trained = sum(p.numel() for p in get_peft_model(model, lora).parameters() if p.requires_grad)
    assert parts["LoRA"] * GIB == parts["gradients"] * GIB == 4 * trained
    assert parts["optimizer"] * GIB == 2 * trained


def test_training_all_weights_needs_them_their_gradients_and_two_moments_in_float32() -> None:
    shape = KNOWN["qwen"]
    settings = SETTINGS | {"lora_rank": 0, "backend": "transformers", "use_vllm": False, "optim": "adamw_torch"}
    parts = estimated(shape, settings)
    weights = sum(p.numel() for p in on_meta(shape).parameters())
    found = [parts[name] * GIB / weights for name in ("weights", "gradients", "optimizer", "LoRA")]
    assert found == pytest.approx([4, 4, 8, 0], rel=2e-3)  # norms are not counted
    assert "reference" not in parts and estimated(shape, settings | {"beta": 0.04})["reference"] == parts["weights"]


def test_llama_matches_published_sizes() -> None:
    parts = estimated(KNOWN["llama"], SETTINGS | {"load_in_4bit": True})
    assert parts["weights"] * GIB / 1e9 == pytest.approx(5.70, abs=0.02)  # the 4-bit checkpoint of the Hub: 5.7 GB
    assert parts["KV cache"] == 12 * 5500 * 128 * 1024 / GIB  # 128 KiB per token
    assert parts["head"] == (2 * 1500 * 4096 * 2 + 3 * 4 * 1500 * 16384) / GIB


def test_vllm_holds_lora_slots_a_copy_of_the_adapter_activations_and_graphs() -> None:
    """Slots of all seven projections and a copy of the trained ones, 16 bits each."""
    widths = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3
    parts = estimated(KNOWN["llama"], SETTINGS)
    assert parts["vLLM's LoRA"] == 2 * (32 * 128 * widths) * 2 / GIB == 1.25
    one = estimated(KNOWN["llama"], SETTINGS | {"lora_target_modules": ["q_proj"]})
    assert one["vLLM's LoRA"] == (32 * 128 * widths + 32 * 128 * 8192) * 2 / GIB
    assert parts["vLLM's activations and graphs"] == 8192 * (3 * 14336 + 2 * 4096) * 2 / GIB + 0.5  # 1.28 GiB
    for without, part in (
        ({"use_vllm": False}, "vLLM's LoRA"),
        ({"use_vllm": False}, "vLLM's activations and graphs"),
        ({"backend": "transformers"}, "vLLM's LoRA"),  # TRL merges the adapter
        ({"vllm_mode": "server"}, "vLLM's activations and graphs"),  # on another GPU
    ):
        assert part not in estimated(KNOWN["llama"], SETTINGS | without)


def test_unsloth_offloads_the_hidden_states_between_the_layers() -> None:
    hidden, layer = 5500 * 4096 * 2, 5500 * 2 * (2 * 4096 + 4096 * 2 + 1024 * 2 + 14336 * 2 + 4096)
    plain = estimated(KNOWN["llama"], SETTINGS | {"backend": "transformers"})["activations"]
    assert plain == (32 * hidden + 2 * layer) / GIB
    assert estimated(KNOWN["llama"], SETTINGS)["activations"] == (2 * hidden + 2 * layer) / GIB
    short = SETTINGS | {"max_seq_length": 500, "max_prompt_length": 300, "max_completion_length": 200}
    ratio = 500 / 5500  # below 512 tokens Unsloth keeps them
    assert estimated(KNOWN["llama"], short)["activations"] == pytest.approx(ratio * plain)


def test_each_part_scales_with_its_settings() -> None:
    base = estimated(KNOWN["llama"], SETTINGS)
    changes: list[tuple[dict[str, Any], str, float]] = [
        ({"optim": "adamw_torch"}, "optimizer", 4.0),
        ({"bf16": False}, "weights", 2.0),
        ({"backend": "transformers"}, "weights", 2.0),
        ({"num_generations": 24, "gradient_accumulation_steps": 24}, "KV cache", 2.0),
        ({"per_device_train_batch_size": 2}, "activations", 2.0),
        ({"lora_rank": 64}, "LoRA", 0.5),
        ({"lora_target_modules": ["all-linear"]}, "LoRA", 1.0),
        ({"lora_target_modules": ["q_proj"]}, "LoRA", 2 * 4096 / sum(map(sum, KNOWN["llama"].linear().values()))),
    ]
    for change, part, factor in changes:
        assert estimated(KNOWN["llama"], SETTINGS | change)[part] == pytest.approx(factor * base[part]), change
    assert (
        estimated(KNOWN["llama"], SETTINGS | {"gradient_checkpointing": False})["activations"] > 5 * base["activations"]
    )


def test_the_tiny_shape_is_that_of_the_tiny_model() -> None:
    tiny = KNOWN["tiny"]
    config = json.loads((TINY_BASE / "config.json").read_text())
    shape = {"hidden_size": tiny.hidden_size, "num_attention_heads": tiny.heads}
    shape |= {"intermediate_size": tiny.intermediate_size, "num_hidden_layers": tiny.layers}
    assert config.items() >= shape.items()
    assert 0 <= tiny.vocab_size - config["vocab_size"] <= 2


def test_lines_of_the_plan() -> None:
    settings = settings_of()
    text = describe_plan(settings, rows=7473, gpus=[("A100", 39.4), ("T4", 14.6)])
    assert yaml.safe_load(text) == settings.to_dict()  # all of it is YAML: the plan is written as comments
    lines = comments(text)
    assert lines[0] == "# 7,473 training rows, 7,473 steps of 1 prompt(s) x 12 completion(s) per process"
    assert lines[1] == "# at most 135 million generated tokens per process"  # 7473 x 12 x 1500
    # 460 tokens at 47 ms and 12 micro-batches of 0.8 s are 31.2 s
    assert lines[2] == "# 32 to 65 hours on an A100, an estimate (configs/experiments.yaml)"
    assert "weights 5.31, LoRA 1.25, gradients 1.25, optimizer 0.62, KV cache 8.06" in lines[3]
    # (15.76 - 5.31 - 1.25 - 1.28) / 0.67 = 11.8
    assert lines[5].startswith("# A100: vLLM reserves 40 % (16 GiB): weights and KV cache for 11 of 12 completions")
    assert lines[5].endswith(": fits")
    assert lines[6].startswith("# T4: vLLM reserves 40 % (6 GiB): weights and KV cache for 0 of 12 ")
    assert lines[6].endswith("does not fit")
    assert lines[7] == "# largest --per_device_train_batch_size that fits: 12 (A100)"
    *_, small, largest = comments(describe_plan(settings, 1, [("A", 24.0)]))
    # 60 % are 14.4 GiB: 3.1 for LoRA, gradients and optimizer, 1.13 per completion, under 1 for the head
    assert largest == "# largest --per_device_train_batch_size that fits: 6 (A)"
    assert small.endswith(
        "(10 GiB): weights and KV cache for 2 of 12 completions; training adds 4.6 GiB: fits"
    )  # (9.6 - 5.31 - 1.25 - 1.28) / 0.67 = 2.6
    (small,) = comments(describe_plan(settings_of("--load_in_4bit", "false"), rows=1, gpus=[("T4", 14.6)]))[4:]
    assert small.endswith("does not fit")  # 15 GiB of 16-bit weights


@pytest.mark.parametrize(("gpu", "rows"), [(24.0, 6), (40.0, 12)])
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(gpu: float, rows: int) -> None:
    """Beside vLLM's share, which has weights and KV cache: the training parts at each divisor of G = 12."""
    shared = ("weights", "KV cache", "vLLM's LoRA", "vLLM's activations and graphs")
    text = describe_plan(settings_of(), rows=1, gpus=[("A", gpu)])
    assert f"that fits: {rows} (A)" in text
    for batch in (1, 2, 3, 4, 6, 12):
        batches = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 12 // batch}
        parts = estimated(KNOWN["llama"], SETTINGS | {"load_in_4bit": True} | batches)
        training = sum(size for name, size in parts.items() if name not in shared)
        assert (training < 0.6 * gpu) == (batch <= rows)


def test_the_lines_of_the_plan_come_first() -> None:
    text = describe_plan(settings_of(), rows=10, gpus=[("A100", 39.4)])
    assert text.startswith("# 10 training rows") and text.index("fits") < text.index("\nadam_beta1:")


def test_a_plan_for_a_cpu_compares_with_its_memory() -> None:
    settings = settings_of(model="tiny")
    small, large = (comments(describe_plan(settings, rows=10, gpus=[], host=host)) for host in (0.5, 64.0))
    assert small[2].startswith("# host memory at the maximum lengths") and "vLLM" not in "".join(small)
    assert small[-1].startswith("# this machine: 0.5 GiB: may not fit: WARNING, lower --per_device_train_batch_size")
    assert large[-1] == "# this machine: 64.0 GiB: fits"


def test_a_plan_of_a_large_model_without_a_gpu_says_what_it_is_for() -> None:
    settings = settings_of()
    first = comments(describe_plan(settings, rows=10, gpus=[]))[0]
    assert first == "# planned for a machine with a GPU: this one has none, and train_gtpo.py stops here"
    assert "planned for" not in describe_plan(settings, rows=10, gpus=[("A100", 39.4)])


def test_a_model_of_the_hub_is_refused_at_once_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo.machine.memory.hub_is_reachable", lambda: False)
    with pytest.raises(UsageError, match=r"owner/name is not in the cache of the Hub .* and the Hub cannot be reached"):
        shape_of("owner/name")


def test_vllm_has_its_own_copy_of_the_weights_where_trl_syncs_them() -> None:
    parts = estimated(KNOWN["llama"], SETTINGS | {"backend": "transformers", "use_vllm": True})
    assert parts["vLLM's weights"] == pytest.approx(parts["weights"] / 2)  # bfloat16 beside float32
    assert "vLLM's weights" not in estimated(KNOWN["llama"], SETTINGS | {"backend": "unsloth", "use_vllm": True})


def test_steps_follow_max_steps_or_epochs() -> None:
    four = ("--prompts_per_step", "4")
    assert "10 steps of 4 prompt(s) x 12" in describe_plan(settings_of(*four, "--max_steps", "10"), rows=100)
    assert "75 steps of 4 prompt(s)" in describe_plan(settings_of(*four, "--num_train_epochs", "3"), rows=100)


def test_the_shape_of_a_local_model_is_read_and_a_missing_config_refused(tiny: Path, tmp_path: Path) -> None:
    assert shape_of(str(tiny)) == Shape(AutoConfig.from_pretrained(tiny).vocab_size, 160, 480, 2, 4, 4, 40, tied=False)
    with pytest.raises(UsageError, match="cannot read the config"):
        shape_of(str(tmp_path))
    assert shape_of("meta-llama/Llama-3.1-8B-Instruct") is KNOWN["llama"]


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    for config in (GPT2Config(), MixtralConfig()):
        config.save_pretrained(tmp_path)
        with pytest.raises(UsageError, match=r"\((gpt2|mixtral)\) is not a dense Llama-like model"):
            shape_of(str(tmp_path))


def test_no_part_is_negative_at_short_lengths() -> None:
    sft = {key: value for key, value in SETTINGS.items() if key not in ("max_completion_length", "num_generations")}
    for length in (100, None):
        assert all(size >= 0 for size in estimated(KNOWN["llama"], sft | {"max_length": length}).values())


PRESETS = [(path.parent.name, path.stem) for method in CLASSES for path in sorted((CONFIGS / method).glob("*.yaml"))]


@pytest.mark.parametrize(("method", "model"), PRESETS)
def test_every_preset_has_a_plan(method: str, model: str, tiny: Path) -> None:
    """SFT too, which has a maximum length in place of completions, and no KV cache."""
    text = describe_plan(settings_of(method=method, model=str(tiny) if model == "cpu" else model), rows=1000)
    assert "# total " in text
    assert ("KV cache 0.00" in text) == (method == "sft")


def test_trls_vllm_holds_weights_of_16_bits_and_not_the_float32_base() -> None:
    """32 GiB for vLLM minus 15 GiB of weights leave room for 12 completions of 0.67 GiB; minus 30 GiB for 3."""
    settings = settings_of("--backend", "transformers")
    last = comments(describe_plan(settings, rows=1, gpus=[("H", 80.0)]))[-2]
    assert last.startswith("# H: vLLM") and "12 of 12 completions" in last


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_the_table_of_the_documentation_has_the_estimates(model: str) -> None:
    text = (CONFIGS.parent / "docs" / "gpu.md").read_text()
    (row,) = re.findall(rf"^\| {model} \| (.+) \|$", text, re.MULTILINE)
    columns = (("weights",), ("LoRA", "gradients", "optimizer"), ("activations", "head"), ("KV cache",))
    columns += (("vLLM's LoRA",), ("vLLM's activations and graphs",))
    parts = estimated(KNOWN[model], settings_of(model=model).to_dict())
    assert {name for names in columns for name in names} == parts.keys()
    sizes = [sum(parts[name] for name in names) for names in columns]
    assert [float(cell) for cell in row.split(" | ")] == pytest.approx(sizes, abs=0.06)
    listed = rf"--model {model} .* ([\d.]+) GiB: vLLM ([\d.]+), training ([\d.]+),"
    (total, engine, training) = re.findall(listed, text)[0]
    vllm = sizes[0] + sum(sizes[3:])
    assert (float(total), float(engine)) == pytest.approx((sum(sizes), vllm), abs=0.06)
    assert float(training) == pytest.approx(sum(sizes) - vllm, abs=0.06)
