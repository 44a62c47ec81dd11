"""The model card: front matter, facts, scores, and a quick start that works when it is pasted."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.canned import make_trainer
from helpers.scripts import Ended
from huggingface_hub import ModelCard
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, PromptArguments, RunArguments, Settings
from gtpo.cli.parse import parse
from gtpo.prompts import SYSTEM_PROMPT, to_messages
from gtpo.runs.directory import RunDirectory
from gtpo.training.card import model_card
from gtpo.training.export import save_adapter

ROWS = [{"prompt": to_messages("1 + 1?"), "answer": "2"}]


def settings_of(directory: Path, *argv: str, method: str = "gtpo") -> Settings:
    ours = (DataArguments, PromptArguments, ModelArguments, RunArguments)
    classes = {"gtpo": (*ours, GTPOArguments, GRPOConfig), "grpo": (*ours, GRPOConfig), "sft": (*ours, SFTConfig)}
    words = ["--output_dir", str(directory), "--model", "tiny", "--dataset", "arithmetic"]
    return parse(method, classes[method], [*words, "--lora_rank", "4", *argv])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A run directory's adapter, as far as a card reads it."""
    directory = tmp_path / "a run" / "adapter"
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/the base"}))
    return directory


def card_of(adapter: Path, *argv: str, rows: Any = ROWS, method: str = "gtpo") -> str:
    return model_card(settings_of(adapter.parent, *argv, method=method), rows, adapter, "me/my model")


def front_matter(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def section(card: str, title: str) -> str:
    return re.split(r"^## ", card.partition(f"## {title}\n")[2], flags=re.MULTILINE)[0]


def as_of_a_gpu(settings: Settings) -> Settings:
    """The settings with a base model that only a GPU can train."""
    settings.model.model, settings.data.dataset = "qwen", "gsm8k"
    return settings


def test_the_front_matter_of_a_hub_model(adapter: Path) -> None:
    settings = as_of_a_gpu(settings_of(adapter.parent))
    card = model_card(settings, ROWS, adapter, "me/my-model")
    assert front_matter(card) == {
        "base_model": "Qwen/Qwen2.5-3B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["gtpo", "trl", "lora"],
    }
    assert "vllm serve Qwen/Qwen2.5-3B-Instruct " in card
    ModelCard(card)  # the Hub's reader accepts it


def test_a_local_base_is_left_out_of_the_front_matter(adapter: Path) -> None:
    card = card_of(adapter)
    assert front_matter(card) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["gtpo", "trl", "lora"],
    }
    assert "- **License**: that of the base model" in card and "None" not in card


def test_each_method_names_its_paper(adapter: Path) -> None:
    gtpo, grpo, sft = (card_of(adapter, method=method) for method in ("gtpo", "grpo", "sft"))
    assert "https://arxiv.org/abs/2508.03772" in gtpo and "simoni2025gtpo" in gtpo and "gamma: 0.1" in gtpo
    assert "https://arxiv.org/abs/2402.03300" in grpo and "2508.03772" not in grpo
    assert "Supervised fine-tuning" in sft and "## Citation" not in sft and "arxiv" not in sft


def test_the_command_of_vllm_is_quoted_and_has_the_rank_of_the_adapter(adapter: Path) -> None:
    card = card_of(adapter, "--lora_rank", "64")
    (command,) = re.findall("```bash\n(.*)\n```", card)
    assert shlex.split(command) == [
        *("vllm", "serve", "/models/the base", "--enable-lora", "--max-lora-rank", "64"),
        *("--lora-modules", "adapter=me/my model"),
    ]
    assert "that of the training is `chat_template.jinja` here" in card and "chat_template_kwargs" not in command
    card = card_of(adapter, "--chat_template_kwargs", '{"enable_thinking": false}')
    assert 'Each request needs `"chat_template_kwargs": {"enable_thinking": false}`.' in card


def test_a_merged_model_needs_no_base(adapter: Path) -> None:
    merged = adapter.parent / "merged"
    merged.mkdir()
    card = model_card(settings_of(adapter.parent), ROWS, merged, "me/merged")
    assert front_matter(card)["library_name"] == "transformers" and "lora" not in front_matter(card)["tags"]
    assert "peft" not in section(card, "Quick start").lower() and "vllm serve me/merged\n" in card


def test_the_scores_of_the_training(adapter: Path) -> None:
    assert "## Scores" not in card_of(adapter)
    rows = [{"step": step, "accuracy": 10.0 * step, "formatting": None, "loss": float("nan")} for step in (1, 2, 3, 4)]
    RunDirectory(adapter.parent).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = section(card_of(adapter), "Scores")
    assert "Means of the first and last 2 logged steps of the training, 4 steps:" in scores
    assert "| accuracy (%) | 15 | 35 |" in scores and "formatting" not in scores and "nan" not in scores


def test_the_initial_entropy_and_the_filter(adapter: Path) -> None:
    file = RunDirectory(adapter.parent).initial_entropy
    file.write_text(json.dumps({"initial_entropy": 0.25}))
    assert "entropy filter" not in card_of(adapter)
    file.write_text(json.dumps({"initial_entropy": 0.25, "filter_on": True}))
    assert "- **Initial entropy**: 0.250 nats before training, entropy filter on" in card_of(adapter)


def test_the_prompt_is_that_of_the_training_rows(adapter: Path) -> None:
    assert f"```text\n{SYSTEM_PROMPT}\n```" in section(card_of(adapter), "Prompt")
    own = [{"prompt": [{"role": "system", "content": 'Say "hi"\\'}, {"role": "user", "content": "?"}]}]
    card = card_of(adapter, rows=own)
    assert 'Say "hi"\\' in section(card, "Prompt") and SYSTEM_PROMPT not in card
    code = re.findall("```python\n(.*?)```", card, flags=re.DOTALL)[0]
    assert r'"content": "Say \"hi\"\\"' in code
    compile(code, "card", "exec")
    for rows in ([{"prompt": "plain text"}], [{"prompt": own[0]["prompt"][1:]}], [{"input_ids": [1]}]):
        assert "## Prompt" not in card_of(adapter, rows=rows)


def test_a_fence_in_the_system_prompt_does_not_end_its_block(adapter: Path) -> None:
    system = "Answer in\n````\n<b>bold</b>\n````"
    card = card_of(adapter, "--system_prompt", system, rows=[{"prompt": [{"role": "system", "content": system}]}])
    assert f"`````text\n{system}\n`````" in section(card, "Prompt")
    assert card.count("`````yaml\n") == 1 and "`````\n\n</details>" in card


@pytest.mark.slow
def test_the_quick_start_works_when_pasted_in_another_directory(
    tiny: Path, tmp_path: Path, run_script: Callable[..., Ended]
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path / "a run's")
    settings = settings_of(tmp_path / "a run's", "--model", str(tiny), "--merge", "16bit")
    settings.trainer.max_completion_length = 4
    save_adapter(trainer, settings)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for directory in ("adapter", "merged"):
        card = (tmp_path / "a run's" / directory / "README.md").read_text()
        (code,) = re.findall("```python\n(.*?)```", card, flags=re.DOTALL)
        (elsewhere / "pasted.py").write_text(code + "print(output.shape[1] - inputs['input_ids'].shape[1])\n")
        ended = run_script(elsewhere, str(elsewhere / "pasted.py"))
        assert ended.code == 0, ended.stderr[-2000:]
        assert 1 <= int(ended.stdout.splitlines()[-1]) <= 4
