"""The model card: front matter, facts, scores, and a quick start that works when it is pasted."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from helpers.files import write_json, write_lines
from helpers.scripts import RunScript
from helpers.settings import parsed
from huggingface_hub import ModelCard

from gtpo.arguments import Settings
from gtpo.prompts import SYSTEM_PROMPT, to_messages
from gtpo.runs.directory import RunDirectory
from gtpo.training.export import Card, save_adapter
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

TRAINERS = {"gtpo": GTPOTrainer, "grpo": GRPOTrainer, "sft": trl.SFTTrainer}
ROWS = [{"prompt": to_messages("1 + 1?"), "answer": "2"}]


def settings_of(directory: Path, *argv: str, method: str = "gtpo") -> Settings:
    words = ["--output_dir", str(directory), "--model", "tiny", "--dataset", "arithmetic", "--lora_rank", "4"]
    return parsed(*words, *argv, method=method)


def model_card(settings: Settings, rows: Any, weights: Path, where: str, trainer: Any) -> str:
    return Card(settings, rows, trainer, RunDirectory(settings.output_dir)).text(weights, where)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A run directory's adapter, as far as a card reads it."""
    directory = tmp_path / "a run" / "adapter"
    directory.mkdir(parents=True)
    write_json(directory / "adapter_config.json", {"base_model_name_or_path": "/models/the base"})
    return directory


def card_of(adapter: Path, *argv: str, rows: Any = ROWS, method: str = "gtpo") -> str:
    settings = settings_of(adapter.parent, *argv, method=method)
    return model_card(settings, rows, adapter, "me/my model", TRAINERS[method])


def front_matter(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_the_front_matter_of_a_hub_model(adapter: Path) -> None:
    settings = settings_of(adapter.parent)
    settings.model.model = "qwen"
    settings.data = replace(settings.data, dataset="gsm8k")  # which only a GPU can train
    card = model_card(settings, ROWS, adapter, "me/my-model", GTPOTrainer)
    common = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["gtpo", "trl", "lora"]}
    assert front_matter(card) == common | {"base_model": "Qwen/Qwen2.5-3B-Instruct", "datasets": ["openai/gsm8k"]}
    ModelCard(card)  # the Hub's reader accepts it
    card = card_of(adapter)  # a local base and generated data are left out
    assert front_matter(card) == common
    assert "- **License**: that of the base model" in card and "None" not in card


def test_the_copy_in_4_bits_is_named(adapter: Path) -> None:
    settings = settings_of(adapter.parent)
    assert "4-bit" not in model_card(settings, ROWS, adapter, "me/my-model", GTPOTrainer).partition("## Settings")[0]
    settings.model.load_in_4bit = True  # which needs a GPU
    assert "- **Trained on**: the 4-bit weights of `tiny`\n" in model_card(
        settings, ROWS, adapter, "me/my-model", GTPOTrainer
    )
    config = {"base_model_name_or_path": "qwen", "auto_mapping": {"loaded_from": "unsloth/qwen-bnb-4bit"}}
    write_json(adapter / "adapter_config.json", config)
    assert "the 4-bit weights of `unsloth/qwen-bnb-4bit`\n" in model_card(
        settings, ROWS, adapter, "me/my-model", GTPOTrainer
    )


def test_a_merged_4_bit_copy_is_of_its_adapter(adapter: Path) -> None:
    """A merged model has no adapter_config.json."""
    (merged := adapter.parent / "merged").mkdir()
    settings = settings_of(adapter.parent)
    settings.model.load_in_4bit = True
    for noted, copy in (({"loaded_from": "unsloth/qwen-bnb-4bit"}, "unsloth/qwen-bnb-4bit"), (None, "tiny")):
        write_json(adapter / "adapter_config.json", {"base_model_name_or_path": "qwen", "auto_mapping": noted})
        card = model_card(settings, ROWS, merged, "me/my-model", GTPOTrainer)
        assert f"- **Trained on**: the 4-bit weights of `{copy}`\n" in card
        assert "peft" not in front_matter(card).values()


