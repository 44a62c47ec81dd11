"""Benchmarks: which of them a command line names, how their problems are read, and your own grader."""

import asyncio
import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES, SourceArguments
from gtpo.data.load import load_benchmark, load_user_benchmark
from gtpo.data.tables import check_source, refuse_flags, short_name_of
from gtpo.errors import RunError, UsageError
from gtpo.evaluation.arguments import DATA_FLAGS, MATH_VERIFY, EvaluationArguments
from gtpo.evaluation.records import Problem, Problems, Row, UserGrader
from gtpo.grading.user_functions import load_rewards


@dataclass(frozen=True)
class Benchmark:
    """One of ``--benchmarks``: what its problems and gold answers are read from, and what grades the completions.

    Attributes:
        name: In tables and files.
        source: On the command line: its name, a file, or a Hub id.
        reading: How its rows are read.
        grader: Of ``--grader``.
    """

    name: str
    source: str
    reading: SourceArguments
    grader: str | None = None

    def write(self) -> Row:
        """The JSON object from which stored completions are graded again; ``limit`` is among their settings."""
        read_with = {flag: getattr(self.reading, flag) for flag in DATA_FLAGS}
        return {"source": self.source, **read_with, "grader": self.grader}

    def load(self) -> Problems:
        """Its problems, with the grader if that is yours."""
        own_grader = None if self.grader == MATH_VERIFY else self.grader
        limit = self.reading.limit
        if self.name in BENCHMARK_TITLES:
            rows = load_benchmark(self.name, self.reading.data_dir)[:limit]
            return Problems(rows, graded_by=None if own_grader else self.grader)
        rows, dropped = load_user_benchmark(self.name, self.source, self.reading, own_grader is not None, limit)
        grader = load_user_grader(own_grader, ["prompt", *rows[0].columns]) if own_grader else None
        return Problems(rows, dropped, grader, self.grader)


def select_benchmarks(flags: EvaluationArguments) -> list[Benchmark]:
    """``--benchmarks`` without duplicates.

    Your benchmark is named after its file or directory without the extension; ``gsm8k.csv`` keeps it.
    """
    if not flags.benchmarks:
        raise UsageError(f"--benchmarks is missing: name one or more of {', '.join(BENCHMARK_TITLES)}, or your file.")
    selected: dict[str, Benchmark] = {}
    for source in flags.benchmarks:
        check_source("benchmarks", source, BENCHMARK_TITLES)
        name = short_name_of(source, BENCHMARK_TITLES)
        other = selected.setdefault(name, Benchmark(name, source, flags.reading, flags.grader)).source
        if other != source:
            raise UsageError(f"{other} and {source} are both called {name} in tables and files: rename one.")
    if not selected.keys() - BENCHMARK_TITLES:
        for_yours = [*DATA_FLAGS[1:], *(["grader"] if flags.user_grader else [])]  # all but data_dir
        refuse_flags(flags, for_yours, "these benchmarks")
    return [*selected.values()]


def load_user_grader(name: str, columns: Collection[str]) -> UserGrader:
    """The function of ``--grader``, ``file.py:function`` or ``module:function``; ``columns``: those of the benchmark.

    It is called as TRL calls a reward function; a completion is correct above 0.
    """
    [reward] = load_rewards([name], {}, columns, noun="grader")

    def grade(problem: Problem, prompt: Any, texts: Sequence[str]) -> list[bool]:
        count = len(texts)
        called = reward(
            prompts=[prompt] * count,
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            **{column: [value] * count for column, value in problem.columns.items()},
        )
        if inspect.iscoroutine(called):
            asyncio.run(called)
        correct = []
        for value in reward.returned:
            if value is None or math.isnan(value):
                raise RunError(f"the grader {name} returned {value} for {problem.id}: expected a number.")
            correct.append(value > 0)
        return correct

    return grade
