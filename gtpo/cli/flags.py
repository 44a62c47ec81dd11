"""The flags of a command line, checked before TRL is imported.

Importing TRL's trainer config takes seconds, and a misspelled flag or a wrong value should not: the names and types of
its settings are read from the source of the dataclasses.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from gtpo.arguments import SHORT_NAMES, check_fields, fields_of, name_of
from gtpo.cli.help import HELP_ALL
from gtpo.cli.validation import CHECKS
from gtpo.errors import UsageError, nearest

ELSEWHERE = {  # names in other projects -> ours, for "did you mean"
    "lr": "learning_rate",
    "batch_size": "prompts_per_step",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "group_size": "num_generations",
    "reward_funcs": "reward",
    "max_new_tokens": "max_completion_length",
    "wandb": "report_to",
}


def check_flags(method: str, flags: Mapping[str, str | None], classes: Sequence[type]) -> None:
    """Refuse unknown flags of :func:`flags_on`, and numbers and choices that the parser would refuse seconds later.

    Args:
        method: gtpo, grpo or sft.
        flags: The settings of a command line.
        classes: Our dataclasses of settings.
    """
    annotations = annotations_of("sft_config" if method == "sft" else "grpo_config")
    for name, field in fields_of(classes).items():
        annotations[name] = inspect.formatannotation(field.type)
    names = [*annotations, "config", HELP_ALL[2:]]
    known = {*names, *(f"no_{name}" for name in names)}  # HfArgumentParser's for --log_completions false
    unknown = [f"--{name}" for name in flags if name not in known]
    later = ("objective", "unsloth_")  # a user's class, and Unsloth in TRL's configs, have fields of their own
    if not any(name.startswith(later) for name in flags):
        refuse_unknown(unknown, names)
    numbers = argparse.Namespace()
    for name, word in flags.items():
        if word is not None:
            value = _read_value(name, word, annotations.get(name, "").removesuffix(" | None"))
            setattr(numbers, name, value)
    check_fields(numbers, CHECKS)
    if method == "gtpo":
        check_fields(numbers, {"beta": (lambda x: x == 0, "0, because GTPO has no KL term: train_grpo.py has one")})


def _read_value(name: str, word: str, annotation: str) -> float | None:
    """The number that a setting of a numeric type gets; None for other types."""
    if annotation.startswith("Literal"):
        choices = ast.literal_eval(annotation.removeprefix("Literal"))
        if word not in choices:
            raise UsageError(f"--{name} is {word!r}: expected one of {', '.join(choices)}.")
    expected = {"int": "a whole number", "float": "a number"}.get(annotation)
    if expected is None:
        return None
    try:
        return int(word) if annotation == "int" else float(word)
    except ValueError:
        raise UsageError(f"--{name} is {word!r}: expected {expected}.") from None


def annotations_of(config: str) -> dict[str, str]:
    """Name -> annotation of each field of TRL's trainer config, with Transformers'; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    transformers, trl = map(_directory_of, ("transformers", "trl"))
    found: dict[str, str] = {}
    for file in (transformers / "training_args.py", trl / "trainer/base_config.py", trl / f"trainer/{config}.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(("TrainingArguments", "Config")):
                found |= _annotations_in(node)
    return found


def _directory_of(package: str) -> Path:
    return Path(str(find_spec(package).origin)).parent  # type: ignore[union-attr]


def _annotations_in(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            name = ast.unparse(item.target)
            if not name.startswith("_"):
                found[name] = ast.unparse(item.annotation)
    return found


def refuse_unknown(unknown: Sequence[str], names: Iterable[str]) -> None:
    """Raise a UsageError for the first word that no option has taken, with the nearest of ``names``."""
    if unknown:
        first = min(unknown, key=lambda word: not word.startswith("--"))
        word, _, _ = first.partition("=")
        close = similar(word.removeprefix("--").replace("-", "_"), [*names, "help"], "--")
        raise UsageError(
            f"unknown argument {word!r}{close}: every setting is --key value, --help and --help_all list them."
        )


def similar(name: str, names: Iterable[str], dashes: str = "") -> str:
    """`` (did you mean 'x'?)``: our name for a setting of other projects, or the nearest name; empty without one."""
    if name == "lora_alpha":
        return f" (alpha is the rank, '{dashes}lora_rank' [Listing 1])"
    return nearest(ELSEWHERE.get(name, name), [*names, *SHORT_NAMES]).replace("'", f"'{dashes}", 1)


def spelled_out(argv: Sequence[str] | None) -> list[str]:
    """A command line, by default that of the process, with names of flags in full and with underscores."""
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = name_of(flag[2:].replace("-", "_"))
            word = f"--{name}{equals}{value}"
        words.append(word)
    return words


def flags_on(argv: Sequence[str]) -> dict[str, str | None]:
    """Name -> first word of each setting on a command line from :func:`spelled_out`; None where it has no word."""
    flags: dict[str, str | None] = {}
    for word, following in pairwise([*argv, "--"]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and not following.startswith("--"):
                value, equals = following, "="
            flags[name] = value if equals else None
    return flags
