"""Settings of a run: the dataclasses behind the flags, and the one way from presets, YAML and command line to them.

Precedence, lowest first: the preset of the method and model (``configs/<method>/<model>.yaml``), the file given with
``--config``, the command line. A YAML key is a flag without its dashes, so both are checked by the same parser and an
unknown one stops the run by name. Nothing heavy is imported before the flags are read.
"""

import argparse
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gtpo.arguments import MODEL_ALIASES, ModelArguments
from gtpo.backend import gpu_is_available, is_installed
from gtpo.errors import RunError, UsageError, nearest

# Read by OpenMP when PyTorch is imported. Threads that spin while they wait are no faster on an idle machine and, where
# another program uses a core, made the tiny model's training 20 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CONFIGS = Path(__file__).parent / "configs"


_DESCRIPTIONS = {
    "gtpo": "Train a policy with GTPO: conflict-aware gradient correction and entropy control, no reference model.",
    "grpo": "Train a policy with GRPO, the baseline: group-relative advantages, optional KL term.",
    "sft": "Fine-tune on the reference solutions in the paper's tags, the supervised baseline.",
}
# Of some 200 settings of TRL and Transformers those that a run of ours usually touches, by group, with our words where
# theirs are long; --help_all shows every one.
_SHOWN_TRAINING_FIELDS = {
    "sampling and objective (TRL)": {
        "num_generations": "G, completions per prompt [Section 6: 8 or 12].",
        "beta": "Weight of the KL term, GRPO only [Section 6: 0, 1e-6 or 0.04].",
        "temperature": "Of sampling; log-probabilities and entropies are taken at it too [Listing 1: 1.0].",
        "max_completion_length": "Tokens; a longer completion is cut.",
        "num_iterations": "Optimizer steps per batch of completions [Section 5: 1].",
        "use_vllm": "Sample with vLLM, on a GPU.",
        "max_length": "Prompt and solution, tokens; a longer one is cut.",
    },
    "optimisation (Transformers)": {
        "max_steps": "Optimizer steps; -1: as many as num_train_epochs make.",
        "num_train_epochs": "Passes over the data, where max_steps is -1.",
        "learning_rate": "Peak of the schedule [Listing 1: 1e-6].",
        "lr_scheduler_type": "cosine, linear, constant, constant_with_warmup, ... [Listing 1: cosine].",
        "warmup_steps": "Steps; below 1 the share of all steps [Listing 1: 0.005].",
        "optim": "adamw_torch, paged_adamw_8bit (needs bitsandbytes), ... [Listing 1].",
        "adam_beta1": "[Listing 1, Fig. 6]",
        "adam_beta2": "[Listing 1, Fig. 6]",
        "weight_decay": "[Listing 1: 0.1]",
        "max_grad_norm": "Gradients are clipped to this norm; 0: not at all [Listing 1: 0.1].",
        "per_device_train_batch_size": "Completions in memory at once; from prompts_per_step if not given.",
        "gradient_accumulation_steps": "Micro-batches per step; from prompts_per_step if not given.",
        "gradient_checkpointing": "Less memory, slower.",
        "bf16": "bfloat16 mixed precision, on a GPU that has it.",
    },
    "files and logs (Transformers)": {
        "output_dir": "The run directory; by default outputs/METHOD-MODEL-DATASET-RUN_NAME.",
        "run_name": "The last part of the directory's name, and the name in wandb; by default the time.",
        "report_to": "wandb, another integration of Transformers, or none.",
        "save_steps": "Steps between checkpoints.",
        "seed": "Of sampling, shuffling and the adapter [Listing 1: 3407].",
    },
}


