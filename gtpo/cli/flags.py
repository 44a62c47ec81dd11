"""The command line before TRL is imported: names and types of all flags, read from the source of the dataclasses.

Importing TRL's trainer config takes seconds, and a misspelled flag should not. What needs the values of all settings is
checked by ``gtpo.cli.parse.parse``.
"""

import argparse
import ast
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gtpo.arguments import SHORT_NAMES, fields_of, name_of
from gtpo.errors import UsageError, nearest

ELSEWHERE = {  # usual names in other projects -> ours
    "lr": ("learning_rate",),
    "batch_size": ("prompts_per_step", "per_device_train_batch_size"),
    "epochs": ("num_train_epochs",),
    "steps": ("max_steps",),
    "group_size": ("num_generations",),
    "kl_coef": ("beta",),
    "reward_funcs": ("reward",),
    "max_new_tokens": ("max_completion_length",),
    "rank": ("lora_rank",),
    "lora_alpha": ("lora_rank",),  # alpha = rank [Listing 1]
    "train_file": ("dataset",),
    "dataset_path": ("dataset",),
    "output": ("output_dir",),
    "bs": ("prompts_per_step", "per_device_train_batch_size"),
    "grad_accum": ("gradient_accumulation_steps",),
    "wandb": ("report_to",),
}
REMOVED = {  # settings of earlier revisions: values that a stored run may have, and that changed nothing
    "generation_bf16": (False,),
    "initial_entropy_dir": (None, "outputs/initial_entropy"),
}
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as HfArgumentParser


def check_flags(argv: Sequence[str], config: str, classes: Sequence[type]) -> None:
    """Refuse unknown flags, values of another type, and values out of the range that a dataclass of ours checks.

    Args:
        argv: Command line without the program.
        config: File of TRL's trainer config: grpo_config or sft_config.
        classes: Our dataclasses.

    Raises:
        UsageError: For the first of them.
    """
    ours = fields_of(classes)
    annotations = annotations_of(config) | {name: item.type for name, item in ours.items()}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, annotation in annotations.items():
        _add(parser, name, annotation)
    parser.add_argument("--config")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(one_spelling(error)) from error
    if not any(word.startswith("--unsloth_") for word in unknown):  # fields that Unsloth adds to TRL's configs
        refuse_unknown(unknown, [*annotations, "config"])
    for cls in classes:
        values = {name: getattr(given, name) for name in fields_of([cls]) if getattr(given, name) is not None}
        cls(**values)


def annotations_of(config: str) -> dict[str, str]:
    """Name -> annotation of each field of TRL's trainer config, those of Transformers included; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    roots = {package: Path(str(find_spec(package).origin)).parent for package in ("transformers", "trl")}  # type: ignore[union-attr]
    files = [roots["transformers"] / "training_args.py"]
    files += [roots["trl"] / "trainer" / f"{name}.py" for name in ("base_config", config)]
    return {
        item.target.id: ast.unparse(item.annotation)
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("TrainingArguments", "Config"))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }


def _add(parser: argparse.ArgumentParser, name: str, annotation: Any) -> None:
    """A flag as HfArgumentParser adds it, where the annotation says how; other values are left to it."""
    types: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _bool}
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    words = set(re.findall(r"\w+", text)) - {"None", "Optional"}
    options: dict[str, Any] = {"type": types.get(words.pop()) if len(words) == 1 else None}
    if typing.get_origin(annotation) is Literal:
        options = {"choices": typing.get_args(annotation)}
    elif "list" in text.lower():
        options = {"nargs": "*"}
    elif name == "resume" or options["type"] is _bool:
        options |= {"nargs": "?", "const": True}
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", **options)
    if options.get("type") is _bool:
        parser.add_argument(f"--no_{name}", f"--no-{name.replace('_', '-')}", action="store_true")


def _bool(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in TRUE


def refuse_unknown(unknown: Sequence[str], names: Iterable[str], page: str = "--help_all") -> None:
    """Raise for the first word of a command line that no option has taken.

    Args:
        unknown: The words that are left.
        names: The known options, without dashes.
        page: The option that lists them.

    Raises:
        UsageError: With the nearest option, if there is a near one.
    """
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if flags:
        close = similar(flags[0].removeprefix("--").replace("-", "_"), [*names, "help", page.removeprefix("--")], "--")
        raise UsageError(f"unknown option {flags[0]}{close}; {page} lists all options.")
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


def given_on(argv: Sequence[str]) -> set[str]:
    """The names of the settings on a command line."""
    flags = (without_alias(word).partition("=")[0] for word in argv if word.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}
