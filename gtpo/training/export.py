"""Save, merge and upload a trained adapter or model, with its model card."""

import logging
import shlex
from pathlib import Path
from typing import Any

from gtpo.arguments import Settings
from gtpo.errors import RunError, first_line
from gtpo.files import remove, replace_directory, write_atomically
from gtpo.models.load import resolve_model
from gtpo.runs.directory import RunDirectory
from gtpo.training.card import model_card

logger = logging.getLogger(__name__)


def save_adapter(trainer: Any, settings: Settings) -> None:
    """Save the trained adapter with tokenizer and model card to ``adapter/``, completely or not at all.

    A model of which all weights were trained goes to ``model/``. ``merge: 16bit`` also writes ``merged/``;
    ``push_to_hub`` uploads the merged model, or what was trained.
    """
    run = RunDirectory(settings.output_dir)
    trained = run.adapter if settings.model.lora_rank else run.model
    unfinished = run.path / f"{trained.name}.tmp"
    if trainer.is_world_process_zero():
        remove(unfinished)
    trainer.save_model(str(unfinished))  # every process takes part; the main one writes
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml has the settings
    remove(unfinished / "ref")  # the reference of GRPO's KL: the adapter at step 0
    (run.path / "README.md").unlink(missing_ok=True)  # TRL's, of a checkpoint
    _write_card(unfinished, trained, settings, trainer)
    replace_directory(unfinished, trained)
    merges = settings.run.merge == "16bit"
    if merges:
        merge_adapter(run.adapter, resolve_model(settings.model.model), run.merged)
        _write_card(run.merged, run.merged, settings, trainer)
    if settings.given.get("push_to_hub"):
        _upload(run.merged if merges else trained, settings, trainer)


def _write_card(directory: Path, where: Path | str, settings: Settings, trainer: Any) -> None:
    """Write the card of what is in a directory; ``where`` is the path or Hub id that its quick start loads."""
    name = where if isinstance(where, str) else str(where.resolve())
    try:
        write_atomically(directory / "README.md", model_card(settings, trainer.train_dataset, directory, name))
    except Exception as error:  # must not fail the run
        logger.warning("no model card (%s: %s); the run is complete", type(error).__name__, error)


def merge_adapter(adapter: str | Path, base: str, directory: str | Path) -> None:
    """Save ``base`` with the adapter merged into its weights as a standalone model in bfloat16.

    The base is loaded in bfloat16 into host memory, two bytes per parameter; 4-bit training weights are not used.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, unfinished = Path(directory), Path(f"{directory}.tmp")
    remove(unfinished)
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, dtype=torch.bfloat16, device_map="cpu")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(adapter, trust_remote_code=False).save_pretrained(unfinished)
    replace_directory(unfinished, directory)


def _upload(directory: Path, settings: Settings, trainer: Any) -> None:
    from huggingface_hub import HfApi

    hub, name = HfApi(), settings.trainer.hub_model_id or settings.output_dir.name
    try:
        repository = hub.create_repo(name, private=settings.trainer.hub_private_repo, exist_ok=True).repo_id
        _write_card(directory, repository, settings, trainer)
        hub.upload_folder(folder_path=directory, repo_id=repository, commit_message="Trained weights")
    except Exception as error:  # no network, no write access, invalid name
        again = shlex.join(["hf", "upload", name, str(directory)])
        raise RunError(f"not uploaded: {first_line(error)}. {directory} is complete: `{again}` uploads it.") from error
