"""From presets, YAML files and the command line to dataclasses.

Precedence, lowest first: the preset of method, model and machine (presets.py), the file given with ``--config``, the
command line. A YAML key is a flag without its dashes: one parser checks both, and an unknown key is an error that
names it.
"""

import copy
import logging
import os
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gtpo.arguments import (
    NOT_STORED,
    PromptArguments,
    Settings,
    Values,
    fields_of,
    name_of,
    read_texts,
    stored_prompt,
)
from gtpo.cli.flags import Classes, Flags, check_flags, flags_on, spelled_out
from gtpo.cli.help import HELP_ALL, HELP_FLAGS, print_all, print_help
from gtpo.cli.parser import OF_VLLM, parser_of, read_settings, read_values
from gtpo.cli.presets import Preset
from gtpo.cli.start import Start, drop_remote_settings, find_start, start_from
from gtpo.cli.validation import batch_geometry, check_values, evaluation_settings, settle_rivals
from gtpo.errors import UsageError
from gtpo.files import OUTPUTS, read_yaml
from gtpo.models.backend import backend_of, check_driver, gpu_is_available, load_backend
from gtpo.models.memory import derived_micro_batch, known_shape, scale_of
from gtpo.models.source import LARGE, TINY, ModelSource, model_source
from gtpo.processes import check_launch, check_launched, limit_openmp_spinning, world_size
from gtpo.runs.directory import RunDirectory, completions_of_step

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

limit_openmp_spinning(os.environ)  # OpenMP reads it when PyTorch is imported

_UNSLOTH_RESOLVES = {  # changes that its trainer needs, none of which changes what is computed
    "top_k",  # 0 and -1: every token
    "gradient_checkpointing_kwargs",  # {"use_reentrant": True}
    "dataset_num_proc",  # the number of cores
}


@dataclass(frozen=True)
class CommandLine:
    """The command line of a train script, read once; everything that is read of it later is read from here."""

    method: str  # gtpo, grpo or sft: the preset directory, and the first part of the run's name
    words: list[str]  # as typed, with the names of flags in full

    @cached_property
    def flags(self) -> Flags:
        """Name -> first word of each setting."""
        return flags_on(self.words)

    @cached_property
    def start(self) -> Start:
        """The run that is named: a new one, one that is resumed, or one from an adapter."""
        return find_start(self.method, self.flags)

    @cached_property
    def preset(self) -> "Preset":
        """That of the model on this machine."""
        start = self.start
        return preset_for(self.method, start.source, start.backend, start.use_cpu, start.dry_run)


def read_command_line(method: str, words: Sequence[str] | None = None) -> CommandLine:
    """That of this process, or other words."""
    return CommandLine(method, spelled_out(words))


def load_backend_of(line: CommandLine, classes: Classes) -> str:
    """:func:`gtpo.models.backend.load_backend` for a command line; the first call of a train script.

    With ``--dry_run`` neither GPU nor packages are needed.
    """
    if HELP_FLAGS & set(line.words):
        print_help(line.method, classes, _help_preset(line))
    if HELP_ALL in line.words:
        return "transformers"  # parse prints it and exits
    backend = find_backend(line, classes)
    return backend if line.start.dry_run else load_backend(backend)


def find_backend(line: CommandLine, classes: Classes) -> str:
    """The backend of a command line, after the checks that need neither PyTorch nor TRL, which take seconds."""
    given = check_flags(line.method, line.words, classes)
    check_launch(os.environ)
    start = line.start
    _check_early(line.method, start, given)
    use_cpu = start.use_cpu
    if use_cpu is None:
        use_cpu = line.preset.values().get("use_cpu", False)
    return backend_of(start.backend, use_cpu, gpu_is_available())


def _check_early(method: str, start: Start, given: Values) -> None:
    """:func:`gtpo.cli.early.check_inputs` for the settings of preset, file and command line."""
    from gtpo.cli.early import check_inputs  # they import more than `--help` needs
    from gtpo.runs.start import check_directory, refuse_few_rows

    values = Preset(method, start.source.preset, "cpu").values()
    values |= {name_of(key): value for key, value in start.settings.items()} | given
    with suppress(TypeError):  # of a number in quotes in a file, which the parser of all settings reads
        refuse_few_rows(*check_inputs(method, values))
    path = start.run.path if start.run else _run_directory(method, start.source, values, given.keys())
    if path:
        check_directory(path, bool(start.run), "overwrite" in given, lock=not start.dry_run)


