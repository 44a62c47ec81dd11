"""Scores of a completion file: grades the completions, computes the metrics, writes results.json."""

import importlib.metadata
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from gtpo.arguments import PromptArguments
from gtpo.environment import git_revision
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k
from gtpo.evaluation.storage import Row, check_keys, find_completion_files, read_completions, scores_path
from gtpo.files import write_atomically
from gtpo.grading import TimeBudget, extract_answer, is_correct, timeouts

Entry = dict[str, Any]  # one model on one benchmark, as in results.json (docs/evaluation.md)


def grade(path: Path, problems: Sequence[Row]) -> Entry:
    """Grade a completion file.

    Args:
        path: The completion file.
        problems: The problems, {id, question, gold}.

    Returns:
        Its entry of ``results.json``.

    Raises:
        UsageError: If completions are missing, or belong to other problems.
    """
    head, completions = read_completions(path)
    k = head["settings"].get("k")
    if type(k) is not int or k < 1:
        raise UsageError(f"{path}, line 1 has k={k!r} in its settings, expected an integer >= 1: restore the file.")
    prompt = PromptArguments(tags=head["settings"].get("tags", PromptArguments.tags)).format
    expected = len(problems) * k
    check_keys(path, ((row["id"], row["sample"]) for row in completions), problems, k)
    if len(completions) != expected:
        raise UsageError(
            f"{path} has {len(completions)} of {expected} completions: run the same evaluation without --regrade to "
            "resume it."
        )
    samples = {(row["id"], row["sample"]): row["completion"] for row in completions}
    timeouts_before = timeouts()
    per_problem, answers, correct = [], [], []
    for problem in tqdm(problems, desc="  grading", unit=" problems", leave=False):
        texts = [samples[problem["id"], sample] for sample in range(k)]
        budgets = [TimeBudget() for _ in texts]
        answers.append(
            [extract_answer(text, budget, *prompt.tags[2:]) for text, budget in zip(texts, budgets, strict=True)]
        )
        pairs = zip(answers[-1], budgets, strict=True)
        correct.append([is_correct(answer, problem["gold"], budget) for answer, budget in pairs])
        per_problem.append(
            {
                "id": problem["id"],
                "gold": problem["gold"],
                "n": k,
                "c": sum(correct[-1]),
                "formatted": sum(map(prompt.follows_format, texts)),
                "correct": "".join("01"[right] for right in correct[-1]),
            }
        )
    scores, intervals = _scores(k, answers, correct)
    return {
        "label": path.parent.name,
        "benchmark": path.stem,
        "problems": len(problems),
        "k": k,
        "scores": {
            **scores,
            "format": _percent(sum(problem["formatted"] for problem in per_problem) / expected),
            "finished": _percent(sum(row["finished"] for row in completions) / expected),
            "tokens": sum(row["tokens"] for row in completions) / expected,
        },
        "intervals": intervals,
        "settings": head["settings"],
        **head["about"],
        "graded_by": {**_grader_versions(), "timeouts": timeouts() - timeouts_before},
        "per_problem": per_problem,
    }


def write_results(directory: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry beside its completions, and ``results.json`` with all entries in the directory.

    Evaluations that end at the same time write one after the other, each with what the others have written.

    Returns:
        The path of ``results.json``.

    Raises:
        UsageError: If the stored scores of other completions are damaged.
    """
    results = directory / "results.json"
    with FileLock(directory / "results.lock"):
        for entry in entries:
            completions = directory / entry["label"] / f"{entry['benchmark']}.jsonl"
            write_atomically(scores_path(completions), json.dumps(entry, indent=1))
        paths = [scores_path(path) for path in find_completion_files(directory)]
        stored = [_read_entry(path) for path in paths if path.is_file()]
        write_atomically(results, json.dumps({"results": stored}, indent=1))
    return results


def _read_entry(path: Path) -> Entry:
    try:
        entry: Entry = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}): delete it, `evaluate.py --regrade` writes it again.") from error
    return entry


def _scores(
    k: int, answers: Sequence[Sequence[str | None]], correct: Sequence[Sequence[bool]]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[float]]]]:
    """Mean and interval of each metric in percent, by k' = 1, 2, 4, ..., k; answers and correct are per problem."""
    sizes = sorted({2**power for power in range(k.bit_length())} | {k})
    per_problem: dict[str, dict[int, list[float]]] = {
        "pass": {size: [pass_at_k(k, sum(marks), size) for marks in correct] for size in sizes},
        "pass_first_k": {size: [first_k_pass(marks, size) for marks in correct] for size in sizes},
        "maj": {size: [majority_at_k(*both, size) for both in zip(answers, correct, strict=True)] for size in sizes},
    }
    means = {
        metric: {str(size): _percent(sum(values) / len(values)) for size, values in by_size.items()}
        for metric, by_size in per_problem.items()
    }
    intervals = {
        metric: {str(size): list(map(_percent, bootstrap_interval(per_problem[metric][size]))) for size in sizes}
        for metric in ("pass", "maj")
    }
    return means, intervals


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to hide floating-point noise."""
    return round(100 * fraction, 6)


@cache
def _grader_versions() -> dict[str, Any]:
    return {"git_revision": git_revision(), "math-verify": importlib.metadata.version("math-verify")}
