"""The flags of a command line, checked before TRL is imported.

Importing TRL's trainer config takes seconds, and a misspelled flag or a wrong value should not: the names and types of
its settings are read from the source of the dataclasses.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from gtpo import arguments
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


def check_flags(argv: Sequence[str], config: str, classes: Sequence[type]) -> None:
    """Refuse unknown flags on a command line from :func:`spelled_out`, before TRL is imported.

    ``config`` is the file of TRL's trainer config, grpo_config or sft_config; ``classes`` are our dataclasses.
    """
    names = [*annotations_of(config), *fields_of(classes), "config", HELP_ALL[2:]]
    known = {*names, *(f"no_{name}" for name in names)}  # HfArgumentParser's for --log_completions false
    unknown = [f"--{name}" for name in given_on(argv) if name not in known]
    later = ("--objective", "--unsloth_")  # a user's class, and Unsloth in TRL's configs, have fields of their own
    if not any(word.startswith(later) for word in argv):
        refuse_unknown(unknown, names)


def annotations_of(config: str) -> dict[str, str]:
    """Name -> annotation of each field of TRL's trainer config, with Transformers'; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    transformers, trl = map(_directory_of, ("transformers", "trl"))
    files = [transformers / "training_args.py", trl / "trainer" / "base_config.py", trl / "trainer" / f"{config}.py"]
    return _annotations_in(files, "TrainingArguments", "Config")


def _directory_of(package: str) -> Path:
    return Path(str(find_spec(package).origin)).parent  # type: ignore[union-attr]


def _annotations_in(files: Iterable[Path], *endings: str) -> dict[str, str]:
    found = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not (isinstance(node, ast.ClassDef) and node.name.endswith(endings)):
                continue
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and not (name := ast.unparse(item.target)).startswith("_"):
                    found[name] = ast.unparse(item.annotation)
    return found


def check_given_values(method: str, argv: Sequence[str], config: str) -> None:
    """Refuse numbers and choices on a command line from :func:`spelled_out` that the parser would refuse seconds later.

    Args:
        method: gtpo, grpo or sft.
        argv: The command line.
        config: The file of TRL's trainer config, grpo_config or sft_config.
    """
    annotations = annotations_of(config) | _annotations_in([Path(arguments.__file__)], "Arguments")
    numbers = argparse.Namespace()
    for name, word in _words_of(argv).items():
        annotation = annotations.get(name, "").removesuffix(" | None")
        if annotation.startswith("Literal") and word not in (choices := ast.literal_eval(annotation[7:])):
            raise UsageError(f"--{name} is {word!r}: expected one of {', '.join(choices)}.")
        if annotation in ("int", "float"):
            try:
                setattr(numbers, name, int(word) if annotation == "int" else float(word))
            except ValueError:
                expected = "a whole number" if annotation == "int" else "a number"
                raise UsageError(f"--{name} is {word!r}: expected {expected}.") from None
    check_fields(numbers, CHECKS)
    if method == "gtpo":
        check_fields(numbers, {"beta": (lambda x: x == 0, "0, because GTPO has no KL term: train_grpo.py has one")})


def _words_of(argv: Sequence[str]) -> dict[str, str]:
    """Name -> value of the settings on a command line; of several words the first."""
    found = {}
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):  # none where there is no word
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (equals or not following.startswith("--")):
            found[name] = value if equals else following
    return found


def refuse_unknown(unknown: Sequence[str], names: Iterable[str]) -> None:
    """Raise a UsageError for the first word that no option has taken, with the nearest of ``names``."""
    if unknown:
        word = min(unknown, key=lambda word: not word.startswith("--")).partition("=")[0]
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
        is_flag = flag.startswith("--")
        if is_flag:
            name = name_of(flag[2:].replace("-", "_"))
            word = f"--{name}{equals}{value}"
        words.append(word)
    return words


def given_on(argv: Sequence[str]) -> list[str]:
    """The names of the settings on a command line from :func:`spelled_out`."""
    return [word[2:].partition("=")[0] for word in argv if word.startswith("--")]
