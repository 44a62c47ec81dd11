"""The model card of a trained adapter or merged model: what it is, its scores, and how to use it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gtpo.arguments import BENCHMARK_TITLES, MODEL_ALIASES, Settings
from gtpo.data.load import TRAIN
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.reports.summary import initial_entropy_text, score_lines
from gtpo.runs.directory import RunDirectory


def model_card(settings: Settings, rows: Any, weights: Path, where: str) -> str:
    """The card as Markdown with the YAML front matter of the Hub.

    Args:
        settings: All settings of the run.
        rows: The training prompts, a dataset; the first one has the system prompt.
        weights: Directory of the adapter or of the merged model.
        where: Its path or Hub id, which the quick start loads.
    """
    config, run = weights / "adapter_config.json", RunDirectory(settings.output_dir)
    merged = not config.is_file()
    method = read_yaml(Path(__file__).parent / "methods.yaml")[settings.method]
    base = MODEL_ALIASES.get(settings.model.model, settings.model.model)
    hub_id = None if base == "tiny" or Path(base).is_dir() else base
    data = settings.data.dataset
    source = TRAIN[data].hub_id if data in TRAIN else None
    what = "A model with a LoRA adapter merged into its weights" if merged else "A LoRA adapter"
    if settings.model.lora_rank == 0:
        what = "A model of which all weights were trained"
    front_matter = {
        "base_model": hub_id,
        "datasets": [source] if source else None,
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation",
        "tags": [settings.method, "trl", *([] if merged else ["lora"])],
    }
    entropy = initial_entropy_text(run)
    serve = ["vllm", "serve", where]
    if not merged:
        served = hub_id or str(json.loads(config.read_text())["base_model_name_or_path"])
        serve = ["vllm", "serve", served, "--enable-lora", "--max-lora-rank", str(settings.model.lora_rank)]
        serve += ["--lora-modules", f"adapter={where}"]
    parts = [
        f"---\n{_yaml(front_matter)}---",
        f"# {settings.trainer.hub_model_id or run.path.name}",
        f"{what}, trained with {method['name']} on "
        f"{f'[{source}](https://huggingface.co/datasets/{source})' if source else f'`{data}`'}.",
        f"- **Base model**: {f'[{hub_id}](https://huggingface.co/{hub_id})' if hub_id else f'`{base}`'}\n"
        f"- **Method**: {method['text']}\n"
        + (f"- **Initial entropy**: {entropy}\n" if entropy else "")
        + "- **License**: that of the base model",
        "## Quick start",
        _quick_start(settings, where, rows, merged),
        f"With vLLM:\n\n```bash\n{shlex.join(serve)}\n```",
        *_scores(run),
        "## Settings",
        f"<details><summary>Every setting</summary>\n\n~~~~~~~~yaml\n{_yaml(settings.to_dict())}~~~~~~~~\n\n</details>",
        *([f"## Citation\n\n```bibtex\n{method['citation']}```"] if "citation" in method else []),
    ]
    return "\n\n".join(parts) + "\n"


def _quick_start(settings: Settings, where: str, rows: Any, merged: bool) -> str:
    package, loader = ("transformers", "AutoModelForCausalLM") if merged else ("peft", "AutoPeftModelForCausalLM")
    known = settings.data.dataset in BENCHMARK_TITLES
    question = "Tom has 3 apples and buys 4 more. How many apples does he have?" if known else "Your question"
    prompt = rows[0].get("prompt") if len(rows) else None
    turns = [turn for turn in prompt if turn.get("role") == "system"] if isinstance(prompt, list) else []
    messages = "\n".join(
        f"    {json.dumps({'role': turn['role'], 'content': turn['content']}, ensure_ascii=False)},"
        for turn in [*turns, {"role": "user", "content": question}]
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


def _scores(run: RunDirectory) -> list[str]:
    try:
        lines = score_lines(run, run.read_metrics())
    except UsageError:  # no metrics
        lines = []
    return ["## Scores", "\n".join(f"- {line}" for line in lines)] if lines else []


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, allow_unicode=True))
