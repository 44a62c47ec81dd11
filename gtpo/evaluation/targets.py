"""Which models are evaluated: adapters of training runs, and the base model that they were trained from."""

import json
import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtpo.arguments import MODEL_ALIASES, PromptArguments, Values, hub_name, stored_prompt
from gtpo.errors import UsageError
from gtpo.files import fingerprint, read_regular
from gtpo.models.backend import gpu_is_available, is_installed
from gtpo.models.hub import check_model_files, is_tiny
from gtpo.models.load import NOTE, resolve_model
from gtpo.runs.directory import LAST, OUTPUTS, RunDirectory, find_weights, is_adapter, label_of, own_runs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """One row of the table: an adapter, or the base model if ``adapter`` is None."""

    label: str  # in paths and in the table; empty for the base model
    adapter: Path | None = None  # its directory
    checkpoint: str | None = None  # last, best or the number of a step; None if the adapter was given directly


Targets = Sequence[Target]


def find_targets(
    adapters: Sequence[str],
    model: str | None,
    checkpoint: str = LAST,
) -> list[Target]:
    """The targets in the order of ``--runs``; without any, the base model that ``--model`` names, or the newest run."""
    if not adapters and model is None:
        runs = own_runs(having="weights")
        if not runs:
            raise UsageError(f"no finished run under {OUTPUTS}/: train one, name one with --runs, or add --model tiny.")
        adapters = [str(runs[-1].path)]
        logger.warning("evaluating %s, the newest finished run; --runs selects others", adapters[0])
    targets = []
    for name in adapters or ["base"]:
        targets.append(Target("") if name == "base" else adapter_target(name, checkpoint))
    found = _adapters(targets)
    for adapter in found:
        check_model_files(adapter)
    if not found and checkpoint != LAST:
        raise UsageError(f"--checkpoint {checkpoint}: the base model has no checkpoints, name a run with --runs.")
    if not found and model is None:
        raise UsageError("--runs base alone does not name a base model: add a run, or --model tiny|smol|llama|qwen.")
    return targets


def adapter_target(name: str, checkpoint: str = LAST) -> Target:
    """The adapter of a run at a checkpoint, or the adapter in the directory itself."""
    directory = Path(name)
    if checkpoint == LAST and is_adapter(directory):
        return Target(label_of(directory), directory)
    adapter = find_weights(name, checkpoint)
    if not is_adapter(adapter):
        model = shlex.quote(str(adapter))
        raise UsageError(f"{name} trained all weights and has no adapter: evaluate it with --model {model}.")
    label = label_of(directory)
    if checkpoint != LAST:
        label += f"@{checkpoint}"
    return Target(label, adapter, checkpoint)


def adapter_config(adapter: Path) -> Values:
    """The LoRA settings that PEFT stores with an adapter."""
    path = adapter / "adapter_config.json"
    config = json.loads(read_regular(path))
    is_lora = config.get("peft_type") == "LORA" and config.get("base_model_name_or_path")
    if not is_lora or config.get("layer_replication") or _rank_of(config) > 4096:  # a stranger's could fill memory
        raise UsageError(f"{path}: expected peft_type LORA, base_model_name_or_path, r to 4096, no layer_replication.")
    return config


def _rank_of(config: Values) -> int:
    """The largest rank of an adapter."""
    return max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)


def _noted(config: Values) -> Values:
    """What our trainer noted of the base model in the config of an adapter."""
    return config.get("auto_mapping") or {}


def max_lora_rank(targets: Targets) -> int | None:
    """The largest rank of the adapters; None without adapters."""
    return max((_rank_of(adapter_config(adapter)) for adapter in _adapters(targets)), default=None)


def _adapters(targets: Targets) -> list[Path]:
    return [target.adapter for target in targets if target.adapter]


def choose_4bit(asked: bool | None, targets: Targets) -> bool:
    """Whether the base model is loaded in 4 bits: as asked, or as it was when the adapters were trained.

    Without a GPU or bitsandbytes an adapter trained on 4-bit weights is evaluated on 16 or 32 bits, with a warning.
    """
    if asked is not None:
        return asked
    trained = {bool(_run_settings(adapter).get("load_in_4bit")) for adapter in _adapters(targets)}
    if len(trained) > 1:
        raise UsageError("some of --runs were trained on 4-bit weights, others not: set --load_in_4bit.")
    if True not in trained:
        return False
    is_possible = gpu_is_available() and is_installed("bitsandbytes")
    if not is_possible:
        logger.warning("the training had 4-bit weights, which need a GPU and bitsandbytes: the evaluation has others")
    return is_possible


