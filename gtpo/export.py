import shutil
from pathlib import Path
from typing import Any

import yaml

from gtpo.arguments import MODEL_ALIASES
from gtpo.data import BENCHMARK_NAMES
from gtpo.errors import UsageError
from gtpo.models import resolve_model
from gtpo.prompts import SYSTEM_PROMPT
from gtpo.runs import replace_folder


def save_adapter(trainer: Any, resolved: dict[str, Any]) -> None:
    """Write the trained adapter with tokenizer and model card to ``adapter/``, whole or not at all.

    ``merge: 16bit`` writes ``merged/`` beside it, and ``push_to_hub`` uploads what was written last.

    Raises:
        UsageError: If the upload fails; what was trained lies in the run directory by then.
    """
    run_directory = Path(resolved["output_dir"])
    folder, unfinished = run_directory / "adapter", run_directory / "adapter.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    pass

    trainer.save_model(str(unfinished))  # every process takes part; the main one writes
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml holds the settings
    shutil.rmtree(unfinished / "ref", ignore_errors=True)  # the reference of GRPO's KL: the adapter at step 0
    trainer.create_model_card(model_name=run_directory.name)
    card = run_directory / "README.md"
    base = trainer.model.config._name_or_path  # TRL links the base model to the Hub, where a local folder is not
    text = card.read_text().replace("[None](https://huggingface.co/None)", f"`{base}`")
    (unfinished / "README.md").write_text(text + _usage(resolved) + _settings(resolved))
    card.unlink()
    replace_folder(unfinished, folder)
    if resolved["merge"] == "16bit":
        merge_adapter(folder, resolve_model(resolved["model"]), run_directory / "merged")
        (run_directory / "merged" / "README.md").write_text(text + _MERGED_USAGE + _settings(resolved))
    pass

    merged = ", merged/ a model that stands alone" if resolved["merge"] == "16bit" else ""
    benchmark = resolved.get("dataset")
    score = f"; to score it: python evaluate.py --benchmarks {benchmark} --adapter {run_directory}"
    score = score if benchmark in BENCHMARK_NAMES else ""
    logger.warning("%s: report.html shows the run, adapter/ is what was trained%s%s", run_directory, merged, score)
    if resolved["push_to_hub"]:
        _upload(run_directory / ("merged" if resolved["merge"] == "16bit" else "adapter"), resolved)


def merge_adapter(adapter: str | Path, base: str, folder: str | Path) -> None:
    """Write ``base`` with the adapter merged into its weights, in 16 bits, as a model that stands alone.

    The base is loaded anew in bfloat16 in the main memory, not the 4-bit weights that were trained on: twice as many GB
    as it has billions of parameters.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pass

    folder, unfinished = Path(folder), Path(f"{folder}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map="cpu")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(unfinished)
    replace_folder(unfinished, folder)


_MERGED_USAGE = """
## Use

The adapter is merged into the weights: the model stands alone.

```bash
vllm serve PATH_OR_HUB_ID
```
"""


def _usage(resolved: dict[str, Any]) -> str:
    base, rank = MODEL_ALIASES.get(resolved["model"], resolved["model"]), resolved["lora_rank"]
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


def _settings(resolved: dict[str, Any]) -> str:
    return f"""
It answers in the tags of its system prompt:

```text
{SYSTEM_PROMPT}
```

## Settings

```yaml
{yaml.safe_dump({key: value for key, value in resolved.items() if value is not None}, sort_keys=True).strip()}
```
"""


def _upload(folder: Path, resolved: dict[str, Any]) -> None:
    import httpx
    from huggingface_hub import HfApi

    name = resolved["hub_model_id"] or Path(resolved["output_dir"]).name
    hub = HfApi()
    try:
        repository = hub.create_repo(name, private=resolved["hub_private_repo"], exist_ok=True).repo_id
        hub.upload_folder(folder_path=folder, repo_id=repository, commit_message="Trained adapter")
    except (OSError, ValueError, httpx.HTTPError) as error:  # no network, no right to write, no such name
        raise UsageError(
            f"trained and saved in {folder}, but not uploaded: {str(error).splitlines()[0]} "
            f"`hf upload {name} {folder}` sends it."
        ) from error