def parse(line: CommandLine, classes: Classes) -> Settings:
    """The settings of a training run from preset, ``--config`` and command line; the last class is TRL's config."""
    method = line.method
    parser = parser_of(classes)
    if HELP_ALL in line.words:
        print_all(parser, _help_preset(line))
    start = line.start
    named = line.flags.keys()
    preset = line.preset
    of_preset = preset.values_for(*scale_of(start.source)) if preset.name == "own" else preset.values()
    parser.set_defaults_with_config(**read_settings(parser, preset.path, of_preset))
    plain = read_values(parser, [])
    parser.set_defaults_with_config(**_of_this_machine(start, of_preset))
    of_file = read_settings(parser, start.config, start.settings)
    if start.of_run:
        drop_remote_settings(of_file, plain, named, str(start.config))
    is_complete = fields_of(classes).keys() - NOT_STORED <= start.settings.keys()  # stored by a run
    settle_rivals(of_file, line.flags, plain, None if is_complete or start.of_run else start.config)
    parser.set_defaults_with_config(**of_file)
    values = read_values(parser, line.words)
    has_gpu = values["dry_run"] or gpu_is_available()  # of a plan, wherever it is made
    backend = backend_of(values["backend"], values["use_cpu"], has_gpu)
    check_values(values, has_gpu, has_gpu and backend == "unsloth")
    stored = stored_prompt(start.stored)
    of_run = {name: stored[name] for name in stored.keys() - named}
    values |= read_texts({name: value for name, value in values.items() if name not in of_run}) | of_run
    values["model"] = start.source.name
    if start.source.adapter:
        values |= start_from(start.source, named)
    changed = {name for name, value in values.items() if value != plain[name]}
    _derive(method, start, values, named)
    return _build_settings(method, classes, values, frozenset(changed), start.source)


def parse_evaluation(cls: type[_T], argv: Sequence[str] | None = None) -> tuple[_T, set[str]]:
    """The settings ``cls`` of an evaluation from ``--config`` and the command line, and the names that are given."""
    argv = spelled_out(argv)
    flags = flags_on(argv)
    parser = parser_of([cls])
    if HELP_FLAGS & set(argv):
        print_all(parser, {})
    config = flags.get("config")
    of_file = {} if config is None else read_settings(parser, config, read_yaml(config))
    parser.set_defaults_with_config(**of_file)
    values = read_values(parser, argv)
    return cls(**values), {*flags, *of_file}


# The preset, the run and the machine


def preset_for(
    method: str, source: ModelSource, backend: str | None = None, use_cpu: bool | None = None, dry_run: bool = False
) -> Preset:
    """The preset of a model on this machine, or with ``use_cpu`` on its CPU.

    A dry run plans a run that needs a GPU (llama, qwen, Unsloth) where there is none; otherwise that is a UsageError.
    """
    needs_gpu = source.preset in LARGE or backend == "unsloth"
    on_cpu = source.is_tiny or use_cpu
    has_gpu = (needs_gpu or not on_cpu) and gpu_is_available()  # imports PyTorch
    if needs_gpu and not has_gpu and not dry_run:
        instead = f"on a CPU run `python train_{method}.py --model tiny --dataset arithmetic`"
        needed = f"--model {source.asked} trains on a GPU, which PyTorch does not see: {instead}."
        raise UsageError(check_driver() or needed)
    on_gpu = has_gpu or needs_gpu
    if not on_cpu and not on_gpu and (fault := check_driver()):
        logger.warning("training runs on the CPU: %s", fault)
    return Preset(method, source.preset, "gpu" if on_gpu else "cpu")


def _of_this_machine(start: Start, of_preset: Values) -> Values:
    """Settings that adapt those of a preset to this machine; --config and the command line override them."""
    import torch

    adapted: Values = {}
    if start.backend == "unsloth" and of_preset.get("use_cpu"):  # the tiny model's preset is for a CPU
        adapted = {"use_cpu": False, "bf16": True}
    gpu = torch.cuda
    if (
        (of_preset | adapted).get("bf16")
        and gpu.is_available()
        and not gpu.is_bf16_supported(including_emulation=False)
    ):
        adapted |= {"bf16": False, "fp16": True}
    if "entropy_filter" in of_preset and start.source.adapter:
        adapted["entropy_filter"] = "auto"  # Eq. 10; the preset has what the paper found for its own model
    return adapted


def _help_preset(line: CommandLine) -> Values:
    """The values of the preset that ``--help`` shows as defaults."""
    source = model_source(TINY)
    with suppress(UsageError):  # of a name that means nothing
        source = model_source(line.flags.get("model") or TINY)
    return preset_for(line.method, source, dry_run=True).values()


def _derive(method: str, start: Start, values: Values, named: Set[str]) -> None:
    """Set what follows from other settings: batch sizes, evaluation, the run directory, vLLM's share."""
    processes = world_size()
    if start.run:
        values |= _sizes_elsewhere(start.run, values, processes, named)
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    batch, steps = map(values.get, sizes)
    group = values.get("num_generations", 1)
    prompts = values["prompts_per_step"]
    if named & {"num_generations", "prompts_per_step"} and not named & {*sizes}:
        steps = None  # that of a file is for its groups
        if batch and group * (prompts or 1) / processes % batch:
            batch = None
    shares_host = values["use_cpu"] and processes > 1
    has_estimate = "num_generations" in values and not start.source.is_tiny and not shares_host
    if has_estimate and not batch and not steps:
        batch = derived_micro_batch(known_shape(start.source), values, processes)
    geometry = batch_geometry(group, prompts, batch, steps, processes)
    values |= zip(sizes, geometry, strict=True)
    values |= evaluation_settings(values, processes)
    if start.run:
        values["resume"] = values["output_dir"] = str(start.run.path)
    else:
        name = values["run_name"] or time.strftime("%Y%m%d-%H%M%S")
        values["output_dir"] = _run_directory(method, start.source, values | {"run_name": name}, named)
    values["run_name"] = values["run_name"] or Path(values["output_dir"]).name
    if values.get("use_vllm") and values["vllm_mode"] == "colocate":  # TRL's names for two settings of ours
        for name, ours in OF_VLLM.items():
            values[name] = values[name] or values[ours]


