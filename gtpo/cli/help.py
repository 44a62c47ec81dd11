"""``--help`` of the train scripts: the settings that most runs change. ``--help_all`` lists every one, with TRL's."""

import argparse
import sys
from collections import ChainMap
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gtpo.arguments import SourceArguments, Values, fields_of, name_of
from gtpo.cli.flags import HELP_ALL, Classes, SettingsParser
from gtpo.files import read_yaml

_short_help = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)  # names in one column


def print_help(method: str, classes: Classes, preset: Values) -> NoReturn:
    """Print the settings that most runs change, with the values of a preset, and exit; TRL is not imported.

    Args:
        method: gtpo, grpo or sft.
        classes: Our dataclasses of settings.
        preset: The values of the selected preset.
    """
    parser = argparse.ArgumentParser(usage="%(prog)s [--key value ...]", formatter_class=_short_help, add_help=False)
    parser.description = sys.modules["__main__"].__doc__
    parser.epilog = f"--{HELP_ALL} lists every setting, with TRL's."
    fields = fields_of(classes)
    defaults: Values = {}
    for cls in classes:
        defaults |= vars(cls())
    defaults |= preset
    for title, settings in _shown().items():
        group = parser.add_argument_group(title)
        for name, shown in settings.items():
            if method in shown.get("methods", [method]):
                text = shown.get("text") or fields[name].metadata["help"]
                default = defaults.get(name_of(name))
                group.add_argument(f"--{name}", metavar="", help=text + _bracketed(default))
    parser.print_help()
    raise SystemExit


def print_all(classes: Classes, preset: Values, method: str = "") -> NoReturn:
    """Print every option of a script, with the values of a preset as defaults, and exit; TRL is imported for its texts.

    Without a method it is an evaluation: the texts are its own, and the columns of data come last.
    """
    if method:
        import trl

        classes = [*classes, trl.SFTConfig if method == "sft" else trl.GRPOConfig]
    parser = SettingsParser(classes)
    parser.set_defaults(**parser.defaults_of(classes))
    parser.usage = "%(prog)s [--config FILE] [--key value ...]"
    parser.formatter_class = _AllHelp
    parser.description = sys.modules["__main__"].__doc__
    parser.set_defaults(**preset)
    shown = ChainMap(*_shown().values()) if method else {}
    if not method:
        for group in parser._action_groups:
            group._group_actions.sort(key=lambda action: action.dest in fields_of([SourceArguments]))
    for action in parser._actions:
        action.option_strings = action.option_strings[:1]  # not -h too
        action.help = (action.help != argparse.SUPPRESS and shown.get(action.dest, {}).get("text")) or action.help
        if action.help is None and action.dest in parser.settings:  # of an objective
            action.help = "(default: %(default)s)"
    parser._action_groups.sort(key=lambda group: group.title == "options")  # TRL's last
    parser.print_help()
    raise SystemExit


def _shown() -> Values:
    """Group -> setting -> what ``help.yaml`` says of it."""
    return read_yaml(Path(__file__).with_name("help.yaml"))


def _bracketed(default: Any) -> str:
    """`` [value]``, or nothing without one."""
    text = " ".join(default) if isinstance(default, list) else str(default)
    if text in ("None", "False", ""):
        return ""
    return f" [{text.replace('True', 'true')}]".replace("%", "%%")


class _AllHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, []) else action.help
