"""The model card of a trained adapter or merged model: what it is, its scores, and how to use it."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gtpo.arguments import BENCHMARK_TITLES, MODEL_ALIASES, PromptArguments, Settings
from gtpo.data.sources import TRAIN
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.reports.summary import held_out_text, initial_entropy_text, scores, window_text
from gtpo.runs.directory import RunDirectory


def model_card(settings: Settings, rows: Any, weights: Path, where: str) -> str:
    """The card as Markdown with the YAML front matter of the Hub.

    Args:
        settings: All settings of the run.
        rows: The training prompts, a dataset; the first one has the system prompt.
        weights: Directory of the adapter or of the merged model.
        where: Its path or Hub id, which the quick start loads.
    """
    config = weights / "adapter_config.json"
    merged = not config.is_file()
    run = RunDirectory(settings.output_dir)
    method = read_yaml(Path(__file__).parent / "methods.yaml")[settings.method]
    name, link = method["name"], method.get("link")
    base = MODEL_ALIASES.get(settings.model.model, settings.model.model)
    hub_id = None if base == "tiny" or Path(base).is_dir() else base
    system, data = _system_prompt(rows), settings.data.dataset
    source = TRAIN[data].hub_id if data in TRAIN else None
    entropy = initial_entropy_text(run)
    what = "A model with a LoRA adapter merged into its weights" if merged else "A LoRA adapter"
    if settings.model.lora_rank == 0:
        what = "A model of which all weights were trained"
    title = settings.trainer.hub_model_id or run.path.name
    front_matter = {
        "base_model": hub_id,
        "datasets": [source] if source else None,
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation",
        "tags": [settings.method, "trl", *([] if merged else ["lora"])],
    }
    parts = [
        f"---\n{_yaml(front_matter)}---",
        f"# {title}",
        f"{what}, trained with {name} on "
        f"{f'[{source}](https://huggingface.co/datasets/{source})' if source else f'`{data}`'}.",
        "\n".join(
            [
                f"- **Base model**: {f'[{hub_id}](https://huggingface.co/{hub_id})' if hub_id else f'`{base}`'}",
                f"- **Method**: {f'[{name}]({link})' if link else name}. {method['text']}",
                *([f"- **Initial entropy**: {entropy}"] if entropy else []),
                "- **License**: that of the base model",
            ]
        ),
        "## Quick start",
        _quick_start(settings, where, system, merged),
        _vllm(settings, hub_id, config, where),
        *_scores(run),
        *_prompt(system, settings.prompt),
        "## Settings",
        f"<details><summary>Every setting</summary>\n\n{_fenced('yaml', _yaml(settings.to_dict()))}\n\n</details>",
        *(["## Citation", _fenced("bibtex", method["citation"])] if "citation" in method else []),
    ]
    return "\n\n".join(parts) + "\n"


def _system_prompt(rows: Any) -> str | None:
    """The system prompt of the first training row; None where it has none."""
    prompt = rows[0].get("prompt") if len(rows) else None
    if not isinstance(prompt, list):
        return None
    return next((str(turn["content"]) for turn in prompt if turn.get("role") == "system"), None)


def _quick_start(settings: Settings, where: str, system: str | None, merged: bool) -> str:
    package, loader = ("transformers", "AutoModelForCausalLM") if merged else ("peft", "AutoPeftModelForCausalLM")
    known = settings.data.dataset in BENCHMARK_TITLES
    question = "Tom has 3 apples and buys 4 more. How many apples does he have?" if known else "Your question"
    turns = [("system", system)] if system else []
    messages = "\n".join(
        f"    {json.dumps({'role': role, 'content': text}, ensure_ascii=False)},"
        for role, text in [*turns, ("user", question)]
    )
    length = getattr(settings.trainer, "max_completion_length", None) or 256
    extra = "".join(f"{name}={value!r}, " for name, value in settings.prompt.template_kwargs.items())
    return f"""```python
from {package} import {loader}
from transformers import AutoTokenizer

path = {json.dumps(where, ensure_ascii=False)}
tokenizer = AutoTokenizer.from_pretrained(path)
model = {loader}.from_pretrained(path, device_map="auto")
messages = [
{messages}
]
inputs = tokenizer.apply_chat_template(
    messages, {extra}add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs.to(model.device), max_new_tokens={length}, do_sample=True, temperature=1.0)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def _vllm(settings: Settings, hub_id: str | None, config: Path, where: str) -> str:
    """How vLLM serves the weights; ``config`` is that of the adapter, which a merged model lacks."""
    command, notes = ["vllm", "serve", where], []
    if config.is_file():
        base = hub_id or str(json.loads(config.read_text())["base_model_name_or_path"])
        command = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(settings.model.lora_rank)]
        command += ["--lora-modules", f"adapter={where}"]
        notes.append(
            "vLLM takes the chat template of the base model; that of the training is `chat_template.jinja` here."
        )
    if kwargs := settings.prompt.template_kwargs:
        notes.append(f'Each request needs `"chat_template_kwargs": {json.dumps(kwargs)}`.')
    return "\n\n".join(["With vLLM:", _fenced("bash", shlex.join(command)), *notes])


def _scores(run: RunDirectory) -> list[str]:
    try:
        rows = run.read_metrics()
    except UsageError:
        rows = []
    lines = [
        f"| {score.name}{' (%)' * bool(score.unit)} | {score.first:.4g} | {score.last:.4g} |" for score in scores(rows)
    ]
    parts = []
    if lines:
        parts = [
            "## Scores",
            f"{window_text(rows)} of the training, {rows[-1].get('step')} steps:",
            "\n".join(["| | start | end |", "|---|---:|---:|", *lines]),
            *([f"{held_out}."] if (held_out := held_out_text(rows)) else []),
        ]
    return parts


def _prompt(system: str | None, prompt: PromptArguments) -> list[str]:
    if system is None and prompt.tags == PromptArguments.tags:
        return []
    if system is None:
        return ["## Prompt", f"The model was trained without a system prompt, and answers in the tags `{prompt.tags}`."]
    return [
        "## Prompt",
        "The model was trained with this system prompt and answers in its format:",
        _fenced("text", system),
    ]


def _fenced(language: str, text: str) -> str:
    """A code block of Markdown; its fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, allow_unicode=True))
