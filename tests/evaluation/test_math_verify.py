"""``--grader math_verify``: the verdicts of math-verify alone, from the flag to the scores and the table."""

from collections.abc import Callable
from pathlib import Path

from helpers.files import read_lines, tables_of
from helpers.scripts import ROOT, Command
from pytest import CaptureFixture, MonkeyPatch, mark

from gtpo.data.load import load_benchmark
from gtpo.evaluation.records import read_entries
from gtpo.grading import algebra, extract_answer, grade_text, is_correct, math_verify_accepts, timeouts

TABLES = tables_of(__file__)

PAIRS = TABLES["pairs"]


@mark.parametrize(("gold", "answer", "ours", "theirs"), PAIRS)
def test_verdicts_of_both_graders(gold: str, answer: str, ours: bool, theirs: bool) -> None:
    assert (is_correct(answer, gold), math_verify_accepts(answer, gold)) == (ours, theirs)
    assert not math_verify_accepts(None, gold)


def test_it_agrees_on_the_answers_of_lm_evaluation_harness() -> None:
    """The constructed completions of benchmarks/harness/README.md: 413 of 416, and these are the others."""
    differ = []
    rows = read_lines(ROOT / "tests/stored/harness/completions.jsonl")
    constructed = [row for row in rows if row["kind"] != "sampled"]
    for row in constructed:
        accepted = math_verify_accepts(extract_answer(row["completion"]), row["gold"])
        if accepted != grade_text(row["completion"], row["gold"]).correct:
            differ.append((row["kind"], accepted))
    assert len(constructed) == 416
    assert sorted(differ) == [(r"\left and \right", False), ("a/b for a fraction", False), ("two answers", True)]


def test_answers_over_the_limit_are_counted_and_none_runs(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(algebra, "TIME_LIMIT", 0.3)
    before = timeouts()
    for _ in range(2):
        assert not math_verify_accepts("9^{9^{9^{9}}}!", "7")
    assert timeouts() == before + 2
    monkeypatch.setattr(algebra, "TIME_LIMIT", 1.0)
    for text in (f"__import__('os').mkdir('{tmp_path}/made')", "9**9**9", "(1).__class__"):
        assert not math_verify_accepts(text, "7")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert math_verify_accepts("x+x^{12}", "x^{12}+x")  # a new process answers


def test_scores_and_table_name_the_grader(
    store: Callable[..., Path], tmp_path: Path, run_evaluate: Command, capsys: CaptureFixture[str]
) -> None:
    gold = load_benchmark("arithmetic")[0].gold
    answers = (gold, f"{gold} dollars", f"2x = {gold}", "-1")
    store({"arithmetic/0": [f"<answer>{answer}</answer>" for answer in answers]})
    for more, correct in ((["--grader", "math_verify"], "1010"), ([], "1100")):
        run_evaluate("--regrade", "--output_dir", tmp_path, *more)
        (entry,) = read_entries(tmp_path / "results.json")
        assert entry.per_problem[0].correct == correct and (entry.lenient is None) == bool(more)
        assert entry.graded_by["grader"] == (more[1] if more else None)
        assert ("Graded by math_verify\n" in capsys.readouterr().out) == bool(more)
