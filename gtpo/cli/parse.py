"""From presets, YAML files and the command line to dataclasses.

Precedence, lowest first: the preset of method and model (``configs/<method>/<model>.yaml``), the file given with
``--config``, the command line. A YAML key is a flag without its dashes: one parser checks both, and an unknown key is
an error that names it. Presets are part of the repository, not of the installed package.
"""

import argparse
import copy
import dataclasses
import json
import logging
import os
import shlex
import sys
import time
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from gtpo.arguments import (
    MODEL_ALIASES,
    DataArguments,
    ModelArguments,
    RunArguments,
    Settings,
    fields_of,
    name_of,
    stored_prompt,
)
from gtpo.cli.flags import (
    REMOVED,
    TRUE,
    check_flags,
    given_on,
    one_spelling,
    refuse_unknown,
    similar,
    without_alias,
)
from gtpo.cli.validation import batch_geometry, check_values, evaluation_settings
from gtpo.errors import UsageError, first_line, nearest
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.backend import (
    check_driver,
    choose_training_backend,
    gpu_is_available,
    limit_openmp_spinning,
    load_backend,
)
from gtpo.models.hub import check_model_name
from gtpo.runs.directory import OUTPUTS, RunDirectory, find_runs, method_of
from gtpo.runs.start import check_same_policy

logger = logging.getLogger(__name__)
_T = typing.TypeVar("_T")

limit_openmp_spinning(os.environ)  # OpenMP reads it when PyTorch is imported

HELP_FLAGS = {"-h", "--help"}
COMMAND_LINE_ONLY = ("config", "help", "dry_run", "resume", "overwrite", "regrade", "compare")
DERIVED = (  # from other settings, unless given
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
)

_UNSLOTH_RESOLVES = {  # changes that its trainer needs, none of which changes what is computed
    "top_k",  # 0 and -1: every token
    "gradient_checkpointing_kwargs",  # {"use_reentrant": True}
    "dataset_num_proc",  # the number of cores
}


def load_backend_from_flags(method: str, classes: Sequence[type], argv: Sequence[str] | None = None) -> str:
    """:func:`gtpo.models.backend.load_backend` for a command line; the first call of a train script.

    The names of the flags are checked first, because all that follows takes seconds.

    Args:
        method: gtpo, grpo or sft.
        classes: The dataclasses of the script, without TRL's trainer config.
        argv: Command line without the program; ``sys.argv[1:]`` by default.

    Returns:
        "unsloth" or "transformers"; with ``--dry_run`` neither GPU nor packages are needed.

    Raises:
        UsageError: As for ``load_backend``, if a flag is invalid, or a file that the flags name cannot be read.
    """
    argv = [without_alias(word) for word in (sys.argv[1:] if argv is None else argv)]
    if not HELP_FLAGS & set(argv):
        check_flags(argv, "sft_config" if method == "sft" else "grpo_config", classes)
    early = _early_flags(method, argv)
    load = choose_training_backend if early.dry_run else load_backend
    return load(early.backend, early.model)


