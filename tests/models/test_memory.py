"""The estimate of ``--dry_run`` against models built on the meta device and against published sizes."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import tables_of, write_settings
from helpers.refusals import refused
from helpers.settings import CLASSES, parsed
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gtpo.arguments import Settings
from gtpo.files import CONFIGS
from gtpo.models import memory
from gtpo.models.hub import TINY_BASE
from gtpo.models.memory import (
    GIB,
    GPUS,
    KNOWN,
    Shape,
    derived_micro_batch,
    describe_plan,
    estimate,
    fit,
    hours,
    saved_in_16_bits,
    scale_of,
    shape_of,
    verdict,
)
from gtpo.reports.summary import start_lines

TABLES = tables_of(__file__)


def settings_of(*argv: str, method: str = "gtpo", model: str = "llama") -> Settings:
    """The settings of a dry run, from the preset and the flags."""
    return parsed("--model", model, "--run_name", "x", "--dry_run", *argv, method=method)


def words_of(argv: str) -> list[str]:
    """Flags of a table, with the directory of the configs."""
    return argv.replace("CONFIGS", str(CONFIGS)).split()


ONE = ("--per_device_train_batch_size", "1")  # a micro-batch of one completion
SETTINGS = settings_of("--G", "12", "--load_in_4bit", "false", *ONE).to_dict()


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
    parts = estimate(shape, SETTINGS | {"lora_rank": rank})
    model = on_meta(shape)
    assert parts["weights"] * GIB == pytest.approx(2 * sum(p.numel() for p in model.parameters()), rel=2e-3)  # norms
    lora = LoraConfig(r=rank, target_modules=SETTINGS["lora_target_modules"])
    trained = sum(p.numel() for p in get_peft_model(model, lora).parameters() if p.requires_grad)
    assert parts["LoRA"] * GIB == parts["gradients"] * GIB == 4 * trained
    assert parts["optimizer"] * GIB == 2 * trained


def test_training_all_weights_needs_sixteen_bytes_a_parameter() -> None:
    shape = KNOWN["qwen"]
    settings = SETTINGS | {"lora_rank": 0, "backend": "transformers", "use_vllm": False, "optim": "adamw_torch"}
    parts = estimate(shape, settings)
    weights = sum(p.numel() for p in on_meta(shape).parameters())
    found = [parts[name] * GIB / weights for name in ("weights", "gradients", "optimizer", "LoRA")]
    assert found == pytest.approx([4, 4, 8, 0], rel=2e-3)  # norms are not counted
    assert "reference" not in parts and estimate(shape, settings | {"beta": 0.04})["reference"] == parts["weights"]


def test_llama_matches_published_sizes() -> None:
    parts = estimate(KNOWN["llama"], SETTINGS | {"load_in_4bit": True})
    assert parts["weights"] * GIB / 1e9 == pytest.approx(5.70, abs=0.02)  # the 4-bit checkpoint of the Hub: 5.7 GB
    assert parts["KV cache"] == pytest.approx(8.06, abs=0.01)  # 12 x 5,500 tokens of 128 KiB


@pytest.mark.parametrize(
    ("settings", "weights", "lora", "graphs"),
    TABLES["what_vllm_holds"],
)
def test_what_vllm_holds(
    settings: dict[str, Any], weights: float | None, lora: float | None, graphs: float | None
) -> None:
    parts = estimate(KNOWN["llama"], SETTINGS | settings)
    found = [parts.get(f"vLLM's {name}") for name in ("weights", "LoRA", "activations and graphs")]
    assert found == [size and pytest.approx(size, abs=0.01) for size in (weights, lora, graphs)]


def test_the_plan_is_a_config_of_its_settings(tmp_path: Path) -> None:
    """Of a run with a preset's own values, given values, derived ones, and those of another model than the preset's."""
    for argv in (
        ["--gamma", "0.25", "--G", "8", "--prompts_per_step", "2", "--eval_rows", "5", "--system_prompt", "none"],
        ["--backend", "transformers", "--use_vllm", "false", "--reward", "format", "--save_steps", "0.25"],
    ):
        settings = settings_of(*argv)
        (tmp_path / "run.yaml").write_text(describe_plan(settings, rows=10))
        again = parsed("--config", str(tmp_path / "run.yaml"), "--dry_run")
        assert again.to_dict() == settings.to_dict()
        assert settings.changed_settings().keys() < {*settings.to_dict()} and len(settings.changed_settings()) <= 9


@pytest.mark.parametrize(("argv", "expected"), TABLES["hours"])
def test_hours_of_a_run_and_of_a_collapse(argv: str, expected: list[str]) -> None:
    steps = 7500 if "math" in argv else 7473
    lines = hours(settings_of(*words_of(argv), "--max_steps", str(steps)), steps)
    text = lines[0]
    assert re.findall(r"(?<![A-Z])\b[\d.]+\b", text)[:3] == expected
    assert ("not known" in text) == (len(expected) == 2)
    plan = describe_plan(settings_of(*words_of(argv), "--max_steps", str(steps)), 0)
    assert "".join(f"# hours: {line}\n" for line in lines) in plan


@pytest.mark.parametrize(("argv", "expected"), TABLES["hours_on_an_h100"])
def test_the_hours_on_an_h100_by_its_measured_step(argv: str, expected: list[str] | None) -> None:
    lines = hours(settings_of(*words_of(argv)), 7473)[1:]
    assert (re.findall(r"\b\d+\.\d\b", lines[0]) if lines else None) == expected
    assert not lines or "on an H100" in lines[0]


@pytest.mark.parametrize(("argv", "size", "expected"), TABLES["saved_in_16_bits"])
def test_what_16_bits_would_save(argv: str, size: float, expected: list[str] | None) -> None:
    """Hours saved, and in 4 bits."""
    text = saved_in_16_bits(settings_of(*words_of(argv)), size)
    assert (re.findall(r"\b\d+\.\d\b", text) if text else None) == expected


@pytest.mark.parametrize(
    ("argv", "size", "words"),
    TABLES["what_does_not_fit_and_what_it_would_take"],
)
def test_what_does_not_fit_and_what_it_would_take(argv: tuple[str, ...], size: float, words: str | None) -> None:
    found = verdict(KNOWN["llama"], settings_of("--G", "12", *ONE, *argv).to_dict(), size, size)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize(
    ("gpu", "rows", "held", "share"),
    [
        # 0.4 x 22.1 - 5.31 - 1.25 - 1.28 = 1.00 GiB for completions of 0.67; all: 15.9 GiB, 0.72 of 22.1
        ("24 GB (L4)", 6, "1 of 12", "0.72"),
        ("40 GB (A100)", 12, "11 of 12", "0.41"),
        ("80 GB (A100, H100)", 12, "12 of 12", None),
    ],
)
def test_what_fits_a_gpu(gpu: str, rows: int, held: str, share: str | None) -> None:
    text = fit(KNOWN["llama"], settings_of("--G", "12").to_dict(), GPUS[gpu])
    assert f"--per_device_train_batch_size up to {rows};" in text and f" {held} " in text
    assert re.findall(r"--gpu_memory_utilization ([\d.]+)", text) == ([share] if share else [])


@pytest.mark.parametrize(("argv", "gib", "rows"), TABLES["micro_batch"])
def test_the_micro_batch_is_as_large_as_fits(argv: str, gib: float | None, rows: int, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: gib)
    settings = settings_of(*words_of(argv))
    assert settings.trainer.per_device_train_batch_size == rows
    line = f"# micro-batch: {rows} of {settings.completions_per_step}"
    assert line + ("\n" if gib else ", planned for 80 GB (A100, H100)\n") in describe_plan(settings, 10)


def test_the_micro_batch_of_several_processes_divides_their_share(monkeypatch: MonkeyPatch) -> None:
    """Of 12 completions two processes have 6 each; of 24 three have 8, of which a group of 12 has 4."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 79.1)
    values = settings_of("--backend", "transformers").to_dict()
    assert [derived_micro_batch(values, processes) for processes in (1, 2, 12)] == [12, 6, 1]
    assert derived_micro_batch(values | {"prompts_per_step": 2}, 3) == 4


