"""Which models are evaluated: adapters of training runs, and the base model that they were trained from."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES, EvaluationArguments
from gtpo.backend import gpu_is_available
from gtpo.errors import UsageError, nearest
from gtpo.runs import RunDirectory, find_runs

logger = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
LAST = EvaluationArguments.checkpoint


@dataclass(frozen=True)
class Target:
    """One row of the table: an adapter, or the base model if ``adapter`` is None.

    Attributes:
        label: Name in paths and in the table; empty for the base model.
        adapter: Adapter directory.
        checkpoint: last, best or the number of a step; None if ``adapter`` was given directly.
    """

    label: str
    adapter: Path | None = None
    checkpoint: str | None = None


# Adapters


def newest_run() -> str:
    """The path of the newest finished run under outputs/.

    Raises:
        UsageError: If there is none.
    """
    runs = find_runs([OUTPUTS], finished=True)
    if not runs:
        raise UsageError(
            f"no finished run under {OUTPUTS}/: train one (`python train_gtpo.py --model tiny --dataset arithmetic` on "
            "a CPU), name a run with --adapter RUN, or evaluate a base model with --model tiny."
        )
    return str(runs[-1].path)


def find_targets(adapters: Sequence[str], model: str | None, checkpoint: str = LAST) -> list[Target]:
    """The targets in the order of ``--adapter``; without any, the base model that ``--model`` names.

    If several runs are given, an unfinished one is skipped with a warning.

    Raises:
        UsageError: If a run or adapter does not exist, none is finished, or two have the same label.
    """
    if not adapters:
        return [Target("")]
    if not model and set(adapters) == {"base"}:
        raise UsageError("--adapter base alone does not name a base model: add a run, or --model tiny|llama|qwen.")
    targets = []
    for name in adapters:
        try:
            targets.append(Target("") if name == "base" else adapter_target(name, checkpoint))
        except UsageError as error:
            if not Path(name).is_dir() or set(adapters) <= {name, "base"}:
                raise
            logger.warning("skipped: %s", error)
    if not any(target.adapter for target in targets) and set(adapters) != {"base"}:
        raise UsageError(f"none of --adapter {' '.join(adapters)} is finished: name a finished run.")
    labels = [target.label for target in targets]
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if duplicate is not None:
        raise UsageError(
            f"two of --adapter have the label {duplicate or 'base'!r}: name each only once, or evaluate them into "
            "different --output_dir."
        )
    return targets


def adapter_target(name: str, checkpoint: str = LAST) -> Target:
    """The adapter of a run at a checkpoint, or the adapter in the directory itself.

    Raises:
        UsageError: If there is no such adapter.
    """
    directory = Path(name)
    if not directory.is_dir():
        known = [str(run.path) for run in find_runs([OUTPUTS], finished=True)]
        raise UsageError(
            f"--adapter {name} is not a directory{nearest(name, known)}: expected a run directory or an adapter."
        )
    if _is_adapter(directory):
        if checkpoint != LAST:
            raise UsageError(f"--checkpoint {checkpoint} selects an adapter of a run, and {name} is an adapter itself.")
        return Target(label_of(directory), directory)
    run = RunDirectory(directory)
    adapter = {LAST: run.adapter, "best": run.best}.get(checkpoint, run.checkpoint(checkpoint))
    if not _is_adapter(adapter):
        available = _available_checkpoints(run)
        how = f"--checkpoint can be {', '.join(available)} here" if available else "its training has not finished"
        raise UsageError(f"{name} has no {adapter.name}/adapter_config.json: {how}.")
    suffix = "" if checkpoint == LAST else f"@{checkpoint}"
    return Target(label_of(directory) + suffix, adapter, checkpoint)


def label_of(directory: Path) -> str:
    """The label of a run: its path below outputs/, joined with dashes; elsewhere the name of the directory."""
    directory, root = directory.resolve(), OUTPUTS.resolve()
    if directory == RunDirectory(directory.parent).adapter:
        directory = directory.parent
    return "-".join(directory.relative_to(root).parts) if directory.is_relative_to(root) else directory.name


def adapter_config(adapter: Path) -> dict[str, Any]:
    """The LoRA settings that PEFT stores with an adapter.

    Raises:
        UsageError: If they cannot be read or do not name a base model, or the weights are missing.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}.") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UsageError(f"{path} has no base_model_name_or_path: add the Hub id or path of the base model.")
    if not (adapter / "adapter_model.safetensors").is_file():
        raise UsageError(f"{adapter} has no adapter_model.safetensors; adapter_model.bin, a pickle, is not supported.")
    return config