def parse(method: str, classes: Sequence[type], argv: Sequence[str] | None = None) -> Settings:
    """Read preset, ``--config`` and command line of a training run.

    Args:
        method: gtpo, grpo or sft: the preset directory, and the first part of the run's name.
        classes: The dataclasses; the last one is TRL's trainer config.
        argv: Command line without the program; ``sys.argv[1:]`` by default.

    Raises:
        UsageError: If a key or value is invalid.
        SystemExit: After ``--help``.
    """
    argv = [without_alias(word) for word in (sys.argv[1:] if argv is None else argv)]
    if HELP_FLAGS & set(argv):
        asked = _known_flags([word for word in argv if word not in HELP_FLAGS], "model").model
        preset = preset_for(method, asked or "tiny", dry_run=True)
        _print_help(classes, read_yaml(preset))
    early = _early_flags(method, argv)
    if early.resume not in (None, "auto"):
        _check_resumed(method, early)
    if not early.of_run:
        check_model_name(early.model)
    preset = preset_for(method, early.model, early.backend, early.dry_run)
    values = _read(classes, [preset, *([early.config] if early.config else [])], argv, _machine_flags(early, preset))
    check_values(values)
    given = set(given_on(argv))
    if early.of_run:
        values |= {name: value for name, value in stored_prompt(values).items() if name not in given}
    plain = _read(classes, [preset], [])
    changed = frozenset(name for name, value in values.items() if value != plain[name])
    if early.resume not in (None, "auto"):
        _check_rewards_of(RunDirectory(early.resume), values.get("reward", []), "reward" in given or not early.of_run)
    is_free = not (values["per_device_train_batch_size"] or values["gradient_accumulation_steps"])
    if preset.stem in ("cpu", "smol") and is_free and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        from gtpo.models.memory import rows_that_fit  # imports torch

        values["per_device_train_batch_size"] = rows_that_fit(values)
    values |= _batch_sizes(values, given)
    values |= evaluation_settings(values, given, int(os.environ.get("WORLD_SIZE", 1)))
    if "run_name" in given and "output_dir" not in given:
        values["output_dir"] = None  # of the --config
    if early.resume not in (None, "auto"):
        values["resume"] = values["output_dir"] = early.resume
    name = values["run_name"] or time.strftime("%Y%m%d-%H%M%S")
    values["output_dir"] = values["output_dir"] or _named_run(method, early.model, values["dataset"], name)
    values["run_name"] = values["run_name"] or Path(values["output_dir"]).name
    if values.get("use_vllm") and values["vllm_mode"] == "colocate":  # TRL's names for two settings of ours
        values["vllm_gpu_memory_utilization"] = (
            values["vllm_gpu_memory_utilization"] or values["gpu_memory_utilization"]
        )
        values["vllm_max_model_length"] = values["vllm_max_model_length"] or values["max_seq_length"]
    return _build_settings(method, classes, values, changed)


def parse_evaluation(cls: type[_T], argv: Sequence[str] | None = None) -> tuple[_T, set[str]]:
    """An evaluation's settings ``cls`` from ``--config`` and the command line, and the names of those that are given.

    Raises:
        UsageError: If a key or value is invalid.
        SystemExit: After ``--help``.
    """
    argv = [without_alias(word) for word in (sys.argv[1:] if argv is None else argv)]
    if HELP_FLAGS & set(argv):
        _print_help([cls], {})
    config = _known_flags(argv, "config").config
    arguments = cls(**_read([cls], [config] if config else [], argv))
    return arguments, {*given_on(argv), *map(name_of, read_yaml(config) if config else ())}


# Presets and the machine


def preset_for(method: str, model: str, backend: str | None = None, dry_run: bool = False) -> Path:
    """The preset of a model: its own; for another model Qwen's on a GPU and ``cpu.yaml`` without.

    ``smol.yaml`` is for a CPU: on a GPU SmolLM2 takes Qwen's too. A directory with its name counts as SmolLM2.

    A dry run plans a llama or qwen run for a GPU where there is none.

    Raises:
        UsageError: If the model or backend needs a GPU, there is none, and this is not a dry run.
    """
    alias = next((alias for alias, target in MODEL_ALIASES.items() if model in (alias, target)), None)
    if alias == "tiny" and backend == "unsloth":
        raise UsageError("--backend unsloth does not train --model tiny: remove --backend.")
    large = alias in ("llama", "qwen") or backend == "unsloth"
    if alias != "tiny" and (gpu_is_available() or (dry_run and large)):
        return CONFIGS / method / f"{alias if alias in ('llama', 'qwen') else 'qwen'}.yaml"
    if large:
        raise UsageError(
            check_driver()
            or f"--model {model} {'with --backend unsloth ' if backend == 'unsloth' else ''}trains on a GPU (4-bit "
            f"weights, vLLM) and PyTorch sees none here: run `python train_{method}.py --model tiny --dataset "
            "arithmetic` on a CPU, or check torch.cuda.is_available() and the NVIDIA driver (R580 or newer)."
        )
    if alias != "tiny" and (fault := check_driver()):
        logger.warning("training runs on the CPU: %s", fault)
    if alias is None:
        alias = "smol" if Path(model).name == Path(MODEL_ALIASES["smol"]).name else "cpu"
    return CONFIGS / method / f"{alias}.yaml"


