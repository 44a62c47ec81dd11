"""``--grader math_verify``: the verdicts of math-verify alone, from the flag to the scores and the table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

import evaluate
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.jobs import load_problems
from gtpo.evaluation.records import read_entries
from gtpo.evaluation.table import format_table
from gtpo.grading import algebra, extract_answer, grade_text, is_correct, math_verify_accepts, timeouts
from gtpo.grading.worker import shared_worker

PAIRS = [  # gold answer, answer, ours, math-verify's
    ("18", "18.0", True, True),
    ("18", "17", False, False),
    ("18", "18 dollars", True, False),
    ("18", "2x = 18", False, True),  # an equation is its right side
    (r"\frac{1}{2}", "0.5", True, True),
    (r"\frac{1}{3}", "0.333333", False, True),  # six digits are enough
    (r"3\sqrt{13}", r"\sqrt{117}", True, True),
    ("13", r"13 \text{ or } 13", False, True),
    ("(1,2)", "(2, 1)", False, False),
    (r"137 \frac{1}{2}", "137 1/2", True, False),
    ("204_5", "204", False, True),
    (r"(2,\infty)", "x>2", True, False),
    ("x>2", r"(2,\infty)", True, True),  # not symmetric
    ("18", "", False, False),
]


@pytest.mark.parametrize(("gold", "answer", "ours", "theirs"), PAIRS)
def test_verdicts_of_both_graders(gold: str, answer: str, ours: bool, theirs: bool) -> None:
    assert (is_correct(answer, gold), math_verify_accepts(answer, gold)) == (ours, theirs)
    assert not math_verify_accepts(None, gold)


def test_it_agrees_on_the_answers_that_lm_evaluation_harness_has_graded() -> None:
    """The constructed completions of benchmarks/harness/README.md: 413 of 416, and these are the others."""
    differ = []
    rows = [json.loads(line) for line in (ROOT / "tests/stored/harness/completions.jsonl").read_text().splitlines()]
    constructed = [row for row in rows if row["kind"] != "sampled"]
    for row in constructed:
        accepted = math_verify_accepts(extract_answer(row["completion"]), row["gold"])
        if accepted != grade_text(row["completion"], row["gold"]).correct:
            differ.append((row["kind"], accepted))
    assert len(constructed) == 416
    assert sorted(differ) == [
        (r"\left and \right", False),
        ("a/b for a fraction", False),
        ("two answers", True),
    ]


def test_an_answer_over_the_limit_is_wrong_and_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "TIME_LIMIT", 0.3)
    before = timeouts()
    for _ in range(2):
        assert not math_verify_accepts("9^{9^{9^{9}}}!", "7")
    assert timeouts() == before + 2
    monkeypatch.undo()
    assert math_verify_accepts("x+x^{12}", "x^{12}+x")  # a new process answers


def test_no_answer_is_evaluated_as_python(tmp_path: Path) -> None:
    for text in (f"__import__('os').mkdir('{tmp_path}/made')", "9**9**9", "(1).__class__"):
        assert not math_verify_accepts(text, "7")
    assert not list(tmp_path.iterdir()) and shared_worker.process is not None


@pytest.mark.parametrize("source", ["arithmetic", "mine.jsonl"])
def test_the_problems_are_those_of_our_grader(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "{1"}\n')
    name = source.partition(".")[0]
    ours, theirs = (load_problems(name, source, EvaluationArguments([source], grader=g)) for g in (None, "math_verify"))
    assert (ours.rows, ours.dropped) == (theirs.rows, theirs.dropped)
    assert source == "arithmetic" or (len(ours.rows), ours.dropped) == (1, {"without a readable gold answer": 1})
    assert (ours.graded_by, theirs.graded_by, theirs.grader) == (None, "math_verify", None)


def test_scores_table_and_comparison_name_the_grader(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"prompt": "How much?", "answer": "18"}\n')

    def run(*argv: object) -> Any:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, argv)])
        evaluate.main()
        return json.loads(Path("out/results.json").read_text())["results"][0]

    argv = ["--benchmarks", "mine.jsonl", "--model", tiny, "--k", 4, "--max_new_tokens", 3, "--output_dir", "out"]
    entry = run(*argv, "--grader", "math_verify")
    assert entry["graded_by"]["grader"] == entry["data"]["grader"] == "math_verify"
    path = next(Path("out").glob("*/mine.jsonl"))
    head, *rows = map(json.loads, path.read_text().splitlines())
    for row, answer in zip(rows, ("18", "18 dollars", "2x = 18", "17"), strict=True):
        row["completion"] = f"<reasoning>\n.\n</reasoning>\n<answer>\n{answer}\n</answer>"
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))
    capsys.readouterr()
    entry = run("--regrade", "--output_dir", "out", "--grader", "math_verify")
    assert entry["per_problem"][0]["correct"] == "1010" and "pass_lenient" not in entry["scores"]
    assert "mine: 1 problems, k = 4, graded by math_verify\n" in capsys.readouterr().out
    (theirs,) = read_entries(Path("out/results.json"))
    entry = run("--regrade", "--output_dir", "out")  # a plain switch: without it ours decides
    assert entry["per_problem"][0]["correct"] == "1100" and entry["graded_by"]["grader"] is None
    assert "graded by" not in capsys.readouterr().out
    (ours,) = read_entries(Path("out/results.json"))
    assert "graded by math_verify" in format_table([theirs])
    for name in ("ours", "theirs"):
        folder = Path("both") / name
        folder.mkdir(parents=True)
        (folder / "mine.jsonl").write_text(path.read_text())
        entry = {"ours": ours, "theirs": theirs}[name]
        (folder / "mine.json").write_text(json.dumps(entry.write() | {"label": name}))
    caplog.clear()
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--compare", "both/ours", "both/theirs"])
    evaluate.main()
    assert "ours and theirs were graded by different graders: math_verify, ours" in caplog.messages
