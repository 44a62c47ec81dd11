"""The estimate of ``--dry_run`` against models built on the meta device and against published sizes."""

import math
import re
from dataclasses import replace
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
    TrainerState,
)
from trl.trainer.utils import RepeatSampler

from gtpo.arguments import Settings
from gtpo.files import CONFIGS
from gtpo.models import memory
from gtpo.models.hours import hours, saved_in_16_bits, steps_of
from gtpo.models.hub import TINY_BASE
from gtpo.models.memory import GIB, derived_micro_batch, estimate, verdict
from gtpo.models.plan import describe_plan
from gtpo.models.shape import KNOWN, Shape, known_shape, scale_of, shape_of
from gtpo.models.source import ModelSource, model_source
from gtpo.reports.summary import start_lines

TABLES = tables_of(__file__)


def settings_of(flags: str = "", method: str = "gtpo", model: str = "llama") -> Settings:
    """The settings of a dry run, from the preset and the flags, in which CONFIGS is the directory of the configs."""
    words = flags.replace("CONFIGS", str(CONFIGS)).split()
    return parsed("--model", model, "--run_name", "x", "--dry_run", *words, method=method)


ONE = "--per_device_train_batch_size 1"  # a micro-batch of one completion
SETTINGS = settings_of(f"--G 12 --load_in_4bit false {ONE}").to_dict()


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
        return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.mark.parametrize(("name", "rank"), [("llama", 128), ("qwen", 64)])
def test_weights_and_adapter_match_the_built_model(name: str, rank: int) -> None:
    shape = replace(KNOWN[name], layers=3)
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
    weights = (shape.projections + shape.embeddings) / GIB
    assert [parts[name] / weights for name in ("weights", "gradients", "optimizer", "LoRA")] == [4, 4, 8, 0]
    assert "reference" not in parts and estimate(shape, settings | {"beta": 0.04})["reference"] == parts["weights"]


def test_llama_matches_published_sizes() -> None:
    parts = estimate(KNOWN["llama"], SETTINGS | {"load_in_4bit": True})
    assert parts["weights"] * GIB / 1e9 == pytest.approx(5.70, abs=0.02)  # the 4-bit checkpoint of the Hub: 5.7 GB
    assert parts["KV cache"] == pytest.approx(8.06, abs=0.01)  # 12 x 5,500 tokens of 128 KiB


@pytest.mark.parametrize(("settings", "expected"), TABLES["what_vllm_holds"])
def test_what_vllm_holds(settings: dict[str, Any], expected: dict[str, float]) -> None:
    parts = estimate(KNOWN["llama"], SETTINGS | settings)
    found = {name: size for name, size in parts.items() if "vLLM" in name}
    assert found == {f"vLLM's {name}": pytest.approx(size, abs=0.01) for name, size in expected.items()}


def test_the_plan_is_a_config_of_its_settings(tmp_path: Path) -> None:
    """Of a run with a preset's own values, given values, derived ones, and those of another model than the preset's."""
    for flags in (
        "--gamma 0.25 --G 8 --prompts_per_step 2 --eval_rows 5 --system_prompt none",
        "--backend transformers --use_vllm false --reward format --save_steps 0.25",
    ):
        settings = settings_of(flags)
        (tmp_path / "run.yaml").write_text(describe_plan(settings, rows=10))
        again = parsed("--config", str(tmp_path / "run.yaml"), "--dry_run")
        assert again.to_dict() == settings.to_dict()
        assert len(settings.changed_settings()) <= 9


@pytest.mark.parametrize(("flags", "expected"), TABLES["hours"])
def test_hours_of_a_run_and_of_a_collapse(flags: str, expected: str) -> None:
    settings = settings_of(flags)
    found = hours(settings, settings.trainer.max_steps)
    assert re.search(expected, found) and f"# hours: {found}\n" in describe_plan(settings, 0)


@pytest.mark.parametrize(("flags", "steps"), TABLES["steps"])
def test_steps_are_those_of_trl(flags: str, steps: int) -> None:
    """Of the batches that its sampler draws from 10 rows."""
    settings = settings_of(flags)
    args = settings.trainer
    drawn = RepeatSampler(
        range(10),
        mini_repeat_count=args.num_generations,
        batch_size=args.generation_batch_size // args.num_generations,
        repeat_count=args.num_iterations * args.steps_per_generation,
    )
    batches = len(drawn) / (args.per_device_train_batch_size * args.steps_per_generation)
    assert steps_of(settings, 10) == args.num_train_epochs * batches / args.gradient_accumulation_steps == steps
    assert f"10 training rows, {steps} steps of " in describe_plan(settings, 10)


