"""Scores of a completion file: grades the completions, computes the metrics, writes results.json."""

import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from filelock import FileLock
from tqdm import tqdm

from gtpo import grading
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k, sizes_up_to
from gtpo.evaluation.records import Entry, Origin, Problem, Problems, ProblemScores, read_entries
from gtpo.evaluation.storage import find_completion_files, key_of, keys_of, read_completions, scores_path
from gtpo.files import read_regular, write_atomically
from gtpo.prompts import PromptFormat
from gtpo.runs.directory import RunDirectory
from gtpo.runs.provenance import code_of, git_revision, hash_of_code, prompt_keys

Graded = tuple[Sequence[str | None], Sequence[bool]]  # answers of a problem's completions; whether they are correct
Verdicts = Mapping[str, Graded]  # by the end of the names of metrics: "" for the grader, _lenient
Scores = dict[str, list[float]]  # of one problem: metric -> its value at each k'


def grade(path: Path, problems: Problems) -> Entry:
    """The entry of a completion file in ``results.json``; lenient scores are those of our grader alone."""
    head, rows = read_completions(path)
    prompt = head.prompt.format
    k = head.settings["k"]
    keys = keys_of(problems.rows, k)
    completions = {key_of(row): row for row in rows if key_of(row) in keys}
    if len(completions) != len(keys):
        raise UsageError(f"{path} has {len(completions)} of {len(keys)} completions: resume it without --regrade.")
    timeouts_before = grading.timeouts()
    per_problem, scores, unreadable = [], [], 0
    for problem in tqdm(problems.rows, desc="  grading", unit=" problems", leave=False):
        texts = [completions[problem.id, sample]["completion"] for sample in range(k)]
        verdicts = _judge(problem, texts, problems, prompt)
        scores.append(_scores_of(verdicts))
        answers, _ = verdicts[""]
        unreadable += sum(not grading.normalise(answer or "") for answer in answers)
        formatted = sum(map(prompt.follows_format, texts))
        per_problem.append(_record(problem, verdicts, formatted, scores[-1]["maj"]))
    means, intervals = _over_problems(sizes_up_to(k), scores)
    shares = {
        "format": _percent(fmean(problem.formatted for problem in per_problem) / k),
        "finished": _percent(fmean(row["finished"] for row in completions.values())),
        "unreadable": _percent(unreadable / len(keys)),
        "tokens": fmean(row["tokens"] for row in completions.values()),
    }
    return Entry(
        label=path.parent.name,
        benchmark=path.stem,
        problems=len(problems.rows),
        dropped=problems.dropped,
        trained_on=_trained_on(head.origin, problems.rows),
        k=k,
        scores=means | shares,
        intervals=intervals,
        settings=head.settings,
        origin=head.origin,
        graded_by={
            "grader": problems.graded_by,
            "code": code_of(problems.graded_by or ""),
            "grading": hash_of_code(Path(grading.__file__).parent),
            "git_revision": git_revision(),
            "math-verify": importlib.metadata.version("math-verify"),
            "timeouts": grading.timeouts() - timeouts_before,
        },
        per_problem=per_problem,
    )


def _trained_on(origin: Origin, problems: Sequence[Problem]) -> int | None:
    """How many of the problems the run of an adapter or model was trained on; None where it is not known."""
    weights = Path(origin.adapter or origin.model)
    trained = RunDirectory(weights.resolve().parent).read_prompts()
    keys = prompt_keys(problem.question for problem in problems)
    return sum(key in trained for key in keys) if trained else None


def _judge(problem: Problem, texts: Sequence[str], problems: Problems, prompt: PromptFormat) -> Verdicts:
    """The verdicts of the grader that the problems name; by default it is ours, which has lenient ones too."""
    tags = prompt.answer_tags
    if not problems.graded_by:
        verdicts = [grading.grade_text(text, problem.gold, *tags) for text in texts]
        of_block, strict, of_text, lenient = zip(*verdicts, strict=True)
        return {"": (of_block, strict), "_lenient": (of_text, lenient)}
    answers = [grading.extract_answer(text, None, *tags) for text in texts]
    if problems.grader:
        correct = problems.grader(problem, prompt.to_messages(problem.question), texts)
    else:
        correct = [grading.math_verify_accepts(answer, problem.gold) for answer in answers]
    return {"": (answers, correct)}


def _record(problem: Problem, verdicts: Verdicts, formatted: int, majority: Sequence[float]) -> ProblemScores:
    _, correct = verdicts[""]
    _, lenient = verdicts.get("_lenient", ((), ()))
    return ProblemScores(
        id=problem.id,
        gold=problem.gold,
        n=len(correct),
        c=sum(correct),  # strict
        formatted=formatted,
        correct=_marks(correct),
        correct_lenient=_marks(lenient) or None,
        majority=_marks(map(bool, majority)),
    )


def write_results(directory: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry next to its completions, then all of the directory to ``results.json``, by a lock; its path."""
    results = directory / "results.json"
    if results.exists() and not read_regular(results).lstrip(b"{ \r\n").startswith(b'"results"'):
        raise UsageError(f"{results} is not of an evaluation: move it, then run the command again.")
    with FileLock(directory / "results.lock"):
        for entry in entries:
            path = scores_path(directory / entry.label / f"{entry.benchmark}.jsonl")
            write_atomically(path, json.dumps(entry.write(), indent=1))
        stored = []
        for path in filter(Path.is_file, map(scores_path, find_completion_files(directory))):
            stored += [entry.write() for entry in read_entries(path)]
        write_atomically(results, json.dumps({"results": stored}, indent=1))
    return results


def _scores_of(verdicts: Verdicts) -> Scores:
    scores = defaultdict(list)
    for kind, (answers, correct) in verdicts.items():
        n = len(correct)
        for k in sizes_up_to(n):
            scores[f"pass{kind}"].append(pass_at_k(n, sum(correct), k))
            if not kind:
                scores["pass_first_k"].append(first_k_pass(correct, k))
            scores[f"maj{kind}"].append(majority_at_k(answers, correct, k))
    return scores


def _over_problems(sizes: Sequence[int], scores: Sequence[Scores]) -> tuple[dict, dict]:
    """Mean and interval of each metric in percent, by k', from the scores of each problem."""
    means: dict = {}
    intervals: dict = {}
    for metric in scores[0]:
        rows = [of_problem[metric] for of_problem in scores]
        for k, values in zip(map(str, sizes), zip(*rows, strict=True), strict=True):
            means.setdefault(metric, {})[k] = _percent(fmean(values))
            if metric != "pass_first_k":
                intervals.setdefault(metric, {})[k] = list(map(_percent, bootstrap_interval(values)))
    return means, intervals


def _marks(values: Iterable[bool]) -> str:
    return "".join("01"[value] for value in values)


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to hide floating-point noise."""
    return round(100 * fraction, 6)
