"""The flags of a command line, checked before TRL is imported.

Importing TRL's trainer config takes seconds, and a misspelled flag or a wrong value should not: the names and types of
its settings are read from the source of the dataclasses.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from gtpo.arguments import SHORT_NAMES, check_fields, fields_of, name_of
from gtpo.cli.validation import CHECKS
from gtpo.errors import UsageError, nearest

Classes = Sequence[type]  # dataclasses of settings
Flags = dict[str, str | None]  # name -> first word of each setting on a command line
ELSEWHERE = {  # names in other projects -> ours, for "did you mean"
    "lr": "learning_rate",
    "lora_alpha": "lora_rank",
    "batch_size": "prompts_per_step",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "group_size": "num_generations",
    "reward_funcs": "reward",
    "max_new_tokens": "max_completion_length",
    "wandb": "report_to",
    "tasks": "benchmarks",  # these are lm-eval's
    "model_args": "model",
    "output_path": "output_dir",
    "system_instruction": "system_prompt",
    "max_gen_toks": "max_new_tokens",
    "gen_kwargs": "temperature",
    "apply_chat_template": "nothing: every prompt has the chat template",
    "log_samples": "nothing: every completion is stored",
    "num_fewshot": "nothing: prompts have no examples",
    "stop_on_collapse": "now a callback to copy: examples/collapse_alarm.py",
    "device": "nothing: a GPU is used if there is one, else set CUDA_VISIBLE_DEVICES",
}


def check_flags(method: str, argv: Sequence[str], classes: Classes) -> dict[str, Any]:
    """The value of each flag; unknown ones are refused, and values that the parser would refuse, in argparse's words.

    Args:
        method: gtpo, grpo or sft.
        argv: A command line from :func:`spelled_out`.
        classes: Our dataclasses of settings.
    """
    annotations = annotations_of("sft_config" if method == "sft" else "grpo_config") | {"config": "str"}
    for name, field in fields_of(classes).items():
        annotations[name] = inspect.formatannotation(field.type)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, annotation in annotations.items():
        kind = annotation.removesuffix(" | None")
        number = {"int": int, "float": float}.get(kind, str)
        words = "*" if "list" in kind else "?"
        choices = None
        if kind.startswith("Literal"):
            choices = ast.literal_eval(kind.removeprefix("Literal"))
        parser.add_argument(f"--{name}", nargs=words, type=number, choices=choices)
        parser.add_argument(f"--no_{name}", nargs="?")  # HfArgumentParser's, for --log_completions false
    known, unknown = parser.parse_known_args(argv)
    later = ("--objective", "--unsloth_")  # a user's class, and Unsloth in TRL's configs, have fields of their own
    if not any(word.startswith(later) for word in argv):
        refuse_unknown(unknown, annotations)
    numbers = {name: value for name, value in vars(known).items() if isinstance(value, int | float)}
    check_fields(numbers, CHECKS)
    if method == "gtpo" and known.beta:
        raise UsageError(f"--beta is {known.beta}: expected 0, because GTPO has no KL term: train_grpo.py has one.")
    return {name: value for name, value in vars(known).items() if name in flags_on(argv)}


def annotations_of(config: str) -> dict[str, str]:
    """Name -> annotation of each field of TRL's trainer config, with Transformers'; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    found: dict[str, str] = {}
    for file in ("transformers/training_args.py", "trl/trainer/base_config.py", f"trl/trainer/{config}.py"):
        package = file.partition("/")[0]
        installed = Path(str(find_spec(package).origin)).parents[1]  # type: ignore[union-attr]
        text = (installed / file).read_text(encoding="utf-8")
        found |= re.findall(r"(?m)^    ([a-z]\w*): (.+?) = ", text)  # the fields of its dataclasses
    return found


def refuse_unknown(unknown: Sequence[str], names: Iterable[str]) -> None:
    """Raise a UsageError for the first word that no option has taken, with the nearest of ``names``."""
    if unknown:
        word = min(unknown, key=lambda word: not word.startswith("--")).partition("=")[0]
        close = similar(word.removeprefix("--"), [*names, "help"])
        if short := [f"--{name}" for name, full in SHORT_NAMES.items() if f"--{full}" == word]:
            close = f" ({', '.join(short)})"  # what was typed, perhaps
        raise UsageError(
            f"unknown argument {word!r}{close}: every setting is --key value, --help and --help_all list them."
        )


def similar(name: str, names: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``: our name for a setting of other projects, or the nearest name; empty without one."""
    if " " in ELSEWHERE.get(name, ""):
        return f" ({ELSEWHERE[name]})"
    return nearest(ELSEWHERE.get(name, name), [*names, *SHORT_NAMES])


def spelled_out(argv: Sequence[str] | None) -> list[str]:
    """A command line, by default that of the process, with names of flags in full and with underscores.

    UsageError for a setting under two names, of which the parser would take the last one.
    """
    spelled = []
    given: dict[str, str] = {}  # setting -> flag
    for word in sys.argv[1:] if argv is None else argv:
        if found := re.match(r"--([\w-]+)", word):
            flag = found[0]
            name = name_of(found[1].replace("-", "_"))
            other = given.setdefault(name.removeprefix("no_"), flag)
            if other != flag:
                raise UsageError(f"{other} and {flag} are one setting: remove one of them.")
            word = f"--{name}{word.removeprefix(flag)}"
        spelled.append(word)
    return spelled


def flags_on(argv: Sequence[str]) -> Flags:
    """Name -> first word of each setting on a command line from :func:`spelled_out`; None where it has no word."""
    flags: Flags = {}
    for word, following in pairwise([*argv, "--"]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            separate = None if following.startswith("--") else following
            flags[name] = value if equals else separate
    return flags
