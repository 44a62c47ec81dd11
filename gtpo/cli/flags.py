"""Words of a command line and values of a YAML file, read by name and type before TRL is imported.

Importing TRL's config takes seconds, and a wrong word should not: names and types of its settings are in its source.
TrlParser is not used. It needs the imported config, does not say which settings were named, leaves the values of a file
as YAML has them, and makes the dataclasses at once, where a preset and what follows from other settings come between.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, field, make_dataclass
from datetime import datetime
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from gtpo.arguments import SHORT_NAMES, RunArguments, Values, fields_of, name_of
from gtpo.cli.derive import DERIVED
from gtpo.errors import UsageError, nearest

Classes = Sequence[type]  # dataclasses of settings
HELP_ALL = "help_all"
COMMAND_LINE_ONLY = {"dry_run", "resume", "overwrite", "changed_reward", "regrade", "compare"}
REMOVED = {  # settings of earlier revisions -> the value of stored runs that changed nothing
    "early_stopping_patience": None,
    "positive_advantage_weight": 1.0,
    "negative_advantage_weight": 1.0,
    "stop_on_collapse": False,
}
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
REPORTERS = "report_to"  # takes several
OF_A_RUN = dict.fromkeys(DERIVED) | {"disable_dropout": True}  # the defaults that are not those of TRL
LOG_LEVELS = ["detail", "debug", "info", "warning", "error", "critical", "passive"]  # of Transformers
OPTIONS = {"help", "nargs", "const", "choices"}  # of add_argument, in the metadata of a field


class Given(NamedTuple):
    """Settings by name, and those whose type is not known yet: words, or values of a file."""

    values: Values
    late: Values

    @property
    def names(self) -> set[str]:
        """Of both."""
        return {*self.values, *(name.removeprefix("no_") for name in self.late)}


class SettingsParser(argparse.ArgumentParser):
    """A flag for each field of some dataclasses; what a file has goes through the types of the flags.

    Args:
        classes: Ours, or all.
        config: grpo_config or sft_config, to add the settings of TRL's config without its import.
    """

    def __init__(self, classes: Classes, config: str = "") -> None:
        super().__init__(
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,  # only what is named is read
            formatter_class=partial(argparse.HelpFormatter, width=100),  # else each flag asks for the terminal's
            conflict_handler="resolve",
        )
        self.settings: dict[str, argparse.Action] = {}
        self._fields: dict[str, Field[Any]] = {}
        self.nullable: set[str] = set()  # settings whose type has None
        for cls in [*classes, outline_of(config)] if config else classes:
            self.add_class(cls)
        self.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
        self.add_argument("--help", "-h", action="store_true", help="Show this page.")
        if config:
            self.add_argument(f"--{HELP_ALL}", action="store_true")

    def add_class(self, cls: type) -> None:
        """A flag for each field that has none, in the group that the class names."""
        title = getattr(cls, "_argument_group_name", None)
        group = self.add_argument_group(title) if title else self
        hints = _hints_of(cls)
        for name, item in fields_of([cls]).items():
            if name in self.settings:
                continue
            options = _options_of(hints[name]) | {key: item.metadata[key] for key in OPTIONS & item.metadata.keys()}
            if name == REPORTERS:
                options |= {"nargs": "+", "action": _Once}
            self._fields[name] = item
            if NoneType in get_args(hints[name]):
                self.nullable.add(name)
            self.settings[name] = group.add_argument(f"--{name}", **options)
            if options["type"] is _to_bool:
                group.add_argument(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)

    def read_words(self, words: Sequence[str]) -> Given:
        """The settings that a command line of :func:`spelled_out` names, in argparse's words where one is wrong."""
        flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        late = {name for name in flags if f"--{name}" not in self._option_string_actions} if has_late(flags) else set()
        for name in late:
            self.add_argument(f"--{name}", nargs="*", action=_Once)
        namespace, unknown = self.parse_known_args(words)
        refuse_unknown(unknown, self.settings)
        values = vars(namespace)
        return Given(values, {name: values.pop(name) for name in late & values.keys()})

    def read_file(self, path: str | Path | None, settings: Values, with_late: bool = False) -> Given:
        """The settings of a YAML file; null keeps the default.

        The default of a removed setting is skipped: runs of earlier revisions have stored it.

        Args:
            path: The file, for messages.
            settings: What it has.
            with_late: Keep settings that are not known, for :meth:`read_late`.
        """
        read = Given({}, {})
        given: Values = {}  # name -> its key and value; a stored run has two names for some, with one value
        allowed = self.settings.keys() - COMMAND_LINE_ONLY
        for key, value in settings.items():
            name = name_of(key)
            other, before = (key, value) if value is None else given.setdefault(name, (key, value))
            if before != value:
                raise UsageError(f"{path}: {other!r} and {key!r} are one setting: remove one of them.")
            if name in REMOVED and value == REMOVED[name]:
                continue
            if name not in allowed and (name in COMMAND_LINE_ONLY or not with_late):
                raise UsageError(f"{path}: {key!r} is not a setting of a file{similar(str(key), allowed)}.")
            if name not in allowed:
                read.late[key] = value
            elif not (value is None or (value == [] and self._may_be_empty(name))):
                read.values[name] = self._value_in_file(name, value, f"{path}: {key}")
        return read

    def read_late(self, given: Given, path: str | Path | None = None) -> Values:
        """All of them, now that their classes are known: ``path`` is the file that has them, None a command line."""
        if path is not None:
            return given.values | self.read_file(path, given.late).values
        late: Values = {}
        for name, words in given.late.items():
            action = self._option_string_actions[f"--{name}"]
            if action.dest not in self.settings:
                refuse_unknown([f"--{name}"], self.settings)
            late[action.dest] = self._value_of(action, words)
        return {name: value for name, value in (given.values | late).items() if name in self.settings}

    def defaults_of(self, classes: Classes) -> Values:
        """Every setting with its default; UsageError for one of a user's class that has none."""
        values: Values = {}
        for name, item in fields_of(classes).items():
            action = self.settings[name]
            default = _default_of(item)
            if isinstance(default, str) and action.nargs == "+" and name != REPORTERS:
                default = None  # of --debug: no list
            elif isinstance(default, str) and action.type is _to_bool:
                default = _to_bool(default)
            if default is MISSING:
                raise UsageError(f"Settings.{name} has no default: give it one.")
            values[name] = default
        if RunArguments in classes:
            values |= {name: OF_A_RUN[name] for name in OF_A_RUN.keys() & values.keys()}
        return values

    def _value_of(self, action: argparse.Action, words: Sequence[str]) -> Any:
        if not words and action.nargs in ("?", 0):
            return action.const
        if not words:
            raise argparse.ArgumentError(action, "expected an argument")
        if len(words) > 1 and action.nargs != "+":
            refuse_unknown(words[1:], self.settings)
        return _unlisted(action, self._get_values(action, [*words]))

    def _value_in_file(self, name: str, value: Any, where: str) -> Any:
        """UsageError for what YAML makes of a text without quotes: no and off are booleans, 1.50 is 1.5."""
        action = self.settings[name]
        is_text = action.type is str and not action.choices
        items = value if isinstance(value, list) and action.nargs == "+" else [value]
        for item in items if is_text else ():
            if isinstance(item, bool | float | datetime):
                raise UsageError(f"{where} is {item}, as YAML reads what has no quotes: put the text in quotes.")
            if isinstance(item, list | dict) and "dict" not in str(self._fields[name].type):
                raise UsageError(f"{where} is a {type(item).__name__}: expected one text.")
        try:
            return self._value_of(action, [_word_of(item, bool(action.choices)) for item in items])
        except argparse.ArgumentError as error:
            raise UsageError(f"{where}: {error.message}") from error

    def _may_be_empty(self, name: str) -> bool:
        """Whether a setting is a list that is empty by default."""
        return self.settings[name].nargs == "+" and name != REPORTERS and not _default_of(self._fields[name])