@pytest.mark.parametrize(("flags", "size", "expected"), TABLES["saved_in_16_bits"])
def test_what_16_bits_would_save(flags: str, size: float, expected: list[str] | None) -> None:
    """Hours saved, and in 4 bits."""
    text = saved_in_16_bits(settings_of(flags), size)
    assert (re.findall(r"\b\d+\.\d\b", text) if text else None) == expected


@pytest.mark.parametrize(("flags", "size", "words"), TABLES["what_does_not_fit_and_what_it_would_take"])
def test_what_does_not_fit_and_what_it_would_take(flags: str, size: float, words: str | None) -> None:
    found = verdict(KNOWN["llama"], settings_of(f"--G 12 {ONE} {flags}").to_dict(), size, size)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize(("flags", "gib", "rows"), TABLES["micro_batch"])
def test_the_micro_batch_is_as_large_as_fits(
    flags: str, gib: float | None, rows: int, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: gib)
    settings = settings_of(flags)
    assert settings.trainer.per_device_train_batch_size == rows
    plan = describe_plan(settings, 10)
    assert f"# micro-batch: {rows} of {settings.completions_per_step}\n" in plan
    assert (f"# this machine, {gib} GiB: " if gib else "# an A100 or H100 of 80 GB, 79.1 GiB: fits\n") in plan


def test_the_micro_batch_of_several_processes_divides_their_share(monkeypatch: MonkeyPatch) -> None:
    """Of 12 completions two processes have 6 each; of 24 three have 8, of which a group of 12 has 4."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 79.1)
    values = settings_of("--backend transformers").to_dict()
    shape = KNOWN["llama"]
    assert [derived_micro_batch(shape, values, processes) for processes in (1, 2, 12)] == [12, 6, 1]
    assert derived_micro_batch(shape, values | {"prompts_per_step": 2}, 3) == 4


def test_a_micro_batch_is_stored_and_kept_on_resume(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Of a run that was started on a smaller GPU."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 24.0)
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    stored = settings_of().to_dict()
    assert stored.items() >= sizes.items()
    monkeypatch.setattr(memory, "gpu_memory", lambda: 79.1)
    write_settings(tmp_path / "config.yaml", stored | {"output_dir": str(tmp_path)})
    assert parsed("--resume", str(tmp_path), "--dry_run").to_dict().items() >= sizes.items()


@pytest.mark.parametrize(("size", "words"), [(1.5, "need 1.8 GiB: lower --max_seq_length"), (64.0, "fits")])
def test_a_plan_for_a_cpu_is_for_its_memory(size: float, words: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_memory", lambda: size)
    plan = describe_plan(settings_of(model="tiny"), rows=10)
    assert "# memory: 1.8 GiB" in plan and "vLLM" not in plan
    assert re.search(f"# this machine, {size} GiB: .*{words}", plan)


@pytest.mark.parametrize(("flags", "steps"), [("--max_steps 10", 10), ("--num_train_epochs 3", 75)])
def test_steps_follow_max_steps_or_epochs(flags: str, steps: int) -> None:
    plan = describe_plan(settings_of(f"--prompts_per_step 4 {flags}"), rows=100)
    assert f"{steps} steps of 4 prompts x 12" in plan


def test_the_size_of_a_model_is_read_from_its_config(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Its scale: parameters without the embeddings, and the context. What has no estimate has a context."""
    monkeypatch.setattr("gtpo.models.source.hub_is_reachable", lambda: False)
    vocabulary = AutoConfig.from_pretrained(tiny).vocab_size
    assert shape_of(model_source(tiny)) == Shape(vocabulary, 160, 480, 2, 4, 4, 40, tied=False)
    assert shape_of(model_source("meta-llama/Llama-3.1-8B-Instruct")) is KNOWN["llama"]
    assert scale_of(model_source(TINY_BASE))[0] == KNOWN["tiny"].projections

    def has_no_estimate(model: str, why: str, context: float) -> None:
        source = ModelSource(model, model, model)
        with refused(why):
            shape_of(source)
        assert scale_of(source) == (math.inf, context)
        assert derived_micro_batch(known_shape(source), SETTINGS, 1) == 1

    has_no_estimate("owner/name", "owner/name", math.inf)
    has_no_estimate(str(tmp_path), "config", math.inf)
    for config, context in ((GPT2Config(n_positions=512), 512), (MixtralConfig(max_position_embeddings=4096), 4096)):
        config.save_pretrained(tmp_path)
        has_no_estimate(str(tmp_path), config.model_type, context)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grpo", "learning rate 1e-06, Adam 0.9 / 0.95, beta 1e-06, G 12, completions to 1500 tokens"),
        ("sft", "learning rate 1e-06, Adam 0.9 / 0.95, sequences of at most 5500 tokens"),
    ],
)
def test_plan_and_start_show_the_same_settings(method: str, expected: str) -> None:
    settings = settings_of(method=method)
    assert f"# {expected}\n" in describe_plan(settings, 10)
    assert start_lines(settings, 10, TrainerState(max_steps=10), 1)[-1] == expected


