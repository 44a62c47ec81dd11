"""What ``--model``, ``--runs`` and ``--base`` name, found once: a base model, and an adapter on it.

A base is an alias, a Hub id or a directory. An adapter is that of a run, at its end or at a checkpoint, or a directory
of its own, by the scripts here, TRL or PEFT alone.
"""

import json
import logging
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES, Values, hub_name
from gtpo.errors import UsageError, nearest
from gtpo.files import fingerprint, read_regular
from gtpo.models.hub import TINY_BASE, check_model_files, hub_is_reachable, load_config
from gtpo.runs.directory import LAST, RunDirectory, find_weights, has_weights, is_adapter, label_of, run_around

logger = logging.getLogger(__name__)

TINY = "tiny"  # the alias of the base in this package, and the title of every tiny base
NOTE = "gtpo"  # key of tokenizer_config.json: settings of the run that an evaluation needs
LARGE = ("llama", "qwen")  # the aliases of the paper's models
MOST_RANK = 4096  # of an adapter: a stranger's could fill memory


@dataclass(frozen=True)
class ModelSource:
    """A model: the base that is loaded, and the adapter on it.

    Attributes:
        asked: As it was written.
        name: Of the base, in config.yaml and in the names of runs: as written, or where an adapter names it.
        base: Hub id, or absolute path of the directory.
        adapter: Directory of LoRA weights on the base.
        checkpoint: Of the run that was named: last, best or the number of a step; None if its weights were.
    """

    asked: str
    name: str
    base: str
    adapter: Path | None = None
    checkpoint: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the base is in a directory; otherwise it is on the Hub."""
        return Path(self.base).is_dir()

    @property
    def is_tiny(self) -> bool:
        """Whether the base is a tiny one, that of this package or an earlier one."""
        return self.title == TINY

    @property
    def alias(self) -> str:
        """The short name of the base; empty for a base without one."""
        return _ALIASES.get(self.base, "")

    @property
    def preset(self) -> str:
        """Its alias, of every tiny base ``tiny``, or ``own``. The name of a directory says nothing."""
        return TINY if self.is_tiny else self.alias or "own"

    @property
    def is_large(self) -> bool:
        """Whether the base is one of the paper's, or a copy of one: it needs a GPU."""
        return any(same_base(self.base, MODEL_ALIASES[alias]) for alias in LARGE)

    @property
    def title(self) -> str:
        """The name of the base in paths and in tables."""
        return title_of(self.base)

    @property
    def weights(self) -> Path:
        """The directory of what was trained: the adapter, or a base that is a directory."""
        return self.adapter or Path(self.base)

    @property
    def run(self) -> RunDirectory:
        """The run around the weights; of others a directory without its files."""
        return run_around(self.weights.resolve())

    @cached_property
    def settings(self) -> Values:
        """The settings that were saved with the weights, else those of the run around them; empty without both."""
        saved = self.weights / "tokenizer_config.json"
        noted = json.loads(saved.read_bytes()).get(NOTE) if saved.is_file() else None
        if noted:
            return dict(noted)
        return self.run.read_config() if self.weights.is_dir() else {}

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is: with the adapter, else with the base."""
        if self.adapter and (self.adapter / "tokenizer_config.json").is_file():
            return str(self.adapter)
        return self.base

    @property
    def label(self) -> str:
        """Of the adapter, in paths and in tables: the run's, with the checkpoint if that is not the last."""
        label = label_of(Path(self.asked))
        return label if self.checkpoint in (None, LAST) else f"{label}@{self.checkpoint}"

    @cached_property
    def options(self) -> Values:
        """Options of ``from_pretrained`` that say where it looks: only in the cache if the Hub cannot be reached."""
        if self.is_local:
            check_model_files(Path(self.base))
            return {"local_files_only": True}
        return {"local_files_only": not hub_is_reachable()}

    @cached_property
    def config(self) -> Any:
        """The config of the base, as Transformers has it; raises what Transformers raises."""
        return load_config(self.base, **self.options)

    @cached_property
    def fingerprint(self) -> str | None:
        """That of the base's files; None for a base on the Hub."""
        return fingerprint(self.base)

    @cached_property
    def lora(self) -> Values:
        """The LoRA settings that PEFT stores with the adapter. UsageError for another kind, or a stranger's layers."""
        path = self.weights / "adapter_config.json"
        config = _read_json(path)
        is_lora = config.get("peft_type") == "LORA" and config.get("base_model_name_or_path")
        if not is_lora or config.get("layer_replication") or rank_of(config) > MOST_RANK:
            raise UsageError(
                f"{path}: expected peft_type LORA, base_model_name_or_path, r to {MOST_RANK}, no layer_replication."
            )
        return config

    def on(self, base: "ModelSource") -> "ModelSource":
        """The adapter on its base from another place. UsageError for another model."""
        if not same_base(base.base, self.base):
            raise UsageError(
                f"--model {base.asked} is not what the adapter {self.weights} was trained from, {self.base}: remove "
                "--model."
            )
        return replace(self, name=base.name, base=base.base)

    def check_base(self, adapter: Path | None = None) -> None:
        """UsageError if the base is not there, or has other files than when the adapter was trained from it.

        Adapters of a base on the Hub, and of earlier revisions, have no fingerprint of it. ``adapter``: another
        directory with one, such as a checkpoint.
        """
        directory = adapter or self.weights
        if not self.is_local and not is_hub_id(self.base):
            raise UsageError(
                f"{directory} was trained from {self.base}, which is not here: restore it, or name a copy of it with "
                "--model, next to --runs or --initial_adapter."
            )
        path = directory / "adapter_config.json"
        trained = noted_in(_read_json(path)).get("base_fingerprint") if path.is_file() else None
        if trained and self.fingerprint not in (trained, None):
            raise UsageError(
                f"{directory} was trained from other files than {self.base} has now (fingerprint {trained}, now "
                f"{self.fingerprint}): restore them, or name a copy of them with --model, next to --runs or "
                "--initial_adapter."
            )


