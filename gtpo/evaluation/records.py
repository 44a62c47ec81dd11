"""Typed records of an evaluation: problems, the settings and the origin of completions, the scores of a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from gtpo.arguments import BENCHMARK_TITLES, PromptArguments, stored_prompt
from gtpo.data.load import Problem as Problem
from gtpo.errors import printable
from gtpo.files import read_regular
from gtpo.runs.directory import RunDirectory, run_around

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
class Sampling:
    """How completions are sampled.

    The completions of a batch of Transformers share a random stream, so ``batch_size`` affects what is sampled. It is
    None for vLLM, which schedules its own batches and seeds each completion.
    """

    k: int = 64  # completions per problem
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 1500
    batch_size: int | None = None
    load_in_4bit: bool = False  # NF4 weights, quantized when they are loaded; else 16 bits, and 32 on a CPU


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """Everything that determines completions; their file and their scores have it as one flat JSON object."""

    model: str = ""  # fingerprint of the base's files, or its Hub id
    backend: str = ""
    sampling: Sampling = Sampling()
    adapter: str | None = None  # fingerprint of its files; None for the base model
    prompt: PromptArguments = field(default_factory=PromptArguments)
    benchmark: str = ""
    problems: int = 0
    problems_hash: str = ""
    others: dict = field(default_factory=dict)  # of another revision
    are_known: bool = True  # False for scores that were stored without them

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The settings in a JSON object."""
        own = {name: stored[name] for name in _OWN if name in stored}
        sampling = Sampling(**_known(Sampling, stored))
        prompt = PromptArguments(**stored_prompt(stored))
        taken = {*_OWN, *vars(sampling), *vars(prompt)}
        others = {name: value for name, value in stored.items() if name not in taken}
        return cls(**own, sampling=sampling, prompt=prompt, others=others)

    def write(self) -> Row:
        """The JSON object."""
        weights = {"model": self.model, "backend": self.backend, **asdict(self.sampling), "adapter": self.adapter}
        asked = {"benchmark": self.benchmark, "problems": self.problems, "problems_hash": self.problems_hash}
        return {**weights, **asdict(self.prompt), **asked, **self.others}


_OWN = {"model", "backend", "adapter", "benchmark", "problems", "problems_hash"}


@dataclass(frozen=True)
class Origin:
    """The origin of completions, in addition to the settings that determine them."""

    model: str  # Hub id or path of the base model
    adapter: str | None = None  # its directory; None for the base model
    checkpoint: str | None = None  # last, best or the number of a step; None outside a run
    environment: dict = field(default_factory=dict)  # versions, git revision and hardware
    data: dict = field(default_factory=dict)  # the benchmark on the command line, and how its data was read

    @property
    def run(self) -> RunDirectory:
        """The run of the adapter or model; of others a directory without its files."""
        return run_around(self.adapter or self.model)

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The origin in a JSON object; ``judge`` is an earlier name of ``grader``."""
        data = dict(stored.get("data", {}))
        if "judge" in data:
            data["grader"] = data.pop("judge")
        return cls(**_known(cls, stored) | {"data": data})


@dataclass(frozen=True)
class Head:
    """The first line of a completion file: the settings of its completions, and their origin."""

    settings: CompletionSettings
    origin: Origin

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The head in a JSON object; KeyError or TypeError if a key is missing."""
        return cls(CompletionSettings.read(stored["settings"]), Origin.read(stored["about"]))

    @classmethod
    def of_entry(cls, stored: Stored) -> Self:
        """That of the completions whose scores are in a JSON object, an entry of ``results.json``, perhaps in part."""
        settings = stored.get("settings")
        known = CompletionSettings(are_known=False) if settings is None else CompletionSettings.read(settings)
        return cls(known, Origin.read({"model": "", **stored}))

    def write(self) -> Row:
        """The JSON object."""
        return {"settings": self.settings.write(), "about": asdict(self.origin)}


