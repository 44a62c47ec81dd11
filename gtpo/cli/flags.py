"""The command line before TRL is imported: the names of all flags, read from the source of the dataclasses.

Importing TRL's trainer config takes seconds, and a misspelled flag should not. Values are checked by
``gtpo.cli.parse.parse``.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from gtpo.arguments import SHORT_NAMES, fields_of, name_of
from gtpo.errors import UsageError, nearest

REMOVED = {  # settings of earlier revisions -> the value of stored runs that changed nothing
    "early_stopping_patience": None,
    "positive_advantage_weight": 1.0,
    "negative_advantage_weight": 1.0,
}
ELSEWHERE = {  # names in other projects -> ours, for "did you mean"
    "lr": "learning_rate",
    "batch_size": "prompts_per_step",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "group_size": "num_generations",
    "reward_funcs": "reward",
    "max_new_tokens": "max_completion_length",
    "lora_alpha": "lora_rank",  # alpha = rank [Listing 1]
    "use_lora": "lora_rank",
    "wandb": "report_to",
}
TRUE = ("yes", "true", "t", "y", "1")  # as HfArgumentParser


def check_flags(argv: Sequence[str], config: str, classes: Sequence[type]) -> None:
    """Refuse unknown flags.

    Args:
        argv: Command line without the program, from :func:`spelled_out`.
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
    """The fields of TRL's trainer config, grpo_config or sft_config, with Transformers'; nothing is imported."""
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
    """Raise a UsageError for the first word that no option has taken, with the nearest of ``names``."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if flags:
        close = similar(flags[0].removeprefix("--").replace("-", "_"), [*names, "help"], "--")
        raise UsageError(f"unknown option {flags[0]}{close}; --help lists all options.")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}: every setting is an option, --key value.")


def similar(name: str, names: Iterable[str], dashes: str = "") -> str:
    """`` (did you mean 'x'?)``: our name for a setting of other projects, or the nearest name; empty without one."""
    return nearest(ELSEWHERE.get(name, name), [*names, *SHORT_NAMES]).replace("'", f"'{dashes}", 1)


def one_spelling(error: argparse.ArgumentError) -> str:
    """``argument --max_steps/--max-steps: ...`` as ``--max_steps: ...``, and a bool in the words of our own check."""
    text = re.sub(r"^argument (--\w+)(/--[\w-]+)*", r"\1", str(error))
    text = re.sub(r"Truthy value expected: got (.*) but expected one of .*", r"expected true or false, got '\1'", text)
    return text.rstrip(".") + "."


def spelled_out(argv: Sequence[str] | None) -> list[str]:
    """A command line, by default that of the process, with names of flags in full and with underscores."""
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--")
        words.append(f"--{name_of(flag[2:].replace('-', '_'))}{equals}{value}" if is_flag else word)
    return words


def given_on(argv: Sequence[str]) -> list[str]:
    """The names of the settings on a command line from :func:`spelled_out`."""
    return [word[2:].partition("=")[0] for word in argv if word.startswith("--")]
