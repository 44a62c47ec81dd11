"""The model card: TRL's front matter and text, our facts and scores, and a quick start that works when it is pasted."""

import ast
import html
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
from gtpo.prompts import to_messages
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
    common = {
        **{"library_name": "peft", "pipeline_tag": "text-generation", "licence": "license", "model_name": "a run's"},
        "tags": ["generated_from_trainer", "trl", "gtpo", "lora"],
    }
    assert front_matter(card) == common
    assert "a fine-tuned version of `tiny`." in card and "None" not in card
    assert "* Base model: `tiny`, whose license holds here too" in card and "* Data: `arithmetic`" in card
    settings.model.model = "qwen"
    settings.data = replace(settings.data, dataset="gsm8k")  # which only a GPU can train
    card = card_of(settings)
    assert front_matter(card) == common | {"base_model": "Qwen/Qwen2.5-3B-Instruct", "datasets": "openai/gsm8k"}
    ModelCard(card)  # the Hub's reader accepts it


def test_the_copy_in_4_bits_is_named(settings_of: Any) -> None:
    """That of the adapter, also for a merged model."""
    settings = settings_of()
    assert "4-bit" not in card_of(settings)
    settings.model.load_in_4bit = True  # which needs a GPU
    for noted, copy in (({"loaded_from": "unsloth/qwen-bnb-4bit"}, "unsloth/qwen-bnb-4bit"), (None, "tiny")):
        write_json(settings.output_dir / "adapter" / "adapter_config.json", {"auto_mapping": noted})
        for weights in ("adapter", "merged"):
            assert f"* Trained on the 4-bit weights of `{copy}`\n" in card_of(settings, weights)


def test_each_method_names_its_paper(settings_of: Any) -> None:
    gtpo, grpo, sft = (card_of(settings_of(method=method)) for method in TRAINERS)
    assert "papers/2508.03772" in gtpo and "simoni2025gtpo" in gtpo and "gamma: 0.1" in gtpo
    assert "papers/2402.03300" in grpo and "2508.03772" not in grpo
    assert "trained with SFT." in sft and "Cite SFT" not in sft and "papers/" not in sft


def test_a_merged_model_needs_no_base(settings_of: Any) -> None:
    card = card_of(settings_of(), "merged")
    assert front_matter(card)["library_name"] == "transformers" and "lora" not in front_matter(card)["tags"]
    assert "* The weights are a model with a LoRA adapter merged" in card and "* The weights are a LoRA" in card_of(
        settings_of()
    )


def test_scores_and_initial_entropy(settings_of: Any) -> None:
    settings = settings_of()
    run = RunDirectory(settings.output_dir)
    assert "Means of" not in card_of(settings) and "entropy filter" not in card_of(settings)
    write_lines(run.metrics, [{"step": step, "accuracy": 10.0 * step, "loss": float("nan")} for step in (1, 2, 3, 4)])
    write_json(run.initial_entropy, {"initial_entropy": 0.25, "filter_on": True})
    card = card_of(settings)
    assert "accuracy 15.0 -> 35.0 %" in card and "0.250 nats before training, entropy filter on" in card


def test_the_card_has_the_trained_system_prompt(settings_of: Any) -> None:
    system = 'Say "hi" <b>\\ in\n```\n\n~~~'
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    (shown, _) = re.findall("<pre>\n(.*?)</pre>", card_of(settings_of(), rows=[{"prompt": turns}]), re.DOTALL)
    assert html.unescape(shown) == system and "<b>" not in shown
    for row in ({"prompt": "plain text"}, {"prompt": turns[1:]}, {"input_ids": [1]}):
        assert "System prompt" not in card_of(settings_of(), rows=[row])


@pytest.mark.slow
def test_the_quick_start_works_when_pasted_in_another_directory(
    build: Any, settings_of: Any, tiny: Path, tmp_path: Path, run_script: RunScript
) -> None:
    settings = settings_of("--model", str(tiny), "--merge", "16bit")
    run = RunDirectory(settings.output_dir)
    save_adapter(build("gtpo", run.path.name), settings, run)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    answers = []
    for weights in (run.adapter, run.merged):
        (code,) = re.findall("```python\n(.*?)```", (weights / "README.md").read_text(), re.DOTALL)
        greedy = code.replace("max_new_tokens=128", "max_new_tokens=4, do_sample=False")  # a pipeline samples
        (elsewhere / "pasted.py").write_text(f"{greedy}\nprint(repr(output['generated_text']))\n")
        answers.append(run_script(elsewhere, str(elsewhere / "pasted.py")).stdout.splitlines()[-1])
    assert all(ast.literal_eval(answer) for answer in answers)


@pytest.mark.parametrize("name", ["n<img src=x onerror=alert(1)>", "[a](http://x)", "![](http://x)", "a\n# b"])
def test_a_name_in_the_card_is_text(name: str, settings_of: Any) -> None:
    settings = settings_of()
    settings.trainer.hub_model_id = name
    settings.data = replace(settings.data, dataset=f"a`<b>`{name}")
    body = card_of(settings).split("---\n", 2)[2]
    (title,) = re.findall("^# .*", body, re.MULTILINE)
    assert "<img" not in title and re.search(r"(?<!\\)\[", title) is None
    (line,) = re.findall(r"^\* Data: .*", body, re.MULTILINE)
    assert line.count("`") == 2  # the name is between them


def test_a_path_in_the_quick_start_is_text(settings_of: Any) -> None:
    settings = settings_of()
    path = 'a "b"); import os\n#\\'
    card = Card(settings, ROWS, GTPOTrainer, RunDirectory(settings.output_dir)).text(
        settings.output_dir / "adapter", path
    )
    (code,) = re.findall("```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    (call,) = [
        node for node in ast.walk(ast.parse(code)) if getattr(getattr(node, "func", None), "id", "") == "pipeline"
    ]
    assert call.keywords[0].value.value == path
