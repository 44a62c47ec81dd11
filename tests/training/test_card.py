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
from helpers.runs import fake_run
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


@pytest.fixture
def settings_of(tmp_path: Path) -> Any:
    """``settings_of(*argv, method="gtpo")``: those of a run that has weights, as far as a card reads them."""
    run = fake_run(tmp_path / "a run's", saved=["adapter"])
    run.merged.mkdir()
    words = ["--output_dir", str(run.path), "--model", "tiny", "--dataset", "arithmetic", "--lora_rank", "4"]
    return lambda *argv, method="gtpo": parsed(*words, *argv, method=method)


def card_of(settings: Settings, weights: str = "adapter", rows: Any = ROWS) -> str:
    run = RunDirectory(settings.output_dir)
    return Card(settings, rows, TRAINERS[settings.method], run).text(run.path / weights, "me/my model")


def front_matter(card: str) -> Any:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_front_matter_of_a_hub_model(settings_of: Any) -> None:
    settings = settings_of()
    card = card_of(settings)  # a local base and generated data are left out
    common = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["gtpo", "trl", "lora"]}
    assert front_matter(card) == common
    assert "- **License**: that of the base model" in card and "None" not in card
    settings.model.model = "qwen"
    settings.data = replace(settings.data, dataset="gsm8k")  # which only a GPU can train
    card = card_of(settings)
    assert front_matter(card) == common | {"base_model": "Qwen/Qwen2.5-3B-Instruct", "datasets": ["openai/gsm8k"]}
    ModelCard(card)  # the Hub's reader accepts it


def test_the_copy_in_4_bits_is_named(settings_of: Any) -> None:
    """That of the adapter, also for a merged model."""
    settings = settings_of()
    assert "4-bit" not in card_of(settings).partition("## Settings")[0]
    settings.model.load_in_4bit = True  # which needs a GPU
    for noted, copy in (({"loaded_from": "unsloth/qwen-bnb-4bit"}, "unsloth/qwen-bnb-4bit"), (None, "tiny")):
        write_json(settings.output_dir / "adapter" / "adapter_config.json", {"auto_mapping": noted})
        for weights in ("adapter", "merged"):
            assert f"- **Trained on**: the 4-bit weights of `{copy}`\n" in card_of(settings, weights)


def test_each_method_names_its_paper(settings_of: Any) -> None:
    gtpo, grpo, sft = (card_of(settings_of(method=method)) for method in TRAINERS)
    assert "https://arxiv.org/abs/2508.03772" in gtpo and "simoni2025gtpo" in gtpo and "gamma: 0.1" in gtpo
    assert "https://arxiv.org/abs/2402.03300" in grpo and "2508.03772" not in grpo
    assert "## Citation" not in sft and "arxiv" not in sft


def test_a_merged_model_needs_no_base(settings_of: Any) -> None:
    card = card_of(settings_of(), "merged")
    assert front_matter(card)["library_name"] == "transformers" and "lora" not in front_matter(card)["tags"]
    assert "peft" not in card.partition("## Quick start")[2].lower()


def test_scores_and_initial_entropy(settings_of: Any) -> None:
    settings = settings_of()
    run = RunDirectory(settings.output_dir)
    assert "## Scores" not in card_of(settings) and "entropy filter" not in card_of(settings)
    write_lines(run.metrics, [{"step": step, "accuracy": 10.0 * step, "loss": float("nan")} for step in (1, 2, 3, 4)])
    write_json(run.initial_entropy, {"initial_entropy": 0.25, "filter_on": True})
    card = card_of(settings)
    assert "accuracy 15.0 -> 35.0 %" in card and "0.250 nats before training, entropy filter on" in card


def test_the_quick_start_has_the_trained_system_prompt(settings_of: Any) -> None:
    settings = settings_of("--chat_template_kwargs", '{"enable_thinking": false}')
    system = 'Say "hi"\\ in\n```\n~~~'
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    (code,) = re.findall("```python\n(.*?)^```", card_of(settings, rows=[{"prompt": turns}]), re.DOTALL | re.MULTILINE)
    assert json.dumps(system) in code and SYSTEM_PROMPT not in code and "enable_thinking=False" in code
    compile(code, "card", "exec")
    for row in ({"prompt": "plain text"}, {"prompt": turns[1:]}, {"input_ids": [1]}):
        assert '"role": "system"' not in card_of(settings, rows=[row])


@pytest.mark.slow
def test_the_quick_start_works_when_pasted_in_another_directory(
    build: Any, settings_of: Any, tiny: Path, tmp_path: Path, run_script: RunScript
) -> None:
    settings = settings_of("--model", str(tiny), "--merge", "16bit")
    settings.given["max_completion_length"] = 4
    run = RunDirectory(settings.output_dir)
    save_adapter(build("gtpo", run.path.name), settings, run)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for weights in (run.adapter, run.merged):
        (code,) = re.findall("```python\n(.*?)```", (weights / "README.md").read_text(), re.DOTALL)
        (elsewhere / "pasted.py").write_text(code + "print(output.shape[1] - inputs['input_ids'].shape[1])\n")
        ended = run_script(elsewhere, str(elsewhere / "pasted.py"))
        assert 1 <= int(ended.stdout.splitlines()[-1]) <= 4


@pytest.mark.parametrize("name", ["n<img src=x onerror=alert(1)>", "[a](http://x)", "![](http://x)", "a\n# b"])
def test_a_name_in_the_card_is_text(name: str, settings_of: Any) -> None:
    settings = settings_of()
    settings.trainer.hub_model_id = name
    settings.data = replace(settings.data, dataset=f"a`<b>`{name}")
    settings.prompt.chat_template_kwargs = {"x=1): import os #": 1}
    body = card_of(settings).split("---\n", 2)[2]
    (title,) = re.findall("^# .*", body, re.MULTILINE)
    assert "<img" not in title and re.search(r"(?<!\\)\[", title) is None
    (line,) = re.findall("^A LoRA adapter, trained with.*", body, re.MULTILINE)
    assert line.count("`") == 2  # the name is between them
    assert "import os" not in body.partition("```python")[2].partition("```")[0]
