"""The command line before TRL is imported: the names of all flags, read from the source of the dataclasses.

Importing TRL's trainer config takes seconds, and a misspelled flag should not. Values are checked by
``gtpo.cli.parse.parse``.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from gtpo.arguments import SHORT_NAMES, fields_of, name_of
from gtpo.errors import UsageError, nearest

REMOVED = {  # settings of earlier revisions: values that a stored run may have, and that changed nothing
    "generation_bf16": (False,),
    "early_stopping_patience": (None,),
    "initial_entropy_dir": (None, "outputs/initial_entropy"),
    "positive_advantage_weight": (1.0,),
    "negative_advantage_weight": (1.0,),
}
ELSEWHERE = {  # names in other projects -> ours, for "did you mean"
    "lr": ("learning_rate",),
    "batch_size": ("prompts_per_step", "per_device_train_batch_size"),
    "epochs": ("num_train_epochs",),
    "steps": ("max_steps",),
    "group_size": ("num_generations",),
    "kl_coef": ("beta",),
    "reward_funcs": ("reward",),
    "max_new_tokens": ("max_completion_length",),
    "rank": ("lora_rank",),
    "lora_alpha": ("lora_rank",),
    "train_file": ("dataset",),
    "dataset_path": ("dataset",),
    "output": ("output_dir",),
    "bs": ("prompts_per_step", "per_device_train_batch_size"),
    "grad_accum": ("gradient_accumulation_steps",),
    "wandb": ("report_to",),
    "use_lora": ("lora_rank",),
    "use_peft": ("lora_rank",),
}
TRUE = ("yes", "true", "t", "y", "1")  # as HfArgumentParser


def check_flags(argv: Sequence[str], config: str, classes: Sequence[type]) -> None:
    """Refuse unknown flags.

    Args:
        argv: Command line without the program.
        config: File of TRL's trainer config: grpo_config or sft_config.
        classes: Our dataclasses.

    Raises:
        UsageError: For the first of them.
    """
    names = [*names_of(config), *fields_of(classes), "config"]
    known = {*names, *(f"no_{name}" for name in names)}  # HfArgumentParser's for --log_completions false
    unknown = [f"--{name}" for name in given_on(argv) if name not in known]
    if not any(flag.startswith("--unsloth_") for flag in unknown):  # fields that Unsloth adds to TRL's configs
        refuse_unknown(unknown, names)


def names_of(config: str) -> set[str]:
    """The fields of TRL's trainer config, those of Transformers included; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    roots = {package: Path(str(find_spec(package).origin)).parent for package in ("transformers", "trl")}  # type: ignore[union-attr]
    files = [roots["transformers"] / "training_args.py"]
    files += [roots["trl"] / "trainer" / f"{name}.py" for name in ("base_config", config)]
    return {
        item.target.id
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("TrainingArguments", "Config"))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }


def refuse_unknown(unknown: Sequence[str], names: Iterable[str]) -> None:
    """Raise for the first word of a command line that no option has taken.

    Args:
        unknown: The words that are left.
        names: The known options, without dashes.

    Raises:
        UsageError: With the nearest option, if there is a near one.
    """
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if flags:
        close = similar(flags[0].removeprefix("--").replace("-", "_"), [*names, "help"], "--")
        short = "".join(f" (--{s})" for s, name in SHORT_NAMES.items() if f"--{name}" == flags[0])
        raise UsageError(f"unknown option {flags[0]}{short}{close}; --help lists all options.")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}: every setting is an option, --key value.")


def similar(name: str, names: Iterable[str], dashes: str = "") -> str:
    """`` (did you mean 'x'?)``: our name for a setting of other projects, or the nearest name; empty without one."""
    known = [*names, *SHORT_NAMES]
    if ours := [other for other in ELSEWHERE.get(name, ()) if other in known]:
        return f" (did you mean {' or '.join(repr(dashes + other) for other in ours)}?)"
    return nearest(name, known).replace("'", f"'{dashes}", 1)


def one_spelling(error: argparse.ArgumentError) -> str:
    """``argument --max_steps/--max-steps: ...`` as ``--max_steps: ...``, and a bool in the words of our own check."""
    text = re.sub(r"^argument (--\w+)(/--[\w-]+)*", r"\1", str(error))
    text = re.sub(r"Truthy value expected: got (.*) but expected one of .*", r"expected true or false, got '\1'", text)
    return text.rstrip(".") + "."


def without_alias(word: str) -> str:
    """A word of the command line with G spelled out, and an earlier name of an option as the name of today."""
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    return f"--{name_of(name)}{equals}{value}" if flag.startswith("--") and name_of(name) != name else word


def given_on(argv: Sequence[str]) -> list[str]:
    """The names of the settings on a command line."""
    flags = (without_alias(word).partition("=")[0] for word in argv if word.startswith("--"))
    return [flag.removeprefix("--").replace("-", "_") for flag in flags]
