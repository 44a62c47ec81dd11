"""The dataclasses of a run, made once of its settings."""

import copy
import logging
import os
from typing import Any

from gtpo.arguments import PromptArguments, Settings, Values, fields_of
from gtpo.cli.flags import Classes
from gtpo.models.backend import gpu_is_available
from gtpo.models.source import ModelSource
from gtpo.processes import check_launched

logger = logging.getLogger(__name__)

_OF_UNSLOTH = ("scale_rewards", "epsilon_high")  # that its config class changes for the losses dr_grpo and dapo


def build(method: str, classes: Classes, values: Values, changed: frozenset[str], source: ModelSource) -> Settings:
    """The settings of a run.

    Args:
        method: gtpo, grpo or sft.
        classes: The dataclasses of settings; the last one is TRL's config.
        values: Every setting.
        changed: Those that are not as in preset and defaults.
        source: The model.
    """
    *ours, trainer_class = classes
    values = dict(values)
    if token := values.pop("hub_token"):
        os.environ["HF_TOKEN"] = token  # where huggingface_hub looks for it; it is not stored
    raw = {name: values[name] for name in fields_of([trainer_class]) if name in values}
    asked = raw | {"push_to_hub": False}  # the trainer would upload every checkpoint
    if values["dry_run"] and not gpu_is_available():
        asked["use_cpu"] = True  # otherwise Transformers refuses bf16
    groups = _groups_of(ours, values)
    trainer = trainer_class(**copy.deepcopy(asked))
    if not values["dry_run"]:
        check_launched(trainer)
    _undo_changes_of_unsloth(trainer, asked)
    _take_names_of_main_process(trainer, raw)
    settings = Settings(method, trainer=trainer, given=raw, changed=changed, source=source, **groups)
    _warn_of_tags(settings)
    return settings


def _groups_of(classes: Classes, values: Values) -> Values:
    """Field of :class:`Settings` -> the dataclass of these settings, made of its values."""
    groups = {}
    for cls in classes:
        kind = PromptArguments if issubclass(PromptArguments, cls) else cls
        is_ours = kind.__module__ == Settings.__module__  # else it is that of an objective, under any name
        label = kind.__name__.removesuffix("Arguments").lower() if is_ours else "settings"
        groups[label] = kind(**{name: values[name] for name in fields_of([kind])})
    return groups


def _take_names_of_main_process(trainer: Any, raw: Values) -> None:
    """The clocks of several processes may give different names."""
    from torch import distributed

    if distributed.is_initialized():
        names = [raw["output_dir"], raw["run_name"]]
        distributed.broadcast_object_list(names)
        raw["output_dir"], raw["run_name"] = trainer.output_dir, trainer.run_name = names


def _undo_changes_of_unsloth(trainer: Any, asked: Values) -> None:
    for name in _OF_UNSLOTH:
        found, wanted = getattr(trainer, name, None), asked.get(name)
        if found != wanted:
            logger.warning("Unsloth changed %s from %s to %s: set back to %s", name, wanted, found, wanted)
            setattr(trainer, name, wanted)


def _warn_of_tags(settings: Settings) -> None:
    """Say which tags the system prompt lacks that the rewards look for."""
    system = settings.prompt.format.system_prompt
    rewards = settings.reward.reward if settings.reward else ()
    first = 0 if "format" in rewards else 2 if "accuracy" in rewards else 4
    missing = [tag for tag in settings.prompt.format_tags[first:] if system and tag not in system]
    if missing:
        logger.warning("--system_prompt lacks %s, which the rewards need: add them, or set --tags", " ".join(missing))
