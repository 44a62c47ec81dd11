"""The page that ``--help`` prints: our settings by group, then the usual ones of TRL and Transformers.

``help.yaml`` has the texts that are not those of a dataclass of ours.
"""

import argparse
import dataclasses
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gtpo.arguments import fields_of
from gtpo.files import read_yaml


def print_help(
    script: str,
    classes: Sequence[type],
    preset: Path | None = None,
    derived: Collection[str] = (),
    show_all: bool = False,
) -> None:
    """Print the help page of a script.

    Args:
        script: gtpo, grpo, sft or evaluate.
        classes: The dataclasses of its settings; of a train script the last one is TRL's trainer config.
        preset: The preset whose values are shown as defaults, of a train script.
        derived: Settings whose default follows from others; it is not shown.
        show_all: Also show every setting of TRL and Transformers.
    """
    page_texts = read_yaml(Path(__file__).parent / "help.yaml")
    training, values = script != "evaluate", read_yaml(preset) if preset else {}
    sections = {cls._argument_group_name: fields_of([cls]) for cls in classes if hasattr(cls, "_argument_group_name")}
    if not training:
        known = fields_of(classes)
        sections = {title: {name: known[name] for name in names} for title, names in page_texts["evaluation"].items()}
    texts = {name: str(item.metadata.get("help", "")) for group in sections.values() for name, item in group.items()}
    if training:
        rest = {name: item for name, item in fields_of(classes[-1:]).items() if name not in texts}
        for title, shown in page_texts["trainer"].items():
            sections[title] = {name: rest.pop(name) for name in shown if name in rest}
            texts |= shown
        if show_all:
            sections["all other settings of TRL and Transformers"] = rest
            texts |= {name: str(item.metadata.get("help", "")) for name, item in rest.items()}
        if script == "sft":
            texts |= page_texts["sft"]
        names = [name for name in page_texts["common"] if name in texts]
        sections = {
            "most used": {n: group.pop(n) for n in names for group in sections.values() if n in group}
        } | sections
    page = argparse.ArgumentParser(
        prog=f"train_{script}.py" if training else "evaluate.py",
        usage="%(prog)s [--config FILE] [--key value ...]",
        description=page_texts["descriptions"][script],
        epilog=page_texts["evaluation_examples"],
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if preset is not None:
        examples = page_texts["examples"][script].format(script=script)
        page.description = (
            f"{page.description}\n\n{textwrap.indent(examples, '  ')}\n[...] names the source of a value in the paper. "
            f"Defaults are those of configs/{script}/{preset.name}:\n--model NAME --help shows those of another model."
        )
        page.epilog = "--debug shows the traceback of an error."
    for title, fields in sections.items():
        group = page.add_argument_group(title)
        for name, item in fields.items():
            default = None if name in derived else _default(item, values)
            text = texts[name] if default in (None, "") else f"{texts[name]} (default: {default})"
            group.add_argument(
                f"--{name}",
                metavar="[RUN]" if name == "resume" else _placeholder(item.type),
                help=text.replace("%", "%%"),
            )
    group = page.add_argument_group("help and files of settings")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    group.add_argument("--help", action="store_true", help="Show this page.")
    if training:
        group.add_argument("--help_all", action="store_true", help="Also show all settings of TRL and Transformers.")
    page.print_help()


def _default(item: dataclasses.Field[Any], preset: Mapping[str, Any]) -> Any:
    if item.name in preset:
        return preset[item.name]
    if callable(item.default_factory):
        return " ".join(map(str, item.default_factory()))
    return None if item.default is dataclasses.MISSING else item.default


def _placeholder(type_: Any) -> str:
    """int | None -> N, bool -> true|false, Literal -> its values."""
    options = [option for option in typing.get_args(type_) if option is not type(None)]
    if typing.get_origin(type_) is Literal:
        return "|".join(map(str, options))
    for option in [*options, type_]:
        if option in (bool, int, float):
            return {bool: "true|false", int: "N", float: "X"}[option]
    return "VALUE"