def warn_of_sampling(targets: Targets, model: str, asked: Values) -> None:
    """Log where the policy of a run is sampled otherwise than in its training; greedy samples are of no temperature."""
    for target in targets:
        weights = target.adapter or Path(model)
        trained = RunDirectory(weights.resolve().parent).read_config()
        for name, value in asked.items():
            if asked["temperature"] and trained.get(name, value) != value:
                logger.warning(
                    "%s was trained with --%s %s, and is sampled with %s", weights, name, trained[name], value
                )


def choose_prompts(
    asked: Values,
    targets: Targets,
    model: str = "",
) -> list[PromptArguments]:
    """How each target is asked: as the run of an adapter or model was trained, or as the flags say.

    The base model gets the prompt of the adapters evaluated with it. Alone, ``model`` can be the final or merged model
    of a run.
    """
    prompts = {}
    for target in targets:
        if target.adapter:
            trained = _run_settings(target.adapter)
            if not trained:
                logger.warning("%s does not name its prompt: flags and the paper's are used", target.adapter)
            prompts[target] = PromptArguments(**stored_prompt(trained) | asked)
    of_model = {}
    if Path(model).is_dir():
        of_model = stored_prompt(_run_settings(Path(model)))
    first, *others = prompts.values() or [PromptArguments(**of_model | asked)]
    for name, value in vars(first).items():
        if len(prompts) < len(targets) and any(getattr(other, name) != value for other in others):
            raise UsageError(f"the runs differ in --{name}, so that of the base model is ambiguous: set --{name}.")
    return [prompts.get(target, first) for target in targets]


def _run_settings(weights: Path) -> Values:
    """The settings that were saved with an adapter or model, else those of the run around it; empty without both."""
    saved = weights / "tokenizer_config.json"
    if saved.is_file():
        noted = json.loads(saved.read_bytes()).get(NOTE)
        if noted:
            return dict(noted)
    return RunDirectory(weights.resolve().parent).read_config()


def choose_model(
    targets: Targets,
    asked: str | None,
    slow: bool = False,
) -> str:
    """The Hub id or path of the base model that all adapters were trained from; without adapters, ``asked``.

    ``asked``, the flag ``--model``, overrides where it is loaded from; ``slow`` accepts the paper's models on a CPU.
    An adapter that was trained on another model's 4-bit copy is evaluated with a warning.
    """
    asked = asked and hub_name(asked)
    configs = {adapter: adapter_config(adapter) for adapter in _adapters(targets)}
    bases = {config["base_model_name_or_path"]: adapter for adapter, config in configs.items()}
    first, *others = bases or [str(asked)]
    for other in others:
        if not same_model(first, other):
            raise UsageError(f"{bases[first]} was trained from {first}, {bases[other]} from {other}: use two commands.")
    is_large = any(same_model(asked or first, MODEL_ALIASES[alias]) for alias in ("llama", "qwen"))
    if is_large and not slow and not gpu_is_available():
        raise UsageError(f"{first} needs a GPU and PyTorch sees none: add --backend transformers (takes hours).")
    model = resolve_model(asked or first)
    if bases and not same_model(model, first):
        raise UsageError(f"--model {asked} is not what the adapter was trained from, {first}: remove --model.")
    for adapter, config in configs.items():
        trained = _noted(config).get("loaded_from") or config["base_model_name_or_path"]
        if trained.endswith("bnb-4bit") and Path(trained).name != Path(model).name:
            logger.warning(
                "%s was trained on the 4-bit weights of %s and is evaluated on others: add --model %s",
                *(adapter, trained, trained),
            )
    return model


def check_base(model: str, targets: Targets) -> str:
    """The fingerprint of the base model's directory, or its Hub id; UsageError if an adapter was trained from others.

    Adapters of a base on the Hub, and of earlier revisions, have no fingerprint of it.
    """
    found = fingerprint(model)
    for adapter in _adapters(targets):
        trained = _noted(adapter_config(adapter)).get("base_fingerprint")
        if trained and found and trained != found:
            raise UsageError(
                f"{adapter} was trained from other files than {model} has now (fingerprint {trained}, now "
                f"{found}): restore them, or name a copy of them with evaluate.py --model."
            )
    return found or model


def same_model(a: str, b: str) -> bool:
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


def model_label(model: str, targets: Targets) -> str:
    """The label of the row without an adapter: the base model, or, alone, the merged or final model of a run."""
    if _run_settings(Path(model)) and not any(target.adapter for target in targets):
        return f"model-{label_of(Path(model))}"
    return f"base-{short_name(model)}"


def short_name(model: str) -> str:
    """The name of a resolved model in paths and in the table."""
    return "tiny" if is_tiny(model) else Path(model).name
