"""Typed records of an evaluation: the problems of a benchmark, the origin of completions, the scores of a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from gtpo.arguments import PromptArguments, stored_prompt
from gtpo.data.load import Problem as Problem
from gtpo.files import read_regular

Row = dict[str, Any]  # a JSON object
Stored = Mapping[str, Any]  # one that is read
# Your --grader: (problem, its prompt as a conversation, completions) -> whether each is correct
UserGrader = Callable[..., list[bool]]


@dataclass(frozen=True)
class Problems:
    """The problems of a benchmark; ``dropped``: why rows of your data are none -> their number.

    Your ``grader`` decides what is correct instead of ours. ``graded_by`` names the ``--grader``.
    """

    rows: Sequence[Problem]
    dropped: dict = field(default_factory=dict)
    grader: UserGrader | None = None
    graded_by: str | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of completions, in addition to the settings that determine them."""

    model: str  # Hub id or path of the base model
    adapter: str | None = None  # its directory; None for the base model
    checkpoint: str | None = None  # last, best or the number of a step; None outside a run
    environment: dict = field(default_factory=dict)  # versions, git revision and hardware
    data: dict = field(default_factory=dict)  # the benchmark on the command line, and how its data was read

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The origin in a JSON object; ``judge`` is an earlier name of ``grader``."""
        data = dict(stored.get("data", {}))
        if "judge" in data:
            data["grader"] = data.pop("judge")
        return cls(**_known(cls, stored) | {"data": data})


@dataclass(frozen=True)
class Head:
    """The settings of a completion file: everything that determines the completions, and where they come from."""

    settings: dict
    origin: Origin

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The head in a JSON object; KeyError or TypeError if a key is missing."""
        return cls(dict(stored["settings"]), Origin.read(stored["about"]))

    @property
    def prompt(self) -> PromptArguments:
        """How the model was asked."""
        return PromptArguments(**stored_prompt(self.settings))

    def write(self) -> Row:
        """The JSON object."""
        return {"settings": self.settings, "about": asdict(self.origin)}


@dataclass(frozen=True, kw_only=True)
class ProblemScores:
    """The graded samples of one problem."""

    id: str
    gold: str
    n: int  # samples
    c: int  # correct ones
    formatted: int  # those in the full format
    correct: str  # a digit per sample, "0110"
    correct_lenient: str | None = None  # the same in any format; None with another --grader
    majority: str  # a digit per k' of maj@k: whether the majority of the first k' samples is correct


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model on one benchmark: an entry of ``results.json`` (docs/evaluation.md)."""

    label: str  # directory of the completion file
    benchmark: str  # its name
    problems: int  # their number
    dropped: dict = field(default_factory=dict)  # why rows of your data are no problems -> their number
    trained_on: int | None = None  # problems whose question is a training prompt of the run; None: not known
    k: int  # samples per problem
    scores: dict  # metric -> percent, by k' where it depends on k'
    intervals: dict  # metric -> k' -> 95 % interval in percent
    settings: dict  # everything that determines the completions
    origin: Origin  # its keys are keys of the entry in the file
    graded_by: dict = field(default_factory=dict)  # --grader, None for ours; hashes, versions, and its timeouts
    per_problem: list[ProblemScores]  # in the order of the benchmark

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The entry in a JSON object; KeyError or TypeError if a key is missing."""
        problems = [ProblemScores(**_known(ProblemScores, problem)) for problem in stored["per_problem"]]
        return cls(**_known(cls, stored) | {"origin": Origin.read(stored), "per_problem": problems})

    def write(self) -> Row:
        """The JSON object."""
        stored = asdict(self)
        return stored.pop("origin") | stored


Entries = Sequence[Entry]
Groups = dict[str, list[Entry]]  # by a key


def read_entries(path: Path) -> list[Entry]:
    """The entries of ``results.json``, or the one next to a completion file."""
    stored = json.loads(read_regular(path))
    found = stored["results"] if path.name == "results.json" else [stored]
    return list(map(Entry.read, found))


def by_benchmark(entries: Entries) -> Groups:
    """The entries of each benchmark, in their order."""
    return grouped(entries, lambda entry: entry.benchmark)


def grouped(entries: Entries, key: Callable[[Entry], str]) -> Groups:
    """The entries by a key, in their order."""
    found: Groups = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def _known(cls: Any, stored: Stored) -> Row:
    """The fields of a dataclass in a JSON object, whose other keys are ignored."""
    return {item.name: stored[item.name] for item in fields(cls) if item.name in stored}