def max_lora_rank(targets: Sequence[Target]) -> int | None:
    """The largest rank of the adapters; None without adapters."""
    configs = [adapter_config(target.adapter) for target in targets if target.adapter]
    return max((max([config["r"], *config.get("rank_pattern", {}).values()]) for config in configs), default=None)


def _is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def _available_checkpoints(run: RunDirectory) -> list[str]:
    """The values of --checkpoint for which a run has an adapter."""
    prefix = run.checkpoint("").name
    steps = [path.name.removeprefix(prefix) for path in run.path.glob(f"{prefix}*") if _is_adapter(path)]
    named = {LAST: run.adapter, "best": run.best}
    return sorted([*steps, *(name for name, path in named.items() if _is_adapter(path))])


# The base model


def base_model(targets: Sequence[Target], model: str | None) -> str:
    """The base model that all adapters were trained from; without adapters, the one that ``--model`` names.

    Raises:
        UsageError: If an adapter names none, two name different ones, or it is a local directory that does not exist.
    """
    bases: dict[str, Path] = {}
    for target in targets:
        if target.adapter:
            bases.setdefault(adapter_config(target.adapter)["base_model_name_or_path"], target.adapter)
    first, *others = bases or [MODEL_ALIASES.get(str(model), str(model))]
    for other in others:
        if not same_model(first, other):
            raise UsageError(
                f"{bases[first]} was trained from {first} and {bases[other]} from {other}: evaluate them in two "
                "commands, `--regrade` prints all results in one table."
            )
    is_local = Path(first).is_absolute() or first.startswith(".") or first.count("/") > 1
    if bases and is_local and not model and not Path(first).exists():
        raise UsageError(
            f"{bases[first]} was trained from {first}, which does not exist: name the base model with --model "
            "(--model tiny builds the tiny one)."
        )
    return first


def resolve_base_model(base: str, targets: Sequence[Target], model: str | None) -> str:
    """The Hub id or path to load; the tiny base is built if it does not exist.

    Args:
        base: As :func:`base_model` returns it.
        targets: The targets.
        model: ``--model``, which overrides where the base model is loaded from.

    Raises:
        UsageError: If ``model`` is not the model that the adapters were trained from.
    """
    from gtpo.models import resolve_model

    resolved = resolve_model(model or base)
    if any(target.adapter for target in targets) and not same_model(resolved, base):
        raise UsageError(
            f"--model {model} is not the model that the adapter was trained from, {base}: remove --model, the adapter "
            "names its base model."
        )
    return resolved


def same_model(a: str, b: str) -> bool:
    """Whether two names mean the same model: equal names, the same directory, or a copy with the same last part.

    Copies are local directories (downloaded or moved) and Unsloth's: an adapter trained in 4 bit names
    ``unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit`` or similar.
    """
    exists = [Path(name).exists() for name in (a, b)]
    if a == b or all(exists):
        return a == b or Path(a).samefile(b)
    plain = [
        Path(name).name.lower().removesuffix("-bnb-4bit").removesuffix("-unsloth").removeprefix("meta-")
        for name in (a, b)
    ]
    return plain[0] == plain[1] and (any(exists) or "unsloth" in (a.partition("/")[0], b.partition("/")[0]))


def refuse_large_model_without_gpu(model: str) -> None:
    """Refuse the paper's models on a CPU; ``--backend transformers`` skips this check.

    Args:
        model: Alias, Hub id or path.

    Raises:
        UsageError: Without a GPU.
    """
    model = MODEL_ALIASES.get(model, model)
    large = any(same_model(model, MODEL_ALIASES[alias]) for alias in ("llama", "qwen"))
    if (large or model.endswith("bnb-4bit")) and not gpu_is_available():
        raise UsageError(
            f"{model} needs a GPU and PyTorch sees none here: check torch.cuda.is_available() and the NVIDIA driver "
            "(R580 or newer), evaluate --model tiny --benchmarks arithmetic on a CPU, or add --backend transformers "
            "(takes hours)."
        )


def is_tiny(model: str) -> bool:
    """Whether a resolved model is the tiny base."""
    return (Path(model) / "tiny.json").is_file()


def short_name(model: str) -> str:
    """The name of a resolved model in paths and in the table."""
    return "tiny" if is_tiny(model) else Path(model).name