@dataclass(frozen=True)
class Job:
    """One model on one benchmark; a completion file, ``LABEL/BENCHMARK.jsonl``, with other settings is refused."""

    path: Path
    problems: Problems
    head: Head

    @property
    def adapter(self) -> Path | None:
        adapter = self.head.origin.adapter
        return Path(adapter) if adapter else None

    @property
    def title(self) -> str:
        """Label and benchmark, for the progress bar."""
        name = self.path.stem
        return printable(f"{self.path.parent.name}, {BENCHMARK_TITLES.get(name, name)}")


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


ByK = dict[int, Any]  # k' -> percent, or the (low, high) of an interval
LENIENT = "_lenient"  # ends the names of the lenient metrics in files


@dataclass(frozen=True)
class Scores:
    """The scores of one way to read answers: strict, from the answer block, or lenient, in any format.

    Attributes:
        means: Metric (``pass``, ``pass_first_k``, ``maj``) -> k' -> percent.
        intervals: Metric -> k' -> 95 % interval in percent.
    """

    means: dict[str, ByK]
    intervals: dict[str, ByK]

    @classmethod
    def read(cls, means: Stored, intervals: Stored, ending: str = "") -> "Scores | None":
        """Those whose names have this ending, or none; None if there are none."""
        of_both = []
        for stored in (means, intervals):
            found = {}
            for name, by_k in stored.items():
                if isinstance(by_k, dict) and name.endswith(LENIENT) == bool(ending):
                    found[name.removesuffix(ending)] = {int(k): value for k, value in by_k.items()}
            of_both.append(found)
        return cls(*of_both) if any(of_both) else None

    def write(self, ending: str = "") -> tuple[Row, Row]:
        """Means and intervals as JSON objects."""
        means, intervals = (
            {metric + ending: {str(k): value for k, value in by_k.items()} for metric, by_k in scores.items()}
            for scores in (self.means, self.intervals)
        )
        return means, intervals


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model on one benchmark: an entry of ``results.json`` (docs/evaluation.md)."""

    label: str  # directory of the completion file
    benchmark: str  # its name
    problems: int  # their number
    dropped: dict = field(default_factory=dict)  # why rows of your data are no problems -> their number
    trained_on: int | None = None  # problems whose question is a training prompt of the run; None: not known
    k: int  # samples per problem
    strict: Scores
    lenient: Scores | None = None  # None with another --grader
    shares: dict  # percent of the completions: format, finished; of the answers: unreadable. tokens: their mean number
    settings: CompletionSettings
    origin: Origin  # its keys are keys of the entry in the file
    graded_by: dict = field(default_factory=dict)  # --grader, None for ours; hashes, versions, and its timeouts
    per_problem: list[ProblemScores]  # in the order of the benchmark

    @classmethod
    def read(cls, stored: Stored) -> Self:
        """The entry in a JSON object; KeyError or TypeError if a key is missing."""
        scores, intervals = stored["scores"], stored["intervals"]
        found = {
            "strict": Scores.read(scores, intervals) or Scores({}, {}),
            "lenient": Scores.read(scores, intervals, LENIENT),
            "shares": {name: value for name, value in scores.items() if not isinstance(value, dict)},
            "settings": CompletionSettings.read(stored["settings"]),
            "origin": Origin.read(stored),
            "per_problem": [ProblemScores(**_known(ProblemScores, problem)) for problem in stored["per_problem"]],
        }
        return cls(**_known(cls, stored) | found)

    def write(self) -> Row:
        """The JSON object."""
        means, intervals = self.strict.write()
        if self.lenient:
            of_lenient = self.lenient.write(LENIENT)
            means |= of_lenient[0]
            intervals |= of_lenient[1]
        return {
            **asdict(self.origin),
            "label": self.label,
            "benchmark": self.benchmark,
            "problems": self.problems,
            "dropped": self.dropped,
            "trained_on": self.trained_on,
            "k": self.k,
            "scores": means | self.shares,
            "intervals": intervals,
            "settings": self.settings.write(),
            "graded_by": self.graded_by,
            "per_problem": [asdict(problem) for problem in self.per_problem],
        }


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
