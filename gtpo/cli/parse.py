"""From words to settings: words -> what is named -> resolve -> derive -> check -> build.

Precedence, lowest first: the preset of method, model and machine, the file given with ``--config``, the command line. A
YAML key is a flag without its dashes: one parser has the types of both, and an unknown key is an error that names it.
"""

import os
import time
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from gtpo.arguments import ModelArguments, Settings, Values, read_texts
from gtpo.cli.build import build
from gtpo.cli.checks import check, check_given
from gtpo.cli.derive import Facts, derive, run_directory
from gtpo.cli.flags import HELP_ALL, Classes, Given, SettingsParser, spelled_out
from gtpo.cli.help import print_all, print_help
from gtpo.cli.presets import Preset, of_this_machine, preset_for
from gtpo.cli.resolve import resolve
from gtpo.cli.start import Start, find_start, shape_of_adapter, without_remote_settings
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.models.backend import backend_of, gpu_is_available, load_backend
from gtpo.models.memory import fitting_micro_batch
from gtpo.models.source import TINY, model_source
from gtpo.processes import check_launch, limit_openmp_spinning, world_size
from gtpo.runs.directory import REMOTE_SETTINGS

_T = TypeVar("_T")

limit_openmp_spinning(os.environ)  # OpenMP reads it when PyTorch is imported


@dataclass(frozen=True)
class CommandLine:
    """The command line of a train script, read once; everything that is read of it later is read from here."""

    method: str  # gtpo, grpo or sft: the preset directory, and the first part of the run's name
    classes: Classes  # our dataclasses of settings
    parser: SettingsParser
    given: Given  # what is named

    @property
    def objective(self) -> str | None:
        """The class of ``--objective``."""
        return self.given.values.get("objective")

    @property
    def asks_all(self) -> bool:
        """Whether ``--help_all`` waits for the class of ``--objective``, whose settings it lists too."""
        return HELP_ALL in self.given.values

    @cached_property
    def start(self) -> Start:
        """The run that is named: a new one, one that is resumed, or one from an adapter; its settings are checked."""
        start = find_start(self.method, self.parser, self.given)
        path = None if start.is_complete or start.of_run else start.config
        check_given(self.method, self.classes, self.given, start.file, path, start.source.adapter)
        if start.source.adapter:
            start.file.values.update(shape_of_adapter(start.source))
        return start

    @property
    def backend(self) -> str:
        """That of ``--backend``."""
        return str(self.asked.get("backend", ModelArguments.backend))

    @cached_property
    def preset(self) -> Preset:
        """That of the model on this machine."""
        asked = self.asked
        return preset_for(
            self.method, self.start.source, self.backend, asked.get("use_cpu"), asked.get("dry_run", False)
        )

    def read_late(self, classes: Classes) -> tuple[Values, Values, Values]:
        """Every setting by preset or default, what the file has, and the command line; TRL's config is a class."""
        parser, start, named = self.parser, self.start, self.given.names
        for cls in classes:
            parser.add_class(cls)
        plain = parser.defaults_of(classes)
        plain |= parser.read_file(self.preset.path, self.preset.values_of(start.source)).values
        file = parser.read_late(start.file, start.config)
        if start.of_run or start.is_complete:  # a null of a run is a value
            nulls = {name for name in parser.nullable & plain.keys() if start.stored.get(name, ...) is None}
            file = dict.fromkeys(nulls.difference(REMOTE_SETTINGS)) | file
        if start.of_run:
            file = without_remote_settings(file, plain, named, start.config)
        return plain, file, parser.read_late(self.given)

    @property
    def asked(self) -> Values:
        """What file and command line have, whose types are known before TRL is imported."""
        return self.start.file.values | self.given.values


