"""Which models are evaluated: adapters of training runs, and the base model that they were trained from."""

import json
import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES, EvaluationArguments, PromptArguments, stored_prompt
from gtpo.errors import UsageError, nearest
from gtpo.machine.backend import gpu_is_available, is_installed
from gtpo.models.files import check_model_files
from gtpo.models.load import resolve_model
from gtpo.models.tiny import is_tiny_path
from gtpo.runs.directory import OUTPUTS, RunDirectory, find_runs, label_of

logger = logging.getLogger(__name__)

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


def newest_run() -> RunDirectory:
    """The newest finished run under outputs/.

    Raises:
        UsageError: If there is none.
    """
    runs = find_runs([OUTPUTS], having="weights")
    if not runs:
        raise UsageError(
            f"no finished run under {OUTPUTS}/: train one (`python train_gtpo.py --model tiny --dataset arithmetic` on "
            "a CPU), name a run with --runs RUN, or evaluate a base model with --model tiny."
        )
    return runs[-1]


def trained_on(run: RunDirectory) -> str:
    """`` (tiny, trained on arithmetic)``; empty for a run without settings."""
    stored = _run_settings(run.adapter)
    known = "model" in stored and "dataset" in stored
    return f" ({Path(str(stored['model'])).name}, trained on {Path(str(stored['dataset'])).name})" if known else ""


def find_targets(adapters: Sequence[str], model: str | None, checkpoint: str = LAST) -> list[Target]:
    """The targets in the order of ``--runs``; without any, the base model that ``--model`` names.

    If several runs are given, an unfinished one is skipped with a warning.

    Raises:
        UsageError: If a run or adapter does not exist or is damaged, none is finished, or two have the same label.
    """
    if not adapters:
        return [Target("")]
    if not model and set(adapters) == {"base"}:
        raise UsageError("--runs base alone does not name a base model: add a run, or --model tiny|llama|qwen.")
    targets = []
    for name in adapters:
        try:
            targets.append(Target("") if name == "base" else adapter_target(name, checkpoint))
        except UsageError as error:
            if not Path(name).is_dir() or set(adapters) <= {name, "base"}:
                raise
            logger.warning("skipped: %s", error)
    if not any(target.adapter for target in targets) and set(adapters) != {"base"}:
        raise UsageError(f"none of --runs {' '.join(adapters)} is finished: name a finished run.")
    labels = [target.label for target in targets]
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if duplicate is not None:
        raise UsageError(
            f"two of --runs have the label {duplicate or 'base'!r}: name each only once, or evaluate them into "
            "different --output_dir."
        )
    for target in targets:
        if target.adapter:
            check_model_files(target.adapter)
            adapter_config(target.adapter)
    return targets


def adapter_target(name: str, checkpoint: str = LAST) -> Target:
    """The adapter of a run at a checkpoint, or the adapter in the directory itself.

    Raises:
        UsageError: If there is no such adapter.
    """
    directory = Path(name)
    if not directory.is_dir():
        known = [str(run.path) for run in find_runs([OUTPUTS], having="weights")]
        raise UsageError(
            f"--runs {name} is not a directory{nearest(name, known)}: expected a run directory or an adapter."
        )
    if _is_adapter(directory):
        if checkpoint != LAST:
            raise UsageError(f"--checkpoint {checkpoint} selects an adapter of a run, and {name} is an adapter itself.")
        return Target(label_of(directory), directory)
    run = RunDirectory(directory)
    if (run.model / "config.json").is_file():
        model = run.model if checkpoint == LAST else run.best if checkpoint == "best" else run.checkpoint(checkpoint)
        raise UsageError(
            f"{name} trained all weights and has no adapter: evaluate it with --model {shlex.quote(str(model))}."
        )
    adapter = {LAST: run.adapter, "best": run.best}.get(checkpoint, run.checkpoint(checkpoint))
    if not _is_adapter(adapter):
        available = _available_checkpoints(run)
        runs = [] if available else [str(run.path) for run in reversed(find_runs([directory], having="weights"))]
        if runs:
            more = f" and {len(runs) - 5} more" * (len(runs) > 5)
            raise UsageError(
                f"--runs {name} is a directory of runs, expected a run: name one of {', '.join(runs[:5])}{more}."
            )
        how = f"--checkpoint can be {', '.join(available)} here" if available else "its training has not finished"
        raise UsageError(f"{name} has no {adapter.name}/adapter_config.json: {how}.")
    suffix = "" if checkpoint == LAST else f"@{checkpoint}"
    return Target(label_of(directory) + suffix, adapter, checkpoint)