def _sizes_elsewhere(run: RunDirectory, values: Values, processes: int, named: Set[str]) -> Values:
    """The sizes of a run that is resumed with another number of processes, but for those that are ``named``.

    A step and a generation keep their completions, no micro-batch is larger than it was.
    """
    stored = run.read_config()
    before = int(run.read_environment().get("world_size", processes))
    batch = stored.get("per_device_train_batch_size")
    completions = completions_of_step(stored, {"world_size": before})
    if before == processes or not batch or named & {"num_generations", "prompts_per_step"}:
        return {}
    of_process = completions // processes
    rows = max(n for n in range(1, batch + 1) if of_process % n == 0)
    if "per_device_train_batch_size" in named:
        rows = values["per_device_train_batch_size"]
    elif "gradient_accumulation_steps" in named:
        rows = max(1, of_process // values["gradient_accumulation_steps"])
    sizes = {
        "prompts_per_step": completions // values.get("num_generations", 1),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": None,
        "per_device_eval_batch_size": None,
    }
    if steps := stored.get("steps_per_generation"):
        sizes["steps_per_generation"] = max(1, steps * batch * before // (rows * processes))
    return {name: value for name, value in sizes.items() if name not in named}


def _run_directory(method: str, source: ModelSource, values: Values, named: Set[str]) -> str | None:
    """The directory of a new run: the given one, or that of its ``run_name``; None without both."""
    other = "run_name" in named and "output_dir" not in named  # than that of the --config
    if values.get("output_dir") and not other:
        return str(values["output_dir"])
    if not values.get("run_name"):
        return None
    label = (values.get("objective") or method).rpartition(":")[2]
    data = Path(values["dataset"]).name.partition(".")[0]
    return str(OUTPUTS / f"{label}-{Path(source.name).name}-{data}-{values['run_name']}")


def _build_settings(
    method: str, classes: Classes, values: Values, changed: frozenset[str], source: ModelSource
) -> Settings:
    *ours, trainer_class = classes
    if token := values.pop("hub_token"):
        os.environ["HF_TOKEN"] = token  # where huggingface_hub looks for it; it is not stored
    raw = {name: values[name] for name in fields_of([trainer_class]) if name in values}
    asked = raw | {"push_to_hub": False}  # the trainer would upload every checkpoint
    if values["dry_run"] and not gpu_is_available():
        asked["use_cpu"] = True  # otherwise Transformers refuses bf16
    groups = {}
    for cls in ours:
        kind = PromptArguments if issubclass(PromptArguments, cls) else cls
        label = kind.__name__.removesuffix("Arguments").lower()
        given = {name: values[name] for name in fields_of([kind])}
        groups[label] = kind(**given)
    trainer = trainer_class(**copy.deepcopy(asked))
    if not values["dry_run"]:
        check_launched(trainer)
    _undo_changes_of_unsloth(trainer, asked)
    from torch import distributed

    if distributed.is_initialized():  # the clocks of several processes may give different names
        names = [raw["output_dir"], raw["run_name"]]
        distributed.broadcast_object_list(names)
        raw["output_dir"], raw["run_name"] = trainer.output_dir, trainer.run_name = names
    settings = Settings(method, trainer=trainer, given=raw, changed=changed, source=source, **groups)
    system = settings.prompt.format.system_prompt
    rewards = values.get("reward", ())
    first = 0 if "format" in rewards else 2 if "accuracy" in rewards else 4  # of the tags that are looked for
    missing = [tag for tag in settings.prompt.format_tags[first:] if system and tag not in system]
    if missing:
        logger.warning("--system_prompt lacks %s, which the rewards need: add them, or set --tags", " ".join(missing))
    return settings


def _undo_changes_of_unsloth(trainer: Any, asked: Values) -> None:
    """Set back what Unsloth's config class makes of the settings where TRL's own makes something else.

    For loss_type dr_grpo it changes scale_rewards, for dapo epsilon_high; nothing has read them yet.
    """
    plain_class = type(trainer).__bases__[0]
    if plain_class.__name__ != type(trainer).__name__:  # Unsloth's is a subclass of TRL's with the same name
        return
    fields = fields_of([plain_class])
    known = {name: asked[name] for name in fields if name in asked}
    plain = plain_class(**copy.deepcopy(known))
    for name in fields.keys() - _UNSLOTH_RESOLVES:
        wanted = getattr(plain, name)
        found = getattr(trainer, name)
        if found != wanted:
            logger.warning("Unsloth changed %s from %s to %s: set back to %s", name, wanted, found, wanted)
            setattr(trainer, name, wanted)