def read_command_line(method: str, classes: Classes, words: Sequence[str] | None = None) -> CommandLine:
    """That of this process, or other words; ``--help`` is printed. The first call of a train script.

    So is ``--help_all``; with ``--objective`` by :func:`parse`, which knows the class.

    Args:
        method: gtpo, grpo or sft.
        classes: Our dataclasses of settings.
        words: Without the name of the script.
    """
    words = spelled_out(words)
    parser = SettingsParser(classes, "sft_config" if method == "sft" else "grpo_config")
    if asks := {"-h", "--help", f"--{HELP_ALL}"} & {*words}:
        given = Given({}, {})
        with suppress(UsageError, ArgumentError):  # the page is what helps
            given = parser.read_words(words)
        if asks != {f"--{HELP_ALL}"}:
            print_help(method, classes, _help_preset(method, given))
        if "objective" not in given.values:
            print_all(classes, _help_preset(method, given), method)
        return CommandLine(method, classes, parser, given)
    given = parser.read_words(words)
    given.values.update(read_texts(given.values))
    return CommandLine(method, classes, parser, given)


def load_backend_of(line: CommandLine) -> str:
    """:func:`gtpo.models.backend.load_backend` for a command line.

    With ``--dry_run`` neither GPU nor packages are needed.
    """
    if line.asks_all:
        return "transformers"
    backend = find_backend(line)
    return backend if line.asked.get("dry_run") else load_backend(backend)


def find_backend(line: CommandLine) -> str:
    """The backend of a command line, after the checks that need neither PyTorch nor TRL, which take seconds."""
    check_launch(os.environ)
    _check_early(line)
    use_cpu = line.asked.get("use_cpu")
    if use_cpu is None:
        use_cpu = line.preset.values().get("use_cpu", False)
    return backend_of(line.backend, use_cpu, gpu_is_available())


def _check_early(line: CommandLine) -> None:
    """:func:`gtpo.cli.early.check_inputs` for the settings of preset, file and command line, and the run directory."""
    from gtpo.cli.early import check_inputs  # they import more than `--help` needs
    from gtpo.runs.start import check_directory, refuse_few_rows

    start, asked = line.start, line.asked
    values = Preset(line.method, start.source.preset, "cpu").values() | asked
    refuse_few_rows(*check_inputs(line.method, values))
    path = start.run.path if start.run else run_directory(line.method, start.source.name, values, line.given.names)
    if path:
        is_plan = asked.get("dry_run", False)
        check_directory(path, bool(start.run), asked.get("overwrite", False), lock=not is_plan)


def parse(line: CommandLine, classes: Classes) -> Settings:
    """The settings of a training run; the last of the classes is TRL's config, before it a user's of an objective."""
    every = (*line.classes, *classes)
    if line.asks_all:
        print_all(every, _help_preset(line.method, line.given), line.method)
    start, named = line.start, line.given.names
    plain, file, words = line.read_late(every)
    values = resolve(plain, of_this_machine(plain, start.source, line.backend), file, words)
    values["model"] = start.source.name
    changed = frozenset(name for name, value in values.items() if value != plain.get(name, ...))
    processes = world_size()
    fit = partial(fitting_micro_batch, start.source, processes)
    now = time.strftime("%Y%m%d-%H%M%S")
    facts = Facts(line.method, start.source.name, processes, start.earlier, now, fit)
    derived, geometry = derive(values, named, facts)
    values |= derived
    on_gpu = values["dry_run"] or gpu_is_available()  # of a plan, wherever it is made
    backend = backend_of(values["backend"], values["use_cpu"], on_gpu)
    check(values, geometry, processes, on_gpu, on_gpu and backend == "unsloth")
    return build(line.method, every, values, changed, start.source)


def parse_evaluation(cls: type[_T], words: Sequence[str] | None = None) -> tuple[_T, set[str]]:
    """The settings ``cls`` of an evaluation from ``--config`` and the command line, and the names that are given."""
    words = spelled_out(words)
    parser = SettingsParser([cls])
    if {"-h", "--help"} & {*words}:
        print_all([cls], {})
    named = parser.read_words(words).values
    config = named.get("config")
    file = {} if config is None else parser.read_file(config, read_yaml(config)).values
    values = {name: value for name, value in (file | named).items() if name != "config"}
    return cls(**values), {*file, *named}


def _help_preset(method: str, given: Given) -> Values:
    """The values of the preset that ``--help`` shows as defaults."""
    source = model_source(TINY)
    with suppress(UsageError):  # of a name that means nothing
        source = model_source(given.values.get("model", TINY))
    return preset_for(method, source, dry_run=True).values()