def adapter_config(adapter: Path) -> dict[str, Any]:
    """The LoRA settings that PEFT stores with an adapter.

    Raises:
        UsageError: If they cannot be read, are not those of a LoRA adapter, do not name a base model, or contain a
            regular expression; or if the weights are missing.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}.") from error
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not base or not isinstance(base, str):
        raise UsageError(f"{path} has no base_model_name_or_path: add the Hub id or path of the base model.")
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{path}: peft_type is {config.get('peft_type')!r}, only LORA adapters can be evaluated.")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise UsageError(f"{path}: {field} is {config[field]!r}, expected module names with a number each.")
    if not all(type(rank) is int and rank > 0 for rank in _ranks(config)):
        raise UsageError(f"{path}: r and rank_pattern are {_ranks(config)}, expected positive integers.")
    if not isinstance(config.get("target_modules"), list | str | None):
        raise UsageError(f"{path}: target_modules is {config['target_modules']!r}, expected a list of module names.")
    for field, name in _module_names(config):
        if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
            raise UsageError(
                f"{path}: {field} contains {name!r}, expected the name of a module: replace a regular expression "
                '(matching it may take forever) by a list such as ["q_proj", "v_proj"].'
            )
    if not (adapter / "adapter_model.safetensors").is_file():
        raise UsageError(f"{adapter} has no adapter_model.safetensors: save it again with PEFT's save_pretrained.")
    return config


_MODULE_NAME = re.compile(r"[\w.\-^$\\]+")  # may be anchored or escaped; without a repetition it matches in linear time


def _module_names(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What PEFT matches against the names of the model's modules, most of it as regular expressions."""
    for field in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = config.get(field) or []
        yield from ((field, name) for name in (value if isinstance(value, list) else [value]))
    for field in ("rank_pattern", "alpha_pattern"):
        yield from ((field, name) for name in config.get(field) or {})


def _ranks(config: dict[str, Any]) -> list[Any]:
    return [config.get("r"), *(config.get("rank_pattern") or {}).values()]


def max_lora_rank(targets: Sequence[Target]) -> int | None:
    """The largest rank of the adapters; None without adapters."""
    configs = [adapter_config(target.adapter) for target in targets if target.adapter]
    return max((max(_ranks(config)) for config in configs), default=None)


def choose_4bit(asked: bool | None, targets: Sequence[Target]) -> bool:
    """Whether the base model is loaded in 4 bits: as asked, or as it was when the adapters were trained.

    Without a GPU or bitsandbytes an adapter trained on 4-bit weights is evaluated on 16 or 32 bits, with a warning.

    Args:
        asked: ``--load_in_4bit``; None if it is not given.
        targets: The targets.

    Raises:
        UsageError: If 4 bits are asked for and impossible, or the adapters were trained with different weights.
    """
    lacking = "a GPU" if not gpu_is_available() else "" if is_installed("bitsandbytes") else "bitsandbytes"
    if asked is not None:
        if asked and lacking:
            raise UsageError(f"--load_in_4bit needs {lacking}, which this machine lacks: set --load_in_4bit false.")
        return asked
    trained = {
        bool(_run_settings(target.adapter).get("load_in_4bit")): target.adapter for target in targets if target.adapter
    }
    if len(trained) > 1:
        raise UsageError(
            f"{trained[True]} was trained on 4-bit weights and {trained[False]} was not: set --load_in_4bit true or "
            "false for both, or evaluate them in two commands."
        )
    if True in trained and lacking:
        logger.warning(
            "%s was trained on 4-bit weights, which need %s: it is evaluated on 16- or 32-bit weights",
            trained[True],
            lacking,
        )
    return True in trained and not lacking


