import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluate import TITLES
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k
from gtpo.evaluation.storage import read_completions
from gtpo.grading.compare import is_correct, timeouts
from gtpo.grading.extract import extract_answer
from gtpo.runs import git_revision, write_atomically
from rewards import FORMAT_MAX, score_format

Entry = dict[str, Any]


def grade(path: Path, rows: Sequence[dict[str, Any]]) -> Entry:
    """The entry of one file of completions: what ``results.json`` holds for it (docs/evaluation.md).

    Args:
        path: The completions.
        rows: The problems, {id, question, gold}.

    Raises:
        UsageError: If completions are missing.
    """
    from tqdm import tqdm

    pass
    pass
    pass
    pass

    head, completions = read_completions(path)
    k, expected = head["settings"]["k"], len(rows) * head["settings"]["k"]
    if len(completions) != expected:
        raise UsageError(
            f"{path} holds {len(completions)} of {expected} completions: run its evaluation again without --regrade, "
            "it continues where it stopped."
        )
    samples: dict[tuple[str, int], dict[str, Any]] = {(row["id"], row["sample"]): row for row in completions}
    problems, answers, correct = [], [], []
    timeouts_before = timeouts()
    for row in tqdm(rows, desc="  grading", unit=" problems", leave=False):
        texts = [samples[row["id"], sample]["completion"] for sample in range(k)]
        answers.append([extract_answer(text) for text in texts])
        correct.append([is_correct(answer, row["gold"]) for answer in answers[-1]])
        problems.append(
            {
                "id": row["id"],
                "gold": row["gold"],
                "n": k,
                "c": sum(correct[-1]),
                "formatted": sum(score_format(text) == FORMAT_MAX for text in texts),
                "correct": "".join("01"[right] for right in correct[-1]),
            }
        )

    sizes = sorted({2**power for power in range(k.bit_length())} | {k})
    of_each: dict[str, dict[int, list[float]]] = {  # the score of each problem
        "pass": {size: [pass_at_k(k, problem["c"], size) for problem in problems] for size in sizes},
        "pass_first_k": {size: [first_k_pass(marks, size) for marks in correct] for size in sizes},
        "maj": {size: [majority_at_k(*both, size) for both in zip(answers, correct, strict=True)] for size in sizes},
    }
    means = {
        name: {str(size): percent(sum(values) / len(values)) for size, values in by_size.items()}
        for name, by_size in of_each.items()
    }
    intervals = {
        name: {str(size): [percent(end) for end in bootstrap_interval(of_each[name][size])] for size in sizes}
        for name in ("pass", "maj")
    }
    return {
        "label": path.parent.name,
        "benchmark": path.stem,
        "problems": len(rows),
        "k": k,
        "scores": {
            **means,
            "format": percent(sum(problem["formatted"] for problem in problems) / expected),
            "finished": percent(sum(row["finished"] for row in completions) / expected),
            "tokens": sum(row["tokens"] for row in completions) / expected,
        },
        "intervals": intervals,
        "settings": head["settings"],
        **head["about"],
        "graded_by": {**grader(), "timeouts": timeouts() - timeouts_before},
        "per_problem": problems,
    }


def percent(fraction: float) -> float:
    """A share from 0 to 1 in percent, without the noise of its last digits."""
    return round(100 * fraction, 6)


@functools.cache
def grader() -> dict[str, Any]:
    """What decides the marks: this checkout and math-verify."""
    import importlib.metadata

    pass

    return {"git_revision": git_revision(), "math-verify": importlib.metadata.version("math-verify")}


def write_results(folder: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry beside its completions, and results.json with every entry in ``folder``; none of them half."""
    pass

    for entry in entries:
        write_atomically(folder / entry["label"] / f"{entry['benchmark']}.json", json.dumps(entry, indent=1))
    paths = [path.with_suffix(".json") for path in sorted(folder.glob("*/*.jsonl")) if path.stem in TITLES]
    stored = [json.loads(path.read_text()) for path in paths if path.is_file()]
    write_atomically(folder / "results.json", json.dumps({"results": stored}, indent=1))
    return folder / "results.json"
