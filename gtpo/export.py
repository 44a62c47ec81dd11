"""Save, merge and upload a trained adapter, with its model card."""

import logging
import shutil
from pathlib import Path
from typing import Any

import yaml

from gtpo.arguments import MODEL_ALIASES, Settings
from gtpo.data import BENCHMARK_TITLES
from gtpo.errors import UsageError
from gtpo.files import replace_directory
from gtpo.models import resolve_model
from gtpo.prompts import SYSTEM_PROMPT
from gtpo.runs import RunDirectory

logger = logging.getLogger(__name__)


def save_adapter(trainer: Any, settings: Settings) -> None:
    """Save the trained adapter with tokenizer and model card to ``adapter/``, completely or not at all.

    ``merge: 16bit`` also writes ``merged/``, and ``push_to_hub`` uploads it, or the adapter.

    Raises:
        UsageError: If the upload fails; the adapter is in the run directory by then.
    """
    run = RunDirectory(settings.output_dir)
    unfinished = run.path / f"{run.adapter.name}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    trainer.save_model(str(unfinished))  # every process takes part; the main one writes
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml has the settings
    shutil.rmtree(unfinished / "ref", ignore_errors=True)  # the reference of GRPO's KL: the adapter at step 0
    trainer.create_model_card(model_name=run.path.name)
    card = run.path / "README.md"
    base = trainer.model.config._name_or_path  # TRL links every base model to the Hub, local directories too
    text = card.read_text().replace("[None](https://huggingface.co/None)", f"`{base}`")
    (unfinished / "README.md").write_text(text + _adapter_usage(settings) + _settings(settings))
    card.unlink()
    replace_directory(unfinished, run.adapter)
    merges = settings.run.merge == "16bit"
    if merges:
        merge_adapter(run.adapter, resolve_model(settings.model.model), run.merged)
        (run.merged / "README.md").write_text(text + _MERGED_USAGE + _settings(settings))
    parts = [f"adapter: {run.adapter.name}/", *([f"merged model: {run.merged.name}/"] if merges else [])]
    logger.warning("Run finished: %s (curves: %s, %s)", run.path, run.report.name, ", ".join(parts))
    if settings.data.dataset in BENCHMARK_TITLES:
        logger.warning("Evaluate: python evaluate.py --benchmarks %s --adapter %s", settings.data.dataset, run.path)
    if settings.run.push_to_hub:
        _upload(run.merged if merges else run.adapter, settings)


def merge_adapter(adapter: str | Path, base: str, directory: str | Path) -> None:
    """Save ``base`` with the adapter merged into its weights as a standalone model in bfloat16.

    The base is loaded in bfloat16 into host memory, two bytes per parameter; 4-bit training weights are not used.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, unfinished = Path(directory), Path(f"{directory}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map="cpu")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(unfinished)
    replace_directory(unfinished, directory)


_MERGED_USAGE = """
## Use

The adapter is merged into the weights; the model needs no PEFT.

```bash
vllm serve PATH_OR_HUB_ID
```
"""


def _adapter_usage(settings: Settings) -> str:
    base, rank = MODEL_ALIASES.get(settings.model.model, settings.model.model), settings.model.lora_rank
    return f"""
## Use

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("PATH_OR_HUB_ID")
```

```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules adapter=PATH_OR_HUB_ID
```
"""


def _settings(settings: Settings) -> str:
    values = {key: value for key, value in settings.to_dict().items() if value is not None}
    return f"""
The model answers in the tags of its system prompt:

```text
{SYSTEM_PROMPT}
```

## Settings

```yaml
{yaml.safe_dump(values, sort_keys=True).strip()}
```
"""


def _upload(directory: Path, settings: Settings) -> None:
    import httpx
    from huggingface_hub import HfApi

    name = settings.trainer.hub_model_id or settings.output_dir.name
    hub = HfApi()
    try:
        repository = hub.create_repo(name, private=settings.trainer.hub_private_repo, exist_ok=True).repo_id
        hub.upload_folder(folder_path=directory, repo_id=repository, commit_message="Trained adapter")
    except (OSError, ValueError, httpx.HTTPError) as error:  # no network, no write access, invalid name
        raise UsageError(
            f"trained and saved in {directory}, but not uploaded: {str(error).splitlines()[0].rstrip('.')}. "
            f"Upload it with `hf upload {name} {directory}`."
        ) from error