def choose_prompts(asked: dict[str, Any], targets: Sequence[Target], model: str = "") -> list[PromptArguments]:
    """How each target is asked: as the run of an adapter or model was trained, or as the flags say.

    The base model beside adapters is asked as they are. What is not the paper's is logged.

    Args:
        asked: The settings that are given as flags.
        targets: The targets.
        model: The base model, which can be the final or merged model of a run.

    Raises:
        UsageError: If a run has invalid settings, or the base model is beside runs that differ.
    """
    weights = {target: target.adapter for target in targets if target.adapter}
    prompts = {t: PromptArguments(**(stored_prompt(_run_settings(path)) | asked)) for t, path in weights.items()}
    of_model = stored_prompt(_run_settings(Path(model))) if Path(model).is_dir() else {}
    first = next(iter(prompts.values()), PromptArguments(**(of_model | asked)))
    if len(prompts) < len(targets) and (other := next((t for t, prompt in prompts.items() if prompt != first), None)):
        name = _differing(first, prompts[other])[0]
        raise UsageError(
            f"{next(iter(prompts)).adapter} and {other.adapter} were trained with another --{name}, which leaves "
            f"open how the base model is asked: set --{name}, or evaluate them in two commands."
        )
    chosen = [prompts.get(target, first) for target in targets]
    for target, prompt in zip(targets, chosen, strict=True):
        if changed := _differing(PromptArguments(), prompt):
            flags = ", ".join(f"--{name} {getattr(prompt, name)!r}" for name in changed)
            logger.warning("%s is asked with %s", target.label or "the base model", flags)
    return chosen


def _differing(a: PromptArguments, b: PromptArguments) -> list[str]:
    return [name for name, value in vars(a).items() if value != vars(b)[name]]


def _run_settings(weights: Path) -> dict[str, Any]:
    """The settings of the run of an adapter or model; empty outside a run."""
    run = RunDirectory(weights.resolve().parent)
    return run.read_config() if run.config.is_file() else {}


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
            named = adapter_config(target.adapter)["base_model_name_or_path"]
            bases.setdefault(_find_base(named, target.adapter), target.adapter)
    first, *others = bases or [MODEL_ALIASES.get(str(model), str(model))]
    for other in others:
        if not same_model(first, other):
            raise UsageError(
                f"{bases[first]} was trained from {first} and {bases[other]} from {other}: evaluate them in two "
                "commands, `--regrade` prints all results in one table."
            )
    if bases and _is_path(first) and not model and not Path(first).exists() and not is_tiny_path(first):
        raise UsageError(
            f"{bases[first]} was trained from {first}, which does not exist: name the base model with --model "
            "(--model tiny is the tiny one)."
        )
    return first


def _find_base(name: str, adapter: Path) -> str:
    """The base model of an adapter: a relative path is looked up here and above the adapter, where the run started."""
    directories = [Path(), *adapter.resolve().parents] if _is_path(name) or "/" not in name else []
    return next((str(directory / name) for directory in directories if (directory / name).is_dir()), name)


def _is_path(model: str) -> bool:
    """Whether a model can only be a local path: a Hub id is owner/name."""
    return Path(model).is_absolute() or model.startswith(".") or model.count("/") > 1


def choose_model(targets: Sequence[Target], asked: str | None, slow: bool = False) -> str:
    """The Hub id or path of the base model of the targets; the tiny base is built if it does not exist.

    Args:
        targets: The targets.
        asked: ``--model``, which overrides where the base model is loaded from.
        slow: Accept the paper's models on a CPU.

    Raises:
        UsageError: As :func:`base_model`, :func:`refuse_large_model_without_gpu` and :func:`resolve_model`; or if
            ``asked`` is not the model that the adapters were trained from.
    """
    base = base_model(targets, asked)
    if not slow:
        refuse_large_model_without_gpu(asked or base)
    model = resolve_model(asked or base)
    if any(target.adapter for target in targets) and not same_model(model, base):
        raise UsageError(
            f"--model {asked} is not the model that the adapter was trained from, {base}: remove --model, the adapter "
            "names its base model."
        )
    return model


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