def model_source(asked: str | Path, checkpoint: str = LAST, on_hub: bool = True) -> ModelSource:
    """What a name means; UsageError for what is none of a model, an adapter or a run.

    Args:
        asked: An alias, a Hub id, or a directory of a model, of an adapter or of a run.
        checkpoint: Of a run: last, best or the number of a step.
        on_hub: Whether ``owner/name`` that is no directory is on the Hub.
    """
    asked = str(asked)
    name = hub_name(asked)
    if name == TINY:
        return ModelSource(asked, asked, str(TINY_BASE))
    if shipped := _shipped_instead(name):
        return ModelSource(asked, asked, shipped)
    if on_hub and is_hub_id(name):
        return ModelSource(asked, asked, name)
    directory = Path(name)
    if on_hub and not (asked and directory.is_dir()):
        known = f"{', '.join(MODEL_ALIASES)}, a Hub id (owner/name) or a directory with a config.json"
        raise UsageError(f"--model {asked!r} is unknown{nearest(asked, MODEL_ALIASES)}: pick {known}.")
    if has_weights(directory) and (checkpoint == LAST or not is_adapter(directory)):
        return _in(directory, asked)
    return _in(find_weights(asked, checkpoint, as_model=on_hub), asked, checkpoint)


def _in(weights: Path, asked: str, checkpoint: str | None = None) -> ModelSource:
    """The adapter or the model in a directory: of a run at a checkpoint, or named itself."""
    if not is_adapter(weights):
        name = asked if checkpoint is None else str(weights)
        # an adapter names its base by this path, from any working directory
        return ModelSource(asked, name, str(weights.absolute()), checkpoint=checkpoint)
    base = str(_read_json(weights / "adapter_config.json").get("base_model_name_or_path") or "")
    base = _shipped_instead(base) or base
    if base and Path(base).is_dir():
        base = str(Path(base).absolute())
    return ModelSource(asked, _ALIASES.get(base) or base, base, weights, checkpoint)


def is_hub_id(name: str) -> bool:
    """Whether a model is named as on the Hub, ``owner/name``, and is not a local path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).is_dir()


def title_of(base: str) -> str:
    """The name of a base, by its Hub id or path, in paths and in tables; ``tiny`` for every tiny base."""
    return TINY if (Path(base) / "tiny.json").is_file() else Path(base).name


def same_base(a: str, b: str) -> bool:
    """Whether two names mean the same model: equal names, the same directory, or a copy with the same last part.

    Copies are local directories (downloaded or moved) and Unsloth's: an adapter trained in 4 bit names
    ``unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit`` or similar.
    """
    if a == b:
        return True
    paths = Path(a), Path(b)
    exists = [path.exists() for path in paths]
    if all(exists):
        return paths[0].samefile(paths[1])
    plain = {re.sub("^meta-|(-unsloth)?(-bnb-4bit)?$", "", path.name.lower()) for path in paths}
    is_copy = any(exists) or any(path.parts[:1] == ("unsloth",) for path in paths)
    return is_copy and len(plain) == 1


def rank_of(lora: Values) -> int:
    """The largest rank of an adapter, by its LoRA settings."""
    return max(lora.get("r", 0), *(lora.get("rank_pattern") or {}).values(), 0)


def noted_in(lora: Values) -> Values:
    """What the training noted of the base in the LoRA settings: its fingerprint, and the 4-bit copy that was loaded."""
    return lora.get("auto_mapping") or {}


def _shipped_instead(path: str) -> str | None:
    """The tiny base here whose path another machine names; None for a path that exists, or is of none."""
    base = TINY_BASE.parent / Path(path).name
    if title_of(str(base)) != TINY or Path(path).exists():
        return None
    logger.warning("%s does not exist: using %s, whose weights may differ", path, base)
    return str(base)


def _read_json(path: Path) -> Values:
    return dict(json.loads(read_regular(path)))


_ALIASES = {target: alias for alias, target in MODEL_ALIASES.items()} | {str(TINY_BASE): TINY}