def test_without_an_estimate_a_micro_batch_is_one(tmp_path: Path) -> None:
    MixtralConfig().save_pretrained(tmp_path)
    assert derived_micro_batch(SETTINGS | {"model": str(tmp_path)}, 1) == 1


def test_a_micro_batch_is_stored_and_kept_on_resume(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Of a run that was started on a smaller GPU, or before the micro-batch was derived."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 24.0)
    stored = settings_of().to_dict()
    assert (stored["per_device_train_batch_size"], stored["gradient_accumulation_steps"]) == (6, 2)
    monkeypatch.setattr(memory, "gpu_memory", lambda: 79.1)
    for size in (6, 1):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 12 // size}
        write_settings(tmp_path / "config.yaml", stored | sizes | {"output_dir": str(tmp_path)})
        again = parsed("--resume", str(tmp_path), "--dry_run").to_dict()
        assert {name: again[name] for name in sizes} == sizes


def test_a_plan_lists_the_gpus_or_this_machine(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: 24.0)
    lines = comments(describe_plan(settings_of("--G", "12"), rows=10))
    listed = [line.split(": ")[0] for line in lines if line.startswith("#   ")][1:]
    assert listed == ["#   this machine, 24.0 GiB", *(f"#   {name}" for name in GPUS)]
    small = []
    large = []
    for size, found in ((0.5, small), (64.0, large)):
        monkeypatch.setattr(memory, "_host_memory", lambda size=size: size)
        found += comments(describe_plan(settings_of(model="tiny"), rows=10))
    assert "# host memory: 1.8 GiB" in "".join(small) and "vLLM" not in "".join(small)
    assert small[-2].endswith("fits, with --per_device_train_batch_size up to 8") and large[-2].endswith("up to 48")


def test_the_disk_of_a_plan(tmp_path: Path) -> None:
    def disk(*argv: str) -> list[str]:
        return [line for line in comments(describe_plan(settings_of(*argv), rows=10)) if "disk" in line]

    assert disk("--max_steps", "1001", "--save_total_limit", "2") == ["# disk: 2 checkpoints of 2.0 GB, 4.0 GB in all"]
    assert disk("--max_steps", "1000", "--save_steps", "0.1")[0].startswith("# disk: 10 checkpoints of 2.0 GB, 20.1 GB")
    assert disk("--save_strategy", "no") == []


def test_steps_follow_max_steps_or_epochs() -> None:
    four = ("--prompts_per_step", "4")
    assert "10 steps of 4 prompts x 12" in describe_plan(settings_of(*four, "--max_steps", "10"), rows=100)
    assert "75 steps of 4 prompts" in describe_plan(settings_of(*four, "--num_train_epochs", "3"), rows=100)


def test_the_shape_of_a_local_model_is_read(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo.models.memory.hub_is_reachable", lambda: False)
    assert shape_of(str(tiny)) == Shape(AutoConfig.from_pretrained(tiny).vocab_size, 160, 480, 2, 4, 4, 40, tied=False)
    assert shape_of("meta-llama/Llama-3.1-8B-Instruct") is KNOWN["llama"]
    vocabulary = AutoConfig.from_pretrained(TINY_BASE).vocab_size
    assert shape_of(str(TINY_BASE)) == dataclasses.replace(KNOWN["tiny"], vocab_size=vocabulary)
    for config in (None, GPT2Config(), MixtralConfig()):
        if config:
            config.save_pretrained(tmp_path)
        with refused(config.model_type if config else "config"):
            shape_of(str(tmp_path))
    with refused("owner/name"):
        shape_of("owner/name")


def test_a_model_has_the_scale_of_its_config(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Parameters without the embeddings, and the context; what has no estimate has a context."""
    monkeypatch.setattr("gtpo.models.memory.hub_is_reachable", lambda: False)
    tiny = scale_of(str(TINY_BASE))
    assert tiny[0] == KNOWN["tiny"].projections
    assert scale_of("owner/name") == scale_of(str(tmp_path)) == (math.inf, math.inf)
    for config, context in ((GPT2Config(n_positions=512), 512), (MixtralConfig(max_position_embeddings=4096), 4096)):
        config.save_pretrained(tmp_path)
        assert scale_of(str(tmp_path)) == (math.inf, context)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("gtpo", "learning rate 1e-06, Adam 0.999999 / 0.999999, beta 0, G 8, completions to 1500 tokens"),
        ("grpo", "learning rate 1e-06, Adam 0.9 / 0.95, beta 1e-06, G 8, completions to 1500 tokens"),
        ("sft", "learning rate 1e-06, Adam 0.9 / 0.95, sequences of at most 5500 tokens"),
    ],
)
def test_plan_and_start_show_the_same_settings(method: str, expected: str) -> None:
    settings = settings_of(*(["--G", "8"] if method != "sft" else []), method=method)
    assert f"# {expected}\n" in describe_plan(settings, 10)
    assert start_lines(settings, 10, 10)[-1] == expected


PRESETS = [(path.parent.name, path.stem) for method in CLASSES for path in sorted((CONFIGS / method).glob("*.yaml"))]
PRESETS += [(method, "own") for method in CLASSES]


@pytest.mark.parametrize(("method", "model"), PRESETS)
def test_every_preset_has_a_plan(method: str, model: str, tiny: Path) -> None:
    """SFT too, which has a maximum length in place of completions, and no KV cache."""
    model = {"own": str(tiny), "quick": "llama"}.get(model, model)
    settings = settings_of(method=method, model=model)
    text = describe_plan(settings, rows=1000)
    assert " memory: " in text
    assert (estimate(shape_of(model), settings.to_dict())["KV cache"] > 0) == (method != "sft")


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_the_table_of_the_documentation_has_the_estimates(model: str) -> None:
    text = (CONFIGS.parent / "docs" / "gpu.md").read_text()
    (row,) = re.findall(rf"^\| {model} \| (.+) \|$", text, re.MULTILINE)
    columns = (("weights",), ("LoRA", "gradients", "optimizer"), ("activations", "head"), ("KV cache",))
    columns += (("vLLM's LoRA",), ("vLLM's activations and graphs",))
    parts = estimate(KNOWN[model], settings_of(*ONE, model=model).to_dict())
    assert {name for names in columns for name in names} == parts.keys()
    sizes = [sum(parts[name] for name in names) for names in columns]
    assert [float(cell) for cell in row.split(" | ")] == pytest.approx(sizes, abs=0.06)
    listed = rf"--model {model} .* ([\d.]+) GiB: vLLM ([\d.]+), training ([\d.]+),"
    (total, engine, training) = re.findall(listed, text)[0]
    vllm = sizes[0] + sum(sizes[3:])
    assert (float(total), float(engine)) == pytest.approx((sum(sizes), vllm), abs=0.06)
    assert float(training) == pytest.approx(sum(sizes) - vllm, abs=0.06)