class _Once(argparse.Action):
    """Words of a setting that takes several; argparse would take the last of two lists."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if hasattr(namespace, self.dest):
            raise UsageError(f"--{self.dest} is given twice, and the last one would count: name all after one.")
        setattr(namespace, self.dest, _unlisted(self, values))


_hints_of = cache(get_type_hints)


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _unlisted(action: argparse.Action, values: Any) -> Any:
    """One reporter is no list, as TRL has it."""
    return values[0] if action.dest == REPORTERS and isinstance(values, list) and len(values) == 1 else values


def _options_of(hint: Any) -> Values:
    """Options of ``add_argument`` for a setting of this type: those of TrlParser."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in members if kind is not NoneType]
    kind = kinds[0]
    if str in kinds and len(kinds) > 1:
        kind = str if NoneType in members else next(other for other in kinds if other is not str)
    if kind is bool:
        return {"type": _to_bool, "nargs": "?", "const": True}
    if get_origin(kind) is list:
        return _options_of(get_args(kind)[0]) | {"nargs": "+", "action": _Once}
    if isinstance(kind, type) and issubclass(kind, Enum):
        kind = Literal[tuple(member.value for member in kind)]
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        return {"type": lambda text: choices.get(text, text), "choices": [*choices.values()]}
    return {"type": _or_none(kind) if NoneType in members and kind is not str else kind}


