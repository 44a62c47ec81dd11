"""Scores of completions: grades them, computes the metrics, writes results.json."""

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from filelock import FileLock
from tqdm import tqdm

from gtpo import grading
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k, sizes_up_to
from gtpo.evaluation.records import (
    ByK,
    Entry,
    Job,
    Origin,
    Problem,
    Problems,
    ProblemScores,
    Scores,
    read_entries,
)
from gtpo.evaluation.storage import Completions, find_completion_files, keys_of, scores_path
from gtpo.files import read_regular, write_atomically
from gtpo.prompts import PromptFormat
from gtpo.runs.provenance import code_of, git_revision, hash_of_code, prompt_keys

Metrics = dict[str, dict[int, float]]  # of a problem, by k'


class Verdicts(NamedTuple):
    """The completions of a problem, read in one way: their answers, and whether each is correct."""

    answers: Sequence[str | None]
    correct: Sequence[bool]

    def metrics(self) -> Metrics:
        """pass@k, its first-k estimate and maj@k: metric -> k' -> the score of the problem, 0 to 1."""
        n, c = len(self.correct), sum(self.correct)
        sizes = sizes_up_to(n)
        return {
            "pass": {k: pass_at_k(n, c, k) for k in sizes},
            "pass_first_k": {k: first_k_pass(self.correct, k) for k in sizes},
            "maj": {k: majority_at_k(self.answers, self.correct, k) for k in sizes},
        }


class Graded(NamedTuple):
    """A problem with its graded completions; ``lenient`` is None with another --grader than ours."""

    problem: Problem
    formatted: int  # completions in the full format
    strict: Verdicts
    lenient: Verdicts | None


def grade(job: Job, completions: Completions) -> Entry:
    """The entry of a job in ``results.json``; lenient scores are those of our grader alone."""
    settings, origin = job.head.settings, job.head.origin
    problems = job.problems
    prompt = settings.prompt.format
    k = settings.sampling.k
    timeouts_before = grading.timeouts()
    graded = []
    for problem in tqdm(problems.rows, desc="  grading", unit=" problems", leave=False):
        texts = [completions[problem.id, sample]["completion"] for sample in range(k)]
        formatted = sum(map(prompt.follows_format, texts))
        graded.append(Graded(problem, formatted, *_judge(problem, texts, problems, prompt)))
    strict = [each.strict.metrics() for each in graded]
    lenient = [each.lenient.metrics() for each in graded if each.lenient]
    rows = [completions[key] for key in keys_of(problems.rows, k)]
    answers = [answer for each in graded for answer in each.strict.answers]
    return Entry(
        label=job.path.parent.name,
        benchmark=job.path.stem,
        problems=len(problems.rows),
        dropped=problems.dropped,
        trained_on=_trained_on(origin, problems.rows),
        k=k,
        strict=_over_problems(strict, ("pass", "pass_first_k", "maj")),
        lenient=_over_problems(lenient, ("pass", "maj")) if lenient else None,
        shares={
            "format": _percent(fmean(each.formatted for each in graded) / k),
            "finished": _percent(fmean(row["finished"] for row in rows)),
            "unreadable": _percent(sum(not grading.normalise(answer or "") for answer in answers) / len(rows)),
            "tokens": fmean(row["tokens"] for row in rows),
        },
        settings=settings,
        origin=origin,
        graded_by={
            "grader": problems.graded_by,
            "code": code_of(problems.graded_by or ""),
            "grading": hash_of_code(Path(grading.__file__).parent),
            "git_revision": git_revision(),
            "math-verify": importlib.metadata.version("math-verify"),
            "timeouts": grading.timeouts() - timeouts_before,
        },
        per_problem=[_record(each, metrics["maj"].values()) for each, metrics in zip(graded, strict, strict=True)],
    )


def _trained_on(origin: Origin, problems: Sequence[Problem]) -> int | None:
    """How many of the problems the run of an adapter or model was trained on; None where it is not known."""
    trained = origin.run.read_prompts()
    keys = prompt_keys(problem.question for problem in problems)
    return sum(key in trained for key in keys) if trained else None


def _judge(
    problem: Problem, texts: Sequence[str], problems: Problems, prompt: PromptFormat
) -> tuple[Verdicts, Verdicts | None]:
    """Strict and lenient verdicts: of the grader that the problems name, by default of ours, which alone has both."""
    tags = prompt.answer_tags
    if not problems.graded_by:
        verdicts = [grading.grade_text(text, problem.gold, *tags) for text in texts]
        of_block, strict, of_text, lenient = zip(*verdicts, strict=True)
        return Verdicts(of_block, strict), Verdicts(of_text, lenient)
    answers = [grading.extract_answer(text, None, *tags) for text in texts]
    if problems.grader:
        correct = problems.grader(problem, prompt.to_messages(problem.question), texts)
    else:
        correct = [grading.math_verify_accepts(answer, problem.gold) for answer in answers]
    return Verdicts(answers, correct), None


def _record(graded: Graded, majority: Iterable[float]) -> ProblemScores:
    correct = graded.strict.correct
    return ProblemScores(
        id=graded.problem.id,
        gold=graded.problem.gold,
        n=len(correct),
        c=sum(correct),
        formatted=graded.formatted,
        correct=_marks(correct),
        correct_lenient=_marks(graded.lenient.correct) if graded.lenient else None,
        majority=_marks(map(bool, majority)),
    )


def write_results(directory: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry next to its completions, then all of the directory to ``results.json``, by a lock; its path."""
    results = directory / "results.json"
    if results.exists() and not read_regular(results).lstrip(b"{ \r\n").startswith(b'"results"'):
        raise UsageError(f"{results} is not of an evaluation: move it, then run the command again.")
    with FileLock(directory / "results.lock"):
        ours = {}
        for entry in entries:
            path = scores_path(directory / entry.label / f"{entry.benchmark}.jsonl")
            ours[path] = entry.write()
            write_atomically(path, json.dumps(ours[path], indent=1))
        stored = []
        for path in filter(Path.is_file, map(scores_path, find_completion_files(directory))):
            stored += [ours[path]] if path in ours else [entry.write() for entry in read_entries(path)]
        write_atomically(results, json.dumps({"results": stored}, indent=1))
    return results


def _over_problems(of_problems: Sequence[Metrics], names: Sequence[str]) -> Scores:
    """Means and intervals over the problems in percent; the first-k estimate has no interval."""
    means: dict[str, ByK] = {}
    intervals: dict[str, ByK] = {}
    for name in names:
        values = {k: [metrics[name][k] for metrics in of_problems] for k in of_problems[0][name]}
        means[name] = {k: _percent(fmean(scores)) for k, scores in values.items()}
        if name != "pass_first_k":
            intervals[name] = {k: [*map(_percent, bootstrap_interval(scores))] for k, scores in values.items()}
    return Scores(means, intervals)


def _marks(values: Iterable[bool]) -> str:
    return "".join("01"[value] for value in values)


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to hide floating-point noise."""
    return round(100 * fraction, 6)
