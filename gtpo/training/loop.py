"""A run from its callbacks to its end: start or resume, the saved adapter with its model card, merge and upload."""

import json
import logging
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from transformers import TrainerState
from transformers.integrations import WandbCallback

from gtpo.arguments import BENCHMARK_TITLES, MODEL_ALIASES, Settings
from gtpo.data.load import SOURCES
from gtpo.errors import RunError, first_line
from gtpo.files import remove, replace_directory, write_atomically
from gtpo.models.load import resolve_model
from gtpo.processes import IS_MAIN_PROCESS
from gtpo.reports.html import write_report
from gtpo.reports.progress import ProgressBar
from gtpo.reports.summary import RunMessages, initial_entropy_text, log_summary, score_lines
from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory, steps_are_done
from gtpo.runs.script import training_begins
from gtpo.training.alarm import CollapseAlarm
from gtpo.training.callbacks import (
    BestAdapter,
    CompleteCheckpoints,
    MetricsWriter,
    ResumedOptimizer,
    StopOnNonFinite,
    StopOnSignal,
    restore_metrics,
)
from gtpo.training.refusals import check_embeddings

logger = logging.getLogger(__name__)


def run(trainer: Any, settings: Settings, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; save the adapter, write the report, and say how the run ended."""
    attach_callbacks(trainer, settings)
    train(trainer, checkpoint)
    training_begins()  # also where the run was finished before
    save_adapter(trainer, settings)
    if not IS_MAIN_PROCESS:
        return
    for finish in (lambda: write_report(settings.output_dir), lambda: log_summary(trainer, settings)):
        try:
            finish()
        except Exception as error:
            logger.warning("%s: %s; the run is complete", type(error).__name__, error)


def attach_callbacks(trainer: Any, settings: Settings) -> None:
    """Add our callbacks to a trainer: messages, bar, metrics.jsonl and wandb, best adapter, fault tolerance."""
    run = RunDirectory(settings.output_dir)
    check_embeddings(trainer.model)  # SFT too
    trainer.add_callback(RunMessages(settings, len(trainer.train_dataset)))
    ProgressBar.attach(trainer, trainer._name)
    trainer.remove_callback(WandbCallback)  # it renames the metrics; MetricsWriter keeps the names of metrics.jsonl
    wandb = "wandb" in trainer.args.report_to and IS_MAIN_PROCESS
    held_out_metric = trainer.args.metric_for_best_model if trainer.eval_dataset is not None else None
    callbacks = [
        MetricsWriter(run, start_wandb(settings) if wandb else None),
        BestAdapter(run, trainer.processing_class, held_out_metric),
        ResumedOptimizer(),
        CompleteCheckpoints(trainer),
        StopOnNonFinite(trainer),
        StopOnSignal(),  # last: it ends the process after the others
    ]
    if settings.reward and "accuracy" in settings.reward.reward:
        callbacks.insert(2, CollapseAlarm(stop=settings.reward.stop_on_collapse))
    for callback in callbacks:
        trainer.add_callback(callback)


def train(trainer: Any, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one; a checkpoint of the last step is loaded and not trained further."""
    if trainer.args.device.type == "cpu":  # with several processes it is cpu:0, to which no checkpoint can be loaded
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
    if checkpoint is not None and steps_are_done(Path(checkpoint), trainer.args.max_steps):
        trainer._load_from_checkpoint(checkpoint)
        if IS_MAIN_PROCESS:
            logger.warning("%s is finished, and saved again: --max_steps trains further", trainer.args.output_dir)
            state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
            restore_metrics(RunDirectory(trainer.args.output_dir), state, trainer.args)
        return
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:  # a notebook goes on after an error
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StopOnSignal):
                callback.restore()


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
        card = model_card(settings, trainer.train_dataset, directory, name, type(trainer))
        write_atomically(directory / "README.md", card)
    except Exception as error:  # must not fail the run
        logger.warning("no model card (%s: %s); the run is complete", type(error).__name__, error)


def merge_adapter(adapter: str | Path, base: str, directory: str | Path) -> None:
    """Save ``base`` with the adapter merged into its weights as a standalone model in bfloat16.

    The base is loaded in bfloat16 into host memory, two bytes per parameter; 4-bit training weights are not used.
    """
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

    hub = HfApi()
    name = settings.trainer.hub_model_id or settings.output_dir.name
    try:
        repository = hub.create_repo(name, private=settings.trainer.hub_private_repo, exist_ok=True).repo_id
        _write_card(directory, repository, settings, trainer)
        hub.upload_folder(folder_path=directory, repo_id=repository, commit_message="Trained weights")
    except Exception as error:  # no network, no write access, invalid name
        again = shlex.join(["hf", "upload", name, str(directory)])
        raise RunError(f"not uploaded: {first_line(error)}. {directory} is complete: `{again}` uploads it.") from error


def model_card(settings: Settings, rows: Any, weights: Path, where: str, trainer: Any) -> str:
    """The card as Markdown with the YAML front matter of the Hub: what the weights are, their scores, how to use them.

    ``rows`` are the training prompts, of which the first has the system prompt; ``weights`` is the directory of the
    adapter or of the merged model, and ``where`` its path or Hub id, which the quick start loads. The class of the
    ``trainer`` names the method and its paper, as in TRL.
    """
    run = RunDirectory(settings.output_dir)
    merged = not (weights / "adapter_config.json").is_file()
    base = MODEL_ALIASES.get(settings.model.model, settings.model.model)
    data = settings.data.dataset
    copy = None  # the 4-bit weights
    if settings.model.load_in_4bit:
        config = json.loads(((run.adapter if merged else weights) / "adapter_config.json").read_text(encoding="utf-8"))
        copy = (config.get("auto_mapping") or {}).get("loaded_from", base)
    source = SOURCES.get(f"train/{data}")
    return _TEMPLATES.get_template("card.md.jinja").render(
        settings=settings,
        stored=settings.to_dict(),
        name=run.path.name,
        method=trainer._name,
        paper=getattr(trainer, "_paper", None),
        merged=merged,
        base=base,
        hub_id=None if base == "tiny" or Path(base).is_dir() else base,
        is_benchmark=data in BENCHMARK_TITLES,
        source=source.hub_id if source else None,
        copy=copy,
        entropy=initial_entropy_text(run),
        scores=score_lines(run, run.read_metrics()) if run.metrics.is_file() else [],
        where=where,
        prompt=rows[0].get("prompt", "") if len(rows) else "",
    )


def _yaml(values: dict[str, Any]) -> str:
    return str(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, allow_unicode=True))


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters.update(yaml=_yaml, json=partial(json.dumps, ensure_ascii=False), literal=repr)