def _machine_flags(early: argparse.Namespace, preset: Path) -> list[str]:
    """Flags that adapt a preset to this machine; --config and the command line override them."""
    import torch

    settings, flags = read_yaml(preset), []
    has_gpu = torch.cuda.is_available()
    if settings.get("bf16") and has_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        flags += ["--bf16=false", "--fp16=true"]
    if early.backend == "transformers" and settings.get("use_vllm") and settings.get("load_in_4bit"):
        flags += ["--load_in_4bit=false"]  # TRL cannot sync 4-bit weights to vLLM
    name = settings.get("model", "tiny")
    if "entropy_filter" in settings and early.model not in (name, MODEL_ALIASES[name]):
        flags += ["--entropy_filter=auto"]  # Eq. 10; the preset has what the paper found for its own model
    return flags


# Resumed runs


def _check_resumed(method: str, early: argparse.Namespace) -> None:
    """Refuse a run of another method or model before a preset is chosen for it."""
    run = RunDirectory(early.resume)
    if run.config.is_file() and (of_run := method_of(run)) not in (None, method):
        raise UsageError(f"{run.path} is a run of train_{of_run}.py: resume it with that script.")
    check_same_policy(run, {"model": early.model})


def _newest_run(method: str) -> str:
    """The newest run of a method below outputs/ that has a checkpoint; an unfinished one before a finished one."""
    runs = [run for run in find_runs([OUTPUTS]) if run.has_checkpoint and method_of(run) == method]
    if not runs:
        raise UsageError(f"--resume: outputs/ has no run of train_{method}.py with a checkpoint: name or start one.")
    return str(([run for run in runs if not run.is_finished] or runs)[-1].path)


def _named_run(method: str, model: str, dataset: str, run_name: str) -> str:
    """The directory of a run without --output_dir."""
    return str(OUTPUTS / f"{method}-{Path(model).name}-{Path(dataset).name.partition('.')[0]}-{run_name}")


def _check_rewards_of(run: RunDirectory, names: Sequence[str], named_by_user: bool) -> None:
    """Refuse to import Python code that only config.yaml names: the run may be a stranger's."""
    code = [name for name in names if ":" in name]
    if code and not named_by_user:
        raise UsageError(
            f"{run.config} names the reward {code[0]}, which --resume does not import automatically because it is "
            f"code: if you trust it, add --reward {shlex.join(names)}."
        )


# The parser


def _batch_sizes(values: Mapping[str, Any], given: set[str]) -> dict[str, int]:
    """Batch size and accumulation; those of a file give way where G or prompts_per_step on the command line need it."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    batch, steps = (values[name] for name in names)
    may_differ = not given & set(names) and bool(given & {"num_generations", "prompts_per_step"})
    attempts = [(batch, steps), *([(batch, None), (None, None)] if may_differ else [])]
    for tried in attempts:
        try:
            sizes = batch_geometry(
                values.get("num_generations", 1),
                values["prompts_per_step"],
                *tried,
                processes=int(os.environ.get("WORLD_SIZE", 1)),
            )
        except UsageError:
            if tried == attempts[-1]:
                raise
        else:
            break
    if tried != attempts[0]:
        logger.warning(
            "%s is %d and %s is %d, not %s and %s as in the file", names[0], sizes[0], names[1], sizes[1], batch, steps
        )
    return dict(zip(names, sizes, strict=True))


def _early_flags(method: str, argv: Sequence[str]) -> argparse.Namespace:
    """Model, backend, config, resume and dry_run: what decides how everything else is read, before TRL is imported.

    ``resume`` is a directory, None, or "auto" for a directory that does not exist; ``of_run`` says
    whether the settings are those that the run has stored.

    Raises:
        UsageError: If a file that they name cannot be read, or no run can be resumed.
    """
    names = ("model", "backend", "config", "dataset", "output_dir", "run_name")
    early = _known_flags(argv, *names, resume="auto", dry_run="true")
    early.dry_run = (early.dry_run or "").lower() in TRUE
    if early.resume == "auto" and (early.output_dir or (early.run_name and not early.config)):
        directory = early.output_dir
        if directory is None:
            model = early.model or ModelArguments.model
            preset = read_yaml(preset_for(method, model, early.backend, early.dry_run))
            dataset = early.dataset or preset.get("dataset", DataArguments.dataset)
            directory = _named_run(method, model, dataset, early.run_name)
        early.resume = directory if RunDirectory(directory).config.is_file() else "auto"
    elif early.resume == "auto" and not early.config:
        early.resume = _newest_run(method)
    early.of_run = early.resume not in (None, "auto") and early.config is None
    if early.resume not in (None, "auto"):
        run = RunDirectory(early.resume)
        early.config = early.config or str(run.config)
        if not run.path.is_dir():
            known = [str(other.path) for other in find_runs([OUTPUTS])]
            raise UsageError(f"--resume: {early.resume} is not a directory{nearest(early.resume, known)}: name a run.")
        if early.of_run and not run.config.is_file():
            inside = ", ".join(str(other.path) for other in find_runs([run.path])[-3:])
            runs = f"name one of {inside}" if inside else "name a run"
            raise UsageError(f"--resume: {early.resume} is not a run (it has no config.yaml): {runs}.")
    settings = read_yaml(early.config) if early.config else {}
    early.model = early.model or settings.get("model") or ModelArguments.model
    early.backend = early.backend or settings.get("backend") or ModelArguments.backend
    return early


def _known_flags(argv: Sequence[str], *names: str, **optional: str) -> argparse.Namespace:
    """Some options of a command line, None where not given; ``optional``: name -> its value without an argument."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name, alone in optional.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const=alone)
    try:
        return parser.parse_known_args(list(argv))[0]
    except argparse.ArgumentError as error:
        raise UsageError(one_spelling(error)) from error