def _or_none(kind: Any) -> Any:
    """A type of one that is also set to None."""

    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # in argparse's messages
    return read


def _to_bool(text: str) -> bool:
    """The words of TrlParser."""
    for value, words in ((True, "yes true t y 1"), (False, "no false f n 0")):
        if text.lower() in words.split():
            return value
    raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")


def _word_of(value: Any, is_choice: bool) -> str:
    """A value of a YAML file as on a command line."""
    if isinstance(value, bool) and is_choice:
        return "on" if value else "off"  # which YAML 1.1 reads as booleans
    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=str)  # YAML has dates
    return str(value)


@cache  # a process may read many command lines
def outline_of(config: str) -> type:
    """A dataclass with names and types of TRL's trainer config, with Transformers'; nothing is imported.

    Args:
        config: grpo_config or sft_config.
    """
    named: Values = {"Any": Any, "Literal": Literal, "ParallelismConfig": dict}  # no word is one
    for file in ("trainer_utils", "training_args", "debug_utils"):
        text = _source_of(f"transformers/{file}.py")
        for name, body in re.findall(r"(?m)^class (\w+)\(ExplicitEnum\):\n((?:    .*\n|\n)+)", text):
            named[name] = Literal[tuple(re.findall(r'(?m)^    [A-Z]\w* = "(.+)"', body))]
    fields = {}
    for file in ("transformers/training_args.py", "trl/trainer/base_config.py", f"trl/trainer/{config}.py"):
        # of its dataclasses: name, type, and the rest up to the next one
        for name, annotation, rest in re.findall(
            r"(?ms)^    ([a-z]\w*): (\S[^\n]*?) = (.*?)(?=^    \S)", _source_of(file)
        ):
            fields[name] = (name, annotation, field(default=None, metadata=_metadata_in(rest)))
    outline = make_dataclass(config, fields.values())
    outline.__annotations__ = get_type_hints(outline, localns=named)
    return outline


def _metadata_in(text: str) -> Values:
    """What the source of a field says of its flag besides the type."""
    metadata: Values = {}
    if found := re.search(r'"choices": (\[.*?\]|trainer_log_levels)', text):
        metadata["choices"] = re.findall(r'"(\w+)"', found[1]) or LOG_LEVELS
    if '"nargs": "?"' in text:
        metadata |= {"nargs": "?", "const": True}
    return metadata


def _source_of(file: str) -> str:
    """The text of a module of an installed package."""
    package = file.partition("/")[0]
    installed = Path(str(find_spec(package).origin)).parents[1]  # type: ignore[union-attr]
    return (installed / file).read_text(encoding="utf-8")


def has_late(names: Iterable[str]) -> bool:
    """Whether a class that is imported later may have settings: a user's objective, Unsloth's configs."""
    return any(str(name) == "objective" or str(name).startswith("unsloth_") for name in names)


def refuse_unknown(unknown: Sequence[str], names: Iterable[str]) -> None:
    """Raise a UsageError for the first word that no option has taken, with the nearest of ``names``."""
    if unknown:
        word = min(unknown, key=lambda word: not word.startswith("--")).partition("=")[0]
        close = similar(word.removeprefix("--"), [*names, "config", "help"])
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