@pytest.mark.parametrize("method", CLASSES)
@pytest.mark.parametrize("model", ["llama", "tiny"])
def test_sft_has_no_kv_cache(method: str, model: str) -> None:
    """It has a maximum length in place of completions."""
    settings = settings_of(method=method, model=model)
    assert " memory: " in describe_plan(settings, rows=1000)
    assert (estimate(KNOWN[model], settings.to_dict())["KV cache"] > 0) == (method != "sft")


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_the_documentation_has_the_estimates(model: str) -> None:
    parts = estimate(KNOWN[model], settings_of(ONE, model=model).to_dict())
    columns = [["weights"], ["LoRA", "gradients", "optimizer"], ["activations", "head"], ["KV cache"]]
    columns += [["vLLM's LoRA"], ["vLLM's activations and graphs"]]
    sizes = [sum(parts.pop(name) for name in names) for names in columns]
    training = sizes[1] + sizes[2]
    text = (CONFIGS.parent / "docs" / "gpu.md").read_text()
    (row,) = re.findall(rf"^\| {model} \| (.+) \|$", text, re.MULTILINE)
    assert parts == {}
    assert [float(cell) for cell in row.split(" | ")] == pytest.approx(sizes, abs=0.06)
    assert f"{sum(sizes):.1f} GiB: vLLM {sum(sizes) - training:.1f}, training {training:.1f}, estimated" in text


@pytest.mark.parametrize(("row", "prompts"), [("llama, gsm8k", 1), ("four prompts", 4), ("eight prompts", 8)])
def test_the_documentation_has_the_hours(row: str, prompts: int) -> None:
    """Of an epoch: on an A100 with G = 8 and 12, and collapsed; on an H100, and in 16 bits."""
    numbers = []
    for group in (8, 12):
        settings = settings_of(f"--G {group} --prompts_per_step {prompts}")
        steps = steps_of(settings, 7473)
        numbers += re.findall(r"\b\d+(?:\.\d)?\b", hours(settings, steps).replace("A100", ""))[:3]
    text = (CONFIGS.parent / "docs" / "gpu.md").read_text()
    (cells,) = re.findall(rf"^\| {row} \| (.+) \|$", text, re.MULTILINE)
    saved, in_4_bits = re.findall(r"\b\d+\.\d\b", str(saved_in_16_bits(settings, 79.1)))
    expected = [*map(float, [*numbers[:2], *numbers[3:], in_4_bits]), float(in_4_bits) - float(saved)]
    assert [float(cell) for cell in re.findall(r"\d+", cells)] == pytest.approx(expected, abs=0.51)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_prompt_length": 30}, (100, 70)),
        ({"max_prompt_length": 100}, (100, 1)),  # a prompt may fill the sequence
        ({"max_prompt_length": 30, "max_length": 50}, (50, 20)),  # of SFT
        ({"max_prompt_length": 30, "max_length": 200}, (100, 70)),
        ({"max_prompt_length": 30, "max_completion_length": 20}, (50, 20)),
        ({"max_prompt_length": 30, "max_completion_length": 90}, (100, 90)),
    ],
)
def test_tokens_of_the_longest_row_and_of_its_completion(values: dict[str, int], expected: tuple[int, int]) -> None:
    assert memory._lengths({"max_seq_length": 100} | values) == expected