def _parser(classes: Sequence[type]) -> argparse.ArgumentParser:
    """A flag for each field of some dataclasses, in the groups that they name."""
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool

    parser: argparse.ArgumentParser = HfArgumentParser(
        classes,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        conflict_handler="resolve",  # max_seq_length is also a field of the SFTConfig that Unsloth generates
    )
    for action in parser._actions:
        if action.type is string_to_bool and action.nargs is None:  # `bool | None`: --bf16 alone is true
            action.nargs, action.const = "?", True
        elif action.dest == "report_to":
            action.nargs = "+"
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    parser.add_argument("--help", action="store_true", help="Show this page.")
    if RunArguments in classes:
        parser.set_defaults(**{name: None for name in DERIVED if name in fields_of(classes)})
    return parser


def _print_help(classes: Sequence[type], defaults: Mapping[str, Any]) -> NoReturn:
    """Print every option of a script, with the values of a preset as defaults, and exit."""
    parser = _parser(classes)
    parser.usage, parser.formatter_class = "%(prog)s [--config FILE] [--key value ...]", _Help
    parser.description = sys.modules["__main__"].__doc__
    parser.epilog = "--G is short for --num_generations. --debug shows the traceback of an error."
    parser.set_defaults(**defaults)
    for action in parser._actions:
        action.option_strings = action.option_strings[:1]  # not --max-steps too
        if action.choices and len(list(action.choices)) > 5:
            action.metavar = "NAME"
    _, options, *ours = parser._action_groups
    options.title = "TRL and Transformers" if ours else "options"
    parser._action_groups = [*ours, options]
    parser.print_help()
    raise SystemExit(0)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is, and the default of each option."""


def _read(
    classes: Sequence[type], files: Sequence[str | Path], argv: Sequence[str], defaults: Sequence[str] = ()
) -> dict[str, Any]:
    """The value of every field: the first file, then ``defaults``, the other files and the command line override it."""
    parser, fields = _parser(classes), fields_of(classes)
    words = [word for file in files[:1] for word in _as_flags(file, fields)]
    words += [*defaults, *(word for file in files[1:] for word in _as_flags(file, fields))]
    try:
        namespace, unknown = parser.parse_known_args([*words, *argv])
    except argparse.ArgumentError as error:
        raise UsageError(one_spelling(error)) from error
    refuse_unknown(unknown, [*fields, "config"])
    values = {name: value for name, value in vars(namespace).items() if name in fields}
    if isinstance(reporters := values.get("report_to"), list) and len(reporters) == 1:
        [values["report_to"]] = reporters
    return values


def _as_flags(path: str | Path, fields: Mapping[str, dataclasses.Field[Any]]) -> list[str]:
    """The settings of a YAML file as command-line words; null keeps the default.

    The default of a removed setting is skipped: runs of earlier revisions have stored it.
    """
    words: list[str] = []
    for key, value in read_yaml(path).items():
        name = name_of(key)
        if name in COMMAND_LINE_ONLY:
            raise UsageError(f"{path}: {key!r} is for the command line only.")
        if name in REMOVED and value in REMOVED[name]:
            continue
        if name not in fields:
            raise UsageError(f"{path}: unknown setting {key!r}{similar(str(key), fields)}.")
        if isinstance(value, list):
            factory = fields[name].default_factory
            if not value and callable(factory) and factory():
                raise UsageError(f"{path}: {key} is an empty list: name at least one value, or remove the key.")
            if flags := [item for item in value if isinstance(item, str) and item.startswith("-")]:
                raise UsageError(f"{path}: {key} contains {flags[0]!r}: expected values that do not start with a dash.")
            words += [f"--{name}", *map(str, value)] if value else []
        elif isinstance(value, bool):  # YAML 1.1 reads `on` and `off` as booleans too
            is_choice = typing.get_origin(fields[name].type) is Literal
            words.append(f"--{name}={('off', 'on')[value] if is_choice else str(value).lower()}")
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(value, default=str)}")  # YAML has dates
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _build_settings(method: str, classes: Sequence[type], values: dict[str, Any], changed: frozenset[str]) -> Settings:
    *ours, trainer_class = classes
    if token := values.pop("hub_token"):
        os.environ["HF_TOKEN"] = token  # where huggingface_hub looks for it; it is not stored
    given = {name: values[name] for name in fields_of([trainer_class]) if name in values}
    overridden: dict[str, Any] = {"push_to_hub": False}
    if values["dry_run"] and not gpu_is_available():
        overridden["use_cpu"] = True  # otherwise Transformers refuses bf16
    try:
        built = {cls: cls(**{name: values[name] for name in fields_of([cls])}) for cls in ours}
        trainer = trainer_class(**copy.deepcopy(given | overridden))
        _undo_changes_of_unsloth(trainer, given | overridden)
    except UsageError:
        raise
    except Exception as error:  # TRL and Transformers raise various errors on first use of a setting
        raise UsageError(f"invalid combination of settings: {first_line(error)}.") from error
    from torch import distributed

    if distributed.is_initialized():  # the clocks of several processes may give different names
        names = [given["output_dir"], given["run_name"]]
        distributed.broadcast_object_list(names)
        given["output_dir"], given["run_name"] = trainer.output_dir, trainer.run_name = names
    groups = {cls.__name__.removesuffix("Arguments").lower(): group for cls, group in built.items()}
    settings = Settings(method, trainer=trainer, given=given, changed=changed, **groups)
    settings.run.push_to_hub = given["push_to_hub"]
    _warn_of_tags(settings)
    return settings


def _undo_changes_of_unsloth(trainer: Any, asked: Mapping[str, Any]) -> None:
    """Set back what Unsloth's config class makes of the settings where TRL's own makes something else.

    For loss_type dr_grpo it changes scale_rewards, for dapo epsilon_high; nothing has read them yet.
    """
    plain_class = type(trainer).__bases__[0]
    if plain_class.__name__ != type(trainer).__name__:  # Unsloth's is a subclass of TRL's with the same name
        return
    plain = plain_class(**copy.deepcopy({name: asked[name] for name in fields_of([plain_class]) if name in asked}))
    for name in fields_of([plain_class]).keys() - _UNSLOTH_RESOLVES:
        wanted, found = getattr(plain, name), getattr(trainer, name)
        if found != wanted:
            logger.warning("Unsloth changed %s from %s to %s: set back to %s", name, wanted, found, wanted)
            setattr(trainer, name, wanted)


def _warn_of_tags(settings: Settings) -> None:
    """Say which tags the rewards look for although the system prompt does not name them."""
    names, prompt = settings.reward.reward if settings.reward else (), settings.prompt.format
    wanted = prompt.tags if "format" in names else prompt.tags[2:] if "accuracy" in names else ()
    if prompt.system_prompt and (missing := [tag for tag in wanted if tag not in prompt.system_prompt]):
        logger.warning(
            "--system_prompt does not contain %s, which the rewards need: add them to the text, or set --tags",
            " ".join(missing),
        )
