"""Scores of a completion file: grades the completions, computes the metrics, writes results.json."""

import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from tqdm import tqdm

from gtpo import grading
from gtpo.arguments import PromptArguments, stored_prompt
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k, sizes_up_to
from gtpo.evaluation.records import Entry, Problem, Problems, ProblemScores, read_entries
from gtpo.evaluation.storage import find_completion_files, key_of, keys_of, read_completions, scores_path
from gtpo.files import write_atomically
from gtpo.prompts import PromptFormat
from gtpo.runs.provenance import git_revision


class _Verdicts(NamedTuple):
    """The answers in the completions of one problem, and whether they are correct; lenient ones by our grader alone."""

    answers: Sequence[str | None]
    correct: Sequence[bool]
    lenient_answers: Sequence[str | None] = ()
    lenient: Sequence[bool] = ()

    def scores(self) -> dict[str, list[float]]:
        """Metric -> its value at each k'."""
        scores = _scores_of(self.answers, self.correct)
        if self.lenient:
            lenient = _scores_of(self.lenient_answers, self.lenient)
            scores |= {"pass_lenient": lenient["pass"], "maj_lenient": lenient["maj"]}
        return scores


def grade(path: Path, problems: Problems) -> Entry:
    """The entry of a completion file in ``results.json``; lenient scores are those of our grader alone."""
    head, rows = read_completions(path)
    prompt = PromptArguments(**stored_prompt(head.settings)).format
    k = head.settings["k"]
    keys = keys_of(problems.rows, k)
    completions = {key_of(row): row for row in rows if key_of(row) in keys}
    if len(completions) != len(keys):
        raise UsageError(f"{path} has {len(completions)} of {len(keys)} completions: resume it without --regrade.")
    timeouts_before = grading.timeouts()
    per_problem, unreadable = [], 0
    by_metric: dict[str, list[list[float]]] = defaultdict(list)
    for problem in tqdm(problems.rows, desc="  grading", unit=" problems", leave=False):
        texts = [completions[problem.id, sample]["completion"] for sample in range(k)]
        verdicts = _judge(problem, texts, problems, prompt)
        scores = verdicts.scores()
        for metric, values in scores.items():
            by_metric[metric].append(values)
        unreadable += sum(not grading.normalise(answer or "") for answer in verdicts.answers)
        per_problem.append(_record(problem, verdicts, sum(map(prompt.follows_format, texts)), scores["maj"]))
    means, intervals = _over_problems(sizes_up_to(k), by_metric)
    shares = {
        "format": _percent(sum(problem.formatted for problem in per_problem) / len(keys)),
        "finished": _percent(sum(row["finished"] for row in completions.values()) / len(keys)),
        "unreadable": _percent(unreadable / len(keys)),
        "tokens": sum(row["tokens"] for row in completions.values()) / len(keys),
    }
    return Entry(
        label=path.parent.name,
        benchmark=path.stem,
        problems=len(problems.rows),
        dropped=dict(problems.dropped),
        k=k,
        scores=means | shares,
        intervals=intervals,
        settings=head.settings,
        origin=head.origin,
        graded_by={
            "grader": problems.graded_by,
            "git_revision": git_revision(),
            "math-verify": importlib.metadata.version("math-verify"),
            "timeouts": grading.timeouts() - timeouts_before,
        },
        per_problem=per_problem,
    )


def _judge(problem: Problem, texts: Sequence[str], problems: Problems, prompt: PromptFormat) -> _Verdicts:
    """The verdicts of the grader that the problems name; by default ours."""
    tags = prompt.tags[2:]
    if not problems.graded_by:
        verdicts = [grading.grade_text(text, problem.gold, *tags) for text in texts]
        return _Verdicts(*map(list, zip(*verdicts, strict=True)))
    answers = [grading.extract_answer(text, None, *tags) for text in texts]
    if problems.grader:
        return _Verdicts(answers, problems.grader(problem, prompt.to_messages(problem.question), texts))
    return _Verdicts(answers, [grading.math_verify_accepts(answer, problem.gold) for answer in answers])


def _record(problem: Problem, verdicts: _Verdicts, formatted: int, majority: Sequence[float]) -> ProblemScores:
    return ProblemScores(
        id=problem.id,
        gold=problem.gold,
        n=len(verdicts.correct),
        c=sum(verdicts.correct),  # strict
        formatted=formatted,
        correct=_marks(verdicts.correct),
        correct_lenient=_marks(verdicts.lenient) or None,
        majority=_marks(map(bool, majority)),
    )


def write_results(directory: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry next to its completions, then all of the directory to ``results.json``, by a lock; its path."""
    results = directory / "results.json"
    if results.exists():
        content = results.read_bytes().lstrip(b"{ \r\n")
        if not content.startswith(b'"results"'):
            raise UsageError(f"{results} is not of an evaluation: move it, then run the command again.")
    with FileLock(directory / "results.lock"):
        for entry in entries:
            path = scores_path(directory / entry.label / f"{entry.benchmark}.jsonl")
            write_atomically(path, json.dumps(entry.write(), indent=1))
        paths = [scores_path(path) for path in find_completion_files(directory)]
        stored = []
        for path in filter(Path.is_file, paths):
            stored += [entry.write() for entry in read_entries(path)]
        write_atomically(results, json.dumps({"results": stored}, indent=1))
    return results


def _scores_of(answers: Sequence[str | None], correct: Sequence[bool]) -> dict[str, list[float]]:
    """The scores of one problem: metric -> its value at each k'."""
    k = len(correct)
    sizes = sizes_up_to(k)
    return {
        "pass": [pass_at_k(k, sum(correct), size) for size in sizes],
        "pass_first_k": [first_k_pass(correct, size) for size in sizes],
        "maj": [majority_at_k(answers, correct, size) for size in sizes],
    }


def _over_problems(sizes: Sequence[int], by_metric: Mapping[str, Sequence[Sequence[float]]]) -> tuple[dict, dict]:
    """Mean and interval of each metric in percent, by k'; ``by_metric`` has the scores of each problem."""
    means: dict[str, dict[str, float]] = {}
    intervals: dict[str, dict[str, list[float]]] = {}
    for metric, rows in by_metric.items():
        means[metric] = {}
        for size, values in zip(map(str, sizes), zip(*rows, strict=True), strict=True):
            means[metric][size] = _percent(sum(values) / len(values))
            if metric != "pass_first_k":
                ends = bootstrap_interval(values)
                intervals.setdefault(metric, {})[size] = list(map(_percent, ends))
    return means, intervals


def _marks(values: Iterable[bool]) -> str:
    return "".join("01"[value] for value in values)


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to hide floating-point noise."""
    return round(100 * fraction, 6)