def parse(method: str, argument_classes: Sequence[type], argv: list[str] | None = None) -> tuple[Any, ...]:
    """Read preset, ``--config`` and command line into one instance of each class.

    Args:
        method: gtpo, grpo or sft: the folder of presets, and the start of the run's name.
        argument_classes: The dataclasses; the last one is the trainer's config of TRL.
        argv: Command line without the program; ``sys.argv[1:]`` by default.

    Returns:
        The instances, then the resolved settings as a flat dict: what ``config.yaml`` of the run holds.

    Raises:
        UsageError: If a key or value is not valid.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(method, argument_classes, show_all="--help_all" in argv)
    early = early_arguments(argv)
    if early.resume not in (None, "auto"):
        _check_method(method, early.resume)
    file_arguments = _as_flags(early.config, parser) if early.config else []
    wants_help = {"-h", "--help", "--help_all"} & set(argv)
    preset = (
        CONFIGS / method / "tiny.yaml" if wants_help else preset_for(method, early.model, early.backend, early.dry_run)
    )
    if wants_help:
        parser.set_defaults(**read_yaml(preset))
        parser.print_help()
        raise SystemExit(0)
    preset_arguments = [
        *_as_flags(preset, parser),
        *_precision_of_this_gpu(preset),
        *_weights_of(early.backend, preset),
    ]
    values = vars(parser.parse_args([*preset_arguments, *file_arguments, *argv]))
    for name in ("config", "help_all"):
        values.pop(name)
    _check_values(values)
    group_size = values.get("num_generations", 1)  # supervised fine-tuning has one completion per prompt
    if method != "sft" and group_size < 2:
        raise UsageError(
            f"--G is {group_size}: a group needs at least 2 completions, their advantages compare them with each other."
        )
    values["per_device_train_batch_size"], values["gradient_accumulation_steps"] = batch_geometry(
        group_size,
        values["prompts_per_step"],
        values["per_device_train_batch_size"],
        values["gradient_accumulation_steps"],
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    if values["resume"] not in (None, "auto"):
        values["output_dir"] = values["resume"]
    name = values["run_name"] or time.strftime("%Y%m%d-%H%M%S")
    label = f"{Path(early.model).name}-{Path(values['dataset']).name.partition('.')[0]}"
    values["output_dir"] = values["output_dir"] or str(Path("outputs") / f"{method}-{label}-{name}")
    if values["resume"] == "auto" and not early.config and (Path(values["output_dir"]) / "config.yaml").is_file():
        return parse(method, argument_classes, [*argv, "--resume", values["output_dir"]])  # with the run's settings
    values["run_name"] = values["run_name"] or Path(values["output_dir"]).name
    if values.get("use_vllm") and values["vllm_mode"] == "colocate":  # TRL's names for two of ours
        values["vllm_gpu_memory_utilization"] = (
            values["vllm_gpu_memory_utilization"] or values["gpu_memory_utilization"]
        )
        values["vllm_max_model_length"] = values["vllm_max_model_length"] or values["max_seq_length"]
    resolved = {
        key: value for key, value in values.items() if key not in ("resume", "overwrite", "dry_run", "hub_token")
    }
    if token := values.pop("hub_token"):
        os.environ["HF_TOKEN"] = token  # where huggingface_hub looks for it, and nothing is stored
    values["push_to_hub"] = False  # ours uploads the adapter at the end; the Trainer's sends the whole run at each save
    if early.dry_run and not gpu_is_available():
        values["use_cpu"] = True  # or Transformers refuses bf16
    try:
        built = parser.parse_dict(values)
    except UsageError:
        raise
    except Exception as error:  # TRL and Transformers raise whatever the first use of a setting raises
        raise UsageError(f"the settings do not fit together: {error}") from error
    from torch import distributed

    if distributed.is_initialized():  # the clocks of several processes need not agree on a name
        names = [resolved["output_dir"], resolved["run_name"]]
        distributed.broadcast_object_list(names)
        resolved["output_dir"], resolved["run_name"] = built[-1].output_dir, built[-1].run_name = names
    return (*built, resolved)


def preset_for(method: str, model: str, backend: str | None = None, dry_run: bool = False) -> Path:
    """The preset of a model: its own; for another model Qwen's on a GPU and the tiny one without.

    Raises:
        UsageError: If the model or backend needs a GPU, there is none, and more is wanted than a plan.
    """
    alias = next((alias for alias, target in MODEL_ALIASES.items() if model in (alias, target)), None)
    if alias == "tiny" and backend == "unsloth":
        raise UsageError("--backend unsloth does not train --model tiny: leave --backend out.")
    if alias != "tiny" and (gpu_is_available() or dry_run):
        return CONFIGS / method / f"{alias or 'qwen'}.yaml"
    if backend == "unsloth" or alias in ("llama", "qwen"):
        raise UsageError(
            f"--model {model} {'with --backend unsloth ' if backend == 'unsloth' else ''}trains on a GPU (4-bit "
            f"weights, vLLM) and PyTorch sees none here: run `python train_{method}.py --model tiny --dataset "
            "arithmetic` on a CPU, or check torch.cuda.is_available() and the NVIDIA driver (R580 or newer)."
        )
    return CONFIGS / method / "tiny.yaml"


def _precision_of_this_gpu(preset: Path) -> list[str]:
    """float16 in place of a preset's bfloat16 on a GPU that lacks it (T4, V100); a flag or --config still wins."""
    import torch

    if (
        read_yaml(preset).get("bf16")
        and torch.cuda.is_available()
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return ["--bf16=false", "--fp16=true"]
    return []


def _check_method(method: str, run: str) -> None:
    settings = read_yaml(Path(run) / "config.yaml")
    of_run = "gtpo" if "gamma" in settings else "grpo" if "num_generations" in settings else "sft"
    if method != of_run and "model" in settings:
        raise UsageError(f"{run} is a run of train_{of_run}.py: resume it with that script.")


def _weights_of(backend: str, preset: Path) -> list[str]:
    """Whole weights in place of a preset's 4-bit ones where TRL hands them to vLLM; a flag or --config still wins."""
    settings = read_yaml(preset)
    whole = backend == "transformers" and settings.get("use_vllm") and settings.get("load_in_4bit")
    return ["--load_in_4bit=false"] if whole else []


def _check_values(values: dict[str, Any]) -> None:
    """Refuse what TRL or Transformers would only trip over later."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}: expected a finite number.")
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
        if values[name] is not None and values[name] < 0:
            raise UsageError(f"--{name} is {values[name]}: expected at least 0.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            raise UsageError(f"--{name} is {values[name]}: expected 0 up to, but not including, 1.")
    for name in ("seed", "data_seed"):
        if values.get(name) is not None and not 0 <= values[name] < 2**32:
            raise UsageError(f"--{name} is {values[name]}: expected 0 to 4294967295.")
    optim = str(values["optim"])
    needed = {
        ("optim", "bitsandbytes", "adamw_torch"): not optim.startswith("adamw_torch")  # torchao's
        and bool({"bnb", "8bit", "paged"} & set(optim.split("_"))),
        ("use_vllm", "vllm", "false"): values.get("use_vllm", False),
    }
    for (flag, package, other), is_needed in needed.items():
        if is_needed and not values["dry_run"] and not is_installed(package):
            raise UsageError(
                f"--{flag} {values[flag]} needs {package}, which is not installed: `pip install -r requirements.txt`, "
                f"or --{flag} {other}."
            )
    if values["backend"] == "transformers" and values.get("use_vllm") and values["load_in_4bit"]:
        raise UsageError(  # https://github.com/huggingface/trl/issues/4973
            "TRL cannot hand 4-bit weights to vLLM: --backend unsloth can; or set --load_in_4bit false, or --use_vllm "
            "false."
        )
    if values["save_total_limit"] == 1:
        raise UsageError(
            "--save_total_limit 1 deletes the old checkpoint before the new one is whole, so a kill could leave none: "
            "expected at least 2."
        )
    if values["merge"] != "none" and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UsageError("--merge does not go with DeepSpeed: merge afterwards, --resume RUN --merge 16bit on one GPU.")
    lengths = [values[name] for name in ("max_prompt_length", "max_completion_length") if name in values]
    if sum(lengths) > values["max_seq_length"]:
        raise UsageError(
            f"prompts of up to {lengths[0]} tokens and completions of up to {sum(lengths[1:])} do not fit into "
            f"max_seq_length {values['max_seq_length']}: lower --max_prompt_length or --max_completion_length, or "
            "raise --max_seq_length."
        )
    if values["push_to_hub"] and not values["hub_token"]:
        from huggingface_hub import get_token

        if get_token() is None:
            raise UsageError("--push_to_hub needs a token of the Hugging Face Hub: `hf auth login` or set HF_TOKEN.")


def batch_geometry(
    num_generations: int,
    prompts_per_step: int | None = None,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    processes: int = 1,
) -> tuple[int, int]:
    """(per_device_train_batch_size, gradient_accumulation_steps) of steps that take whole groups.

    batch size * accumulation * processes = G * prompts per step. What is not given follows from the rest; with nothing
    given a step is one prompt, in one micro-batch.

    Raises:
        UsageError: If a number is below 1, or they do not divide.
    """
    given = {
        "prompts_per_step": prompts_per_step,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: expected at least 1.")
    if batch_size and accumulation_steps and not prompts_per_step:
        completions = batch_size * accumulation_steps * processes
    else:
        completions = num_generations * (prompts_per_step or 1)
    batch = batch_size or max(1, completions // (processes * (accumulation_steps or 1)))
    steps = accumulation_steps or max(1, completions // (processes * batch))
    if batch * steps * processes != completions or completions % num_generations:
        raise UsageError(
            f"the batch does not divide into groups: batch size {batch} x accumulation {steps} x {processes} "
            f"process(es) = {batch * steps * processes} completions, and a step needs a multiple of G = "
            f"{num_generations}"
            + (f", {completions} for {prompts_per_step} prompt(s)" if prompts_per_step else "")
            + ": change --per_device_train_batch_size or --gradient_accumulation_steps, or leave both out."
        )
    return batch, steps


def early_arguments(argv: list[str]) -> argparse.Namespace:
    """What decides how the rest is read: model, backend, config and resume, from the flags and the file they name.

    Raises:
        UsageError: If the file cannot be read.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message}.")

    parser = Parser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--backend", "--config"):
        parser.add_argument(name)
    parser.add_argument("--output_dir")
    parser.add_argument("--resume", nargs="?", const="auto")
    parser.add_argument("--dry_run", nargs="?", const="true", default="false")
    early = parser.parse_known_args(argv)[0]
    if early.resume == "auto" and early.output_dir and (Path(early.output_dir) / "config.yaml").is_file():
        early.resume = early.output_dir
    if early.resume not in (None, "auto"):
        early.config = early.config or str(Path(early.resume) / "config.yaml")
        if not Path(early.resume).is_dir():
            runs = [str(path.parent) for path in Path("outputs").glob("*/config.yaml")]
            raise UsageError(f"--resume {early.resume} is no folder{nearest(early.resume, runs)}: name a run.")
    settings = read_yaml(early.config) if early.config else {}
    early.model = early.model or settings.get("model") or ModelArguments.model
    early.backend = early.backend or settings.get("backend") or ModelArguments.backend
    early.dry_run = early.dry_run.lower() in ("true", "yes", "1", "t", "y")
    return early


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of flat settings.

    Raises:
        UsageError: If it is missing, is no YAML, or is no mapping.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    except Exception as error:  # PyYAML: also ValueError, KeyError, RecursionError and others of Python's own
        raise UsageError(f"{path} is not valid YAML: {str(error) or type(error).__name__}.") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds {type(settings).__name__}: expected `key: value` lines, each key a flag.")
    return settings


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script's main: a UsageError is one sentence and exit code 2; ``--debug`` shows the traceback instead.

    Exit codes: 1 for a run that had to stop, 130 after Ctrl-C, 143 after SIGTERM.
    """
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        main()
    except KeyboardInterrupt:
        trains = Path(sys.argv[0]).name.startswith("train_")
        _leave("interrupted" + "; a run that has a checkpoint goes on with --resume RUN" * trains, 130)
    except (UsageError, RunError) as error:
        if debug:
            raise
        _leave(str(error), 2 if isinstance(error, UsageError) else 1)
    except Exception as error:
        if debug or not _is_disk_full(error):
            raise
        _leave(f"the disk is full ({error}); free some space, and --resume RUN goes on from the last checkpoint", 1)
    sys.exit(0)


def _leave(sentence: str, code: int) -> NoReturn:
    from tqdm import tqdm

    for bar in list(tqdm._instances):
        bar.close()  # or it would be drawn once more over the sentence
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    sys.exit(code)


def _is_disk_full(error: BaseException) -> bool:
    """Also where PyTorch or safetensors tell it in words of their own."""
    words = (
        "No space left on device",
        "PytorchStreamWriter failed",
        "unexpected pos",
    )  # torch.save: a write fell short
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in words)


def _build_parser(method: str, argument_classes: Sequence[type], show_all: bool) -> Any:
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            flags = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            if message.startswith("unrecognized arguments") and flags:
                message = (
                    f"{flags[0]} is no setting{nearest(flags[0], self._option_string_actions)}; --help_all lists them"
                )
            raise UsageError(f"{message}.")

    parser = Parser(
        argument_classes,
        prog=f"train_{method}.py",
        usage="%(prog)s [--config FILE] [--key value ...]",
        description=_DESCRIPTIONS[method],
        epilog="[...] names a value's source in the paper. Shown defaults are those of --model tiny; other models take "
        f"theirs from configs/{method}/. --debug shows the traceback of an error.",
        allow_abbrev=False,
        conflict_handler="resolve",  # max_seq_length is ours, and a field of the SFTConfig that Unsloth writes
    )
    parser._optionals.title = (
        "every other setting of TRL and Transformers" if show_all else "help and files of settings"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line wins over it.")
    parser.add_argument("--help_all", action="store_true", help="Show every setting of TRL and Transformers too.")
    flags = parser._option_string_actions
    if "--num_generations" in flags:
        flags["--G"] = flags["--num_generations"]
        flags["--G"].option_strings = ["--G", "--num_generations"]
    flags["--resume"].nargs, flags["--resume"].const = "?", "auto"
    parser.set_defaults(output_dir=None, per_device_train_batch_size=None, gradient_accumulation_steps=None)
    if "--use_vllm" in flags:
        parser.set_defaults(vllm_gpu_memory_utilization=None, vllm_max_model_length=None)
    _arrange_help(parser, show_all)
    return parser


def _arrange_help(parser: Any, show_all: bool) -> None:
    """Our groups first, then the usual settings of the trainers. Only the page changes: every spelling stays valid."""
    rest, wanted = parser._optionals, {"help", "help_all", "config"}
    for title, fields in _SHOWN_TRAINING_FIELDS.items():
        group = parser.add_argument_group(title)
        for dest, words in fields.items():
            for action in [one for one in rest._group_actions if one.dest == dest]:
                rest._group_actions.remove(action)
                action.help = words
                group._group_actions.append(action)
    parser._action_groups.remove(rest)
    parser._action_groups.append(rest)
    kinds = {"int": "N", "float": "X", "string_to_bool": "true|false"}
    for action in parser._actions:
        action.option_strings = [flag for flag in action.option_strings if "-" not in flag[2:]]
        negated = action.option_strings[0].startswith("--no_")
        if negated or (action in rest._group_actions and not show_all and action.dest not in wanted):
            action.help = argparse.SUPPRESS
        elif action.default is None or action.dest == "help_all":
            action.help = f"{action.help}%(default).0s"  # argparse then adds no "(default: None)"
        if len(list(action.choices or "")) > 6:
            action.metavar = "NAME"
        elif not action.choices and action.nargs != 0 and action.metavar is None:
            action.metavar = kinds.get(getattr(action.type, "__name__", ""), "VALUE")


def _as_flags(path: str | Path, parser: Any) -> list[str]:
    """The settings of a YAML file as command-line words; null leaves the default."""
    words: list[str] = []
    for key, value in read_yaml(path).items():
        if key in ("config", "help", "help_all", "dry_run", "resume", "overwrite"):
            raise UsageError(f"{path}: {key!r} is for the command line alone.")
        if f"--{key}" not in parser._option_string_actions:
            known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
            raise UsageError(f"{path}: {key!r} is no setting{nearest(str(key), known)}.")
        if isinstance(value, list):
            if not value and parser._option_string_actions[f"--{key}"].default:
                raise UsageError(f"{path}: {key} is an empty list: name at least one, or leave the key out.")
            if flags := [item for item in value if isinstance(item, str) and item.startswith("-")]:
                raise UsageError(f"{path}: {key} holds {flags[0]!r}: expected values, none that starts with a dash.")
            words += [f"--{key}", *map(str, value)] if value else []
        elif isinstance(value, bool):  # YAML reads on and off as booleans too
            choices = parser._option_string_actions[f"--{key}"].choices
            words.append(f"--{key}={('off', 'on')[value] if choices else str(value).lower()}")
        elif isinstance(value, dict):
            try:
                words.append(f"--{key}={json.dumps(value)}")
            except (TypeError, ValueError) as error:
                raise UsageError(f"{path}: {key} holds what JSON has no form for: {error}.") from error
        elif value is not None:
            words.append(f"--{key}={value}")
    return words
