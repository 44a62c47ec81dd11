"""What a trained run hands out: the adapter with its model card, the merged model, and the upload of either."""

import html
import json
import logging
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo.arguments import Settings, hub_name
from gtpo.data.load import SOURCES
from gtpo.errors import RunError, first_line
from gtpo.files import remove, replace_directory, write_atomically
from gtpo.processes import is_main_process
from gtpo.reports.summary import initial_entropy_text, score_lines
from gtpo.runs.directory import RunDirectory, is_adapter

logger = logging.getLogger(__name__)


def save_adapter(trainer: Any, settings: Settings, run: RunDirectory) -> None:
    """Save the trained adapter with tokenizer and model card to ``adapter/``, completely or not at all.

    A model of which all weights were trained goes to ``model/``. ``merge: 16bit`` also writes ``merged/``;
    ``push_to_hub`` uploads the merged model, or what was trained.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    trained = run.adapter if isinstance(model, PeftModel) else run.model
    unfinished = run.path / f"{trained.name}.tmp"
    if is_main_process():
        remove(unfinished)
    trainer.save_model(str(unfinished))  # every process takes part; the main one writes
    if not is_main_process():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml has the settings
    remove(unfinished / "ref")  # the reference of GRPO's KL: the adapter at step 0
    (run.path / "README.md").unlink(missing_ok=True)  # TRL's, of a checkpoint
    card = Card(settings, trainer.train_dataset, type(trainer), run)
    card.write(unfinished, trained.resolve())
    replace_directory(unfinished, trained)
    if settings.run.merge == "16bit":
        merge_adapter(trained, run.merged)
        trained = run.merged
        card.write(trained, trained.resolve())
    for earlier in run.earlier_weights():
        remove(earlier)
    if settings.given.get("push_to_hub"):
        card.upload(trained)


def merge_adapter(adapter: Path, directory: Path) -> None:
    """Save the base of an adapter with its weights merged in as a standalone model in bfloat16.

    The base is loaded in bfloat16 into host memory, two bytes per parameter; 4-bit training weights are not used.
    """
    unfinished = Path(f"{directory}.tmp")
    remove(unfinished)
    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, dtype=torch.bfloat16, device_map="cpu")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(adapter, trust_remote_code=False).save_pretrained(unfinished)
    replace_directory(unfinished, directory)


class Card:
    """TRL's model card with the facts of a run: base, data, initial entropy, scores, system prompt, settings.

    ``rows`` are the training prompts, of which the first has the system prompt. The class of the ``trainer`` names the
    method and its paper, as in TRL.
    """

    def __init__(self, settings: Settings, rows: Any, trainer: Any, run: RunDirectory) -> None:
        self.settings = settings
        self.rows = rows
        self.trainer = trainer
        self.run = run

    def text(self, weights: Path, where: Path | str) -> str:
        """The card of an adapter, or of a model, in the directory ``weights``.

        ``where`` is the path or Hub id that the quick start loads.
        """
        from trl.trainer.utils import generate_model_card

        base = hub_name(self.settings.model.model)
        hub_id = None if base == "tiny" or Path(base).is_dir() else base
        source = SOURCES.get(f"train/{self.settings.data.dataset}")
        paper = getattr(self.trainer, "_paper", {})
        adapter = is_adapter(weights)
        name = self.settings.trainer.hub_model_id or self.run.path.name
        card = generate_model_card(
            base_model=hub_id,
            model_name=_as_text(name),
            hub_model_id=json.dumps(str(where), ensure_ascii=False)[1:-1],  # between the quotes of Python code
            dataset_name=source.hub_id if source else None,
            tags=["trl", self.settings.method, *(["lora"] if adapter else [])],
            wandb_url=None,
            trackio_url=None,
            trainer_name=self.trainer._name,
            trainer_citation=paper.get("citation"),
            paper_title=paper.get("title"),
            paper_id=paper.get("id"),
        )
        card.data.model_name = name
        card.data.pipeline_tag = "text-generation"
        if adapter:
            card.data.library_name = "peft"
        if hub_id is None:
            card.text = card.text.replace("[None](https://huggingface.co/None)", _code(base))
        card.text += self._facts(weights, adapter)
        return str(card)

    def _facts(self, weights: Path, adapter: bool) -> str:
        """What TRL's card lacks, in Markdown."""
        kind = "a LoRA adapter" if adapter else "a model with a LoRA adapter merged into its weights"
        if self.settings.model.lora_rank == 0:
            kind = "a model of which all weights were trained"
        base = hub_name(self.settings.model.model)
        facts = [
            f"The weights are {kind}",
            f"Base model: {_code(base)}, whose license holds here too",
            f"Data: {_code(self.settings.data.dataset)}",
        ]
        if self.settings.model.load_in_4bit:
            config = json.loads(((weights if adapter else self.run.adapter) / "adapter_config.json").read_bytes())
            copy = (config.get("auto_mapping") or {}).get("loaded_from", base)
            facts.append(f"Trained on the 4-bit weights of {_code(copy)}")
        if entropy := initial_entropy_text(self.run):
            facts.append(f"Initial entropy: {entropy}")
        if self.run.metrics.is_file():
            facts += score_lines(self.run.read_metrics())
        lines = ["", "", "## This run", "", *[f"* {fact}" for fact in facts], ""]
        prompt = self.rows[0].get("prompt", "") if len(self.rows) else ""
        for turn in [] if isinstance(prompt, str) else prompt:
            if turn["role"] == "system":
                lines += ["System prompt of the training:", "", _preformatted(turn["content"]), ""]
        settings = yaml.safe_dump(self.settings.to_dict(), allow_unicode=True)
        lines += ["<details><summary>Every setting</summary>", "", _preformatted(settings), "", "</details>", ""]
        return "\n".join(lines)

    def write(self, weights: Path, where: Path | str) -> None:
        """Write the card next to the weights; a card that fails does not fail the run."""
        try:
            write_atomically(weights / "README.md", self.text(weights, where))
        except Exception as error:
            logger.warning("no model card (%s: %s); the run is complete", type(error).__name__, error)

    def upload(self, weights: Path) -> None:
        """Upload a directory to the Hub, with a card that loads it from there; RunError names the command to repeat."""
        from huggingface_hub import HfApi

        hub = HfApi()
        trainer = self.settings.trainer
        name = trainer.hub_model_id or self.run.path.name
        try:
            repository = hub.create_repo(name, private=trainer.hub_private_repo, exist_ok=True).repo_id
            self.write(weights, repository)
            hub.upload_folder(folder_path=weights, repo_id=repository, commit_message="Trained weights")
        except Exception as error:  # no network, no write access, invalid name
            again = shlex.join(["hf", "upload", name, str(weights)])
            raise RunError(
                f"not uploaded: {first_line(error)}. {weights} is complete: `{again}` uploads it."
            ) from error


def _as_text(name: str) -> str:
    """A name that may look like a link or a tag, in Markdown."""
    return html.escape(name, quote=False).replace("[", "\\[").replace("\n", " ")


def _preformatted(text: str) -> str:
    return f"<pre>\n{html.escape(text, quote=False)}</pre>"


def _code(name: str) -> str:
    """A name as code in Markdown; a backtick in it would end the code."""
    return "`{}`".format(name.replace("`", "'").replace("\n", " "))