def test_each_method_names_its_paper(adapter: Path) -> None:
    gtpo, grpo, sft = (card_of(adapter, method=method) for method in ("gtpo", "grpo", "sft"))
    assert "https://arxiv.org/abs/2508.03772" in gtpo and "simoni2025gtpo" in gtpo and "gamma: 0.1" in gtpo
    assert "https://arxiv.org/abs/2402.03300" in grpo and "2508.03772" not in grpo
    assert "## Citation" not in sft and "arxiv" not in sft


def test_a_merged_model_needs_no_base(adapter: Path) -> None:
    merged = adapter.parent / "merged"
    merged.mkdir()
    card = model_card(settings_of(adapter.parent), ROWS, merged, "me/merged", GTPOTrainer)
    assert front_matter(card)["library_name"] == "transformers" and "lora" not in front_matter(card)["tags"]
    assert "peft" not in card.partition("## Quick start")[2].lower()


def test_scores_and_initial_entropy(adapter: Path) -> None:
    run = RunDirectory(adapter.parent)
    assert "## Scores" not in card_of(adapter) and "entropy filter" not in card_of(adapter)
    rows = [{"step": step, "accuracy": 10.0 * step, "formatting": None, "loss": float("nan")} for step in (1, 2, 3, 4)]
    write_lines(run.metrics, rows)
    write_json(run.initial_entropy, {"initial_entropy": 0.25, "filter_on": True})
    card = card_of(adapter)
    assert "accuracy 15.0 -> 35.0 %" in card and "0.250 nats before training, entropy filter on" in card


def test_the_quick_start_has_the_trained_system_prompt(adapter: Path) -> None:
    system = 'Say "hi"\\ in\n```\n~~~'
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    card = card_of(adapter, "--chat_template_kwargs", '{"enable_thinking": false}', rows=[{"prompt": turns}])
    (code,) = re.findall("```python\n(.*?)^```", card, flags=re.DOTALL | re.MULTILINE)
    assert json.dumps(system) in code and SYSTEM_PROMPT not in code and "enable_thinking=False" in code
    compile(code, "card", "exec")
    for rows in ([{"prompt": "plain text"}], [{"prompt": turns[1:]}], [{"input_ids": [1]}]):
        assert '"role": "system"' not in card_of(adapter, rows=rows)


@pytest.mark.slow
def test_the_quick_start_works_when_pasted_in_another_directory(
    build: Any, tiny: Path, tmp_path: Path, run_script: RunScript
) -> None:
    trainer = build("gtpo", "a run's")
    settings = settings_of(tmp_path / "a run's", "--model", str(tiny), "--merge", "16bit")
    settings.given["max_completion_length"] = 4
    save_adapter(trainer, settings, RunDirectory(settings.output_dir))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for directory in ("adapter", "merged"):
        card = (tmp_path / "a run's" / directory / "README.md").read_text()
        (code,) = re.findall("```python\n(.*?)```", card, flags=re.DOTALL)
        (elsewhere / "pasted.py").write_text(code + "print(output.shape[1] - inputs['input_ids'].shape[1])\n")
        ended = run_script(elsewhere, str(elsewhere / "pasted.py"))
        assert 1 <= int(ended.stdout.splitlines()[-1]) <= 4


@pytest.mark.parametrize("name", ["n<img src=x onerror=alert(1)>", "[a](http://x)", "![](http://x)", "a\n# b"])
def test_a_name_in_the_card_is_text(name: str, adapter: Path) -> None:
    settings = settings_of(adapter.parent)
    settings.trainer.hub_model_id = name
    settings.data = replace(settings.data, dataset=f"a`<b>`{name}")
    settings.prompt.chat_template_kwargs = {"x=1): import os #": 1}
    card = model_card(settings, ROWS, adapter, "me/my model", TRAINERS["gtpo"])
    body = card.split("---\n", 2)[2]
    (title,) = re.findall("^# .*", body, flags=re.MULTILINE)
    assert "<img" not in title and re.search(r"(?<!\\)\[", title) is None
    (line,) = [line for line in body.splitlines() if line.startswith("A LoRA adapter, trained with")]
    assert line.count("`") == 2  # the name is between them
    assert "import os" not in body.partition("```python")[2].partition("```")[0]
