"""A flag for each field of some dataclasses, with TRL's parser; a YAML file goes through the types of the flags."""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gtpo.arguments import RunArguments, Values, fields_of, name_of
from gtpo.cli.flags import Classes, flags_on, refuse_unknown, similar
from gtpo.errors import UsageError

REMOVED = {  # settings of earlier revisions -> the value of stored runs that changed nothing
    "early_stopping_patience": None,
    "positive_advantage_weight": 1.0,
    "negative_advantage_weight": 1.0,
    "stop_on_collapse": False,
}
COMMAND_LINE_ONLY = {"dry_run", "resume", "overwrite", "changed_reward", "regrade", "compare"}
OF_VLLM = {"vllm_gpu_memory_utilization": "gpu_memory_utilization", "vllm_max_model_length": "max_seq_length"}
DERIVED = (  # from other settings, unless given
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    *OF_VLLM,
)


def parser_of(classes: Classes) -> Any:
    """A flag for each field of some dataclasses, in the groups that they name."""
    from trl import TrlParser

    parser = TrlParser(
        classes,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        conflict_handler="resolve",  # max_seq_length is also a field of the SFTConfig that Unsloth generates
    )
    for action in parser._actions:
        if getattr(action.type, "__name__", "") == "string_to_bool" and action.nargs is None:  # --bf16 alone
            action.nargs = "?"
            action.const = True
        elif action.dest == "report_to":
            action.nargs = "+"
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    parser.add_argument("--help", action="store_true", help="Show this page.")
    if RunArguments in classes:
        parser.set_defaults(**dict.fromkeys(DERIVED))
        if "disable_dropout" in fields_of(classes):  # of GRPO and GTPO
            parser.set_defaults(disable_dropout=True)
    return parser


def read_values(parser: Any, words: Sequence[str]) -> Values:
    """The value of every setting: its default, or that of a command line."""
    fields = fields_of(parser.dataclass_types)
    for action in parser._actions:
        if action.nargs in ("+", "*") and sum(map(words.count, action.option_strings)) > 1:
            raise UsageError(f"--{action.dest} is given twice, and the last one would count: name all after one.")
    namespace, unknown = parser.parse_known_args(words)
    refuse_unknown(unknown, [*fields, "config"])
    values = {name: getattr(namespace, name) for name in fields}
    match values.get("report_to"):
        case [reporter]:
            values["report_to"] = reporter
    return values


def read_settings(parser: Any, path: str | Path | None, settings: Values) -> Values:
    """The settings of a YAML file through the types of their flags; null keeps the default.

    The default of a removed setting is skipped: runs of earlier revisions have stored it.
    """
    allowed = fields_of(parser.dataclass_types).keys() - COMMAND_LINE_ONLY
    words = []
    given: Values = {}  # name -> its key and value; a stored run has two names for some, with one value
    for key, value in settings.items():
        name = name_of(key)
        other, before = (key, value) if value is None else given.setdefault(name, (key, value))
        if before != value:
            raise UsageError(f"{path}: {other!r} and {key!r} are one setting: remove one of them.")
        if name in REMOVED and value == REMOVED[name]:
            continue
        if name not in allowed:
            raise UsageError(f"{path}: {key!r} is not a setting of a file{similar(str(key), allowed)}.")
        action = parser._option_string_actions[f"--{name}"]
        _check_text(value, action, f"{path}: {key}")
        if isinstance(value, list) and action.nargs in ("+", "*"):
            if value or parser.get_default(name):
                words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={_word_of(value, action)}")
    values = read_values(parser, words)
    return {name: values[name] for name in flags_on(words)}


def _check_text(value: Any, action: argparse.Action, where: str) -> None:
    """Refuse what YAML makes of a text without quotes: no and off are booleans, 1.50 is 1.5."""
    for item in value if isinstance(value, list) else [value]:
        if action.type is str and not action.choices and isinstance(item, bool | float | datetime):
            raise UsageError(f"{where} is {item}, as YAML reads what has no quotes: put the text in quotes.")


def _word_of(value: Any, action: argparse.Action) -> str:
    """A value of a YAML file as on a command line."""
    if isinstance(value, bool) and action.choices:
        return "on" if value else "off"  # which YAML 1.1 reads as booleans
    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=str)  # YAML has dates
    return str(value)
