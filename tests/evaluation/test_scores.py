"""Scores of a completion file whose answers are known, and results.json."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from helpers.files import read_json
from helpers.refusals import refused
from helpers.results import grade_file
from helpers.runs import fake_run
from pytest import LogCaptureFixture, MonkeyPatch, approx, mark

from gtpo.data.load import load_benchmark
from gtpo.evaluation import scores
from gtpo.evaluation.paired import find_sides
from gtpo.evaluation.records import Entry, Problems
from gtpo.evaluation.scores import write_results
from gtpo.evaluation.table import format_table
from gtpo.grading import compare
from gtpo.prompts import to_messages
from gtpo.runs.provenance import prompt_keys

Store = Callable[..., Path]
Texts = dict[str, list[str]]

ROWS = load_benchmark("arithmetic")
PROBLEMS = Problems(ROWS[:3])


def test_scores_by_hand(store: Store, texts_by_hand: Texts) -> None:
    entry = grade_file(store(texts_by_hand | {"arithmetic/3": ["of a problem that is left out"] * 4}), PROBLEMS)
    # pass@1 = (3/4 + 1/4 + 0) / 3; pass@2: 1 - C(1,2)/C(4,2) = 1, 1 - C(3,2)/C(4,2) = 1/2, 0
    assert entry.strict.means["pass"] == approx({1: 100 / 3, 2: 50.0, 4: 200 / 3}, abs=1e-5)
    assert entry.strict.means["pass_first_k"] == approx({1: 0.0, 2: 100 / 3, 4: 200 / 3}, abs=1e-5)
    # maj@2 of problem 0 is a tie, and the wrong answer occurs first.
    assert entry.strict.means["maj"] == approx({1: 0.0, 2: 0.0, 4: 100 / 3}, abs=1e-5)
    expected = {"format": 75, "finished": 100 * 11 / 12, "tokens": 11.5, "unreadable": 100 * 2 / 12}
    assert entry.shares == approx(expected, abs=1e-5)
    names = ("id", "n", "c", "formatted", "correct", "majority")  # the last of maj@1, 2 and 4
    assert [tuple(getattr(problem, name) for name in names) for problem in entry.per_problem] == [
        ("arithmetic/0", 4, 3, 3, "0111", "001"),
        ("arithmetic/1", 4, 1, 4, "0001", "000"),
        ("arithmetic/2", 4, 0, 2, "0000", "000"),
    ]
    # Of 27 equally likely resamples of (0.75, 0.25, 0) the mean is 0 in one (3.7 %) and 0.75 in one.
    assert entry.strict.intervals["pass"][1] == [0.0, 75.0]
    assert entry.lenient is not None
    assert entry.strict.intervals.keys() == entry.lenient.intervals.keys() == {"pass", "maj"}
    stored = entry.write()
    names = ["pass", "pass_first_k", "maj", "pass_lenient", "maj_lenient"]
    assert [*stored["scores"]] == [*names, "format", "finished", "unreadable", "tokens"]
    assert [*stored["intervals"]] == [name for name in names if name != "pass_first_k"]
    assert stored["scores"]["maj"] == approx({"1": 0.0, "2": 0.0, "4": 100 / 3}, abs=1e-5)


@mark.parametrize(
    ("rows", "weights", "expected"), [((0, 2), "adapter", 2), ((7, 8), "model", 0), ((), "adapter", None)]
)
def test_problems_that_were_trained_on_are_counted_and_said(
    rows: Sequence[int], weights: str, expected: int | None, store: Store, texts_by_hand: Texts, tmp_path: Path
) -> None:
    run = fake_run(tmp_path / "trained")
    if rows:
        run.prompts.write_bytes(b"".join(prompt_keys(to_messages(ROWS[row].question) for row in rows)))
    entry = grade_file(store(texts_by_hand, about={weights: str(run.path / "best")}), PROBLEMS)
    assert entry.trained_on == expected and Entry.read(entry.write()) == entry
    said = "run was trained on 2 of the 3 problems"
    assert (said in format_table([entry]).splitlines()) == (expected == 2)


def test_a_comparison_says_what_was_trained_on(store: Store, texts_by_hand: Texts, caplog: LogCaptureFixture) -> None:
    entry = grade_file(store(texts_by_hand), PROBLEMS)
    directory = store(texts_by_hand, "other").parents[1]
    write_results(directory, [replace(entry, trained_on=3), replace(entry, label="other", trained_on=0)])
    find_sides([str(directory)], "")
    assert caplog.messages == ["run was trained on 3 of the 3 problems of arithmetic"]


def test_lenient_scores_by_hand(store: Store) -> None:
    """u: right without any tag, b: right in a box, w: wrong in the format, t: a right sentence in the block.

    problem | samples | strict | lenient | majority of 4, strict and lenient
    0       | u b w w | none   | u b     | wrong; right (a tie, the right answer occurs first)
    1       | t w t u | none   | t t u   | wrong; right (3 votes)
    """
    texts = {}
    for problem, samples in zip(ROWS[:2], ("ubww", "twtu"), strict=True):
        written = {"u": f"We get 7 + 1 and so {problem.gold}.", "b": rf"Thus \boxed{{{problem.gold}}}, as 5 shows."}
        written |= {"w": "<answer>-1</answer>", "t": f"<answer>She has {problem.gold} of them.</answer>"}
        texts[problem.id] = [written[sample] for sample in samples]
    entry = grade_file(store(texts), Problems(ROWS[:2]))
    marks = [(p.c, p.correct, p.correct_lenient, p.majority) for p in entry.per_problem]
    assert marks == [(0, "0000", "1100", "000"), (0, "0000", "1011", "000")]
    assert entry.lenient is not None
    # pass@1: (2/4 + 3/4) / 2; pass@2: 1 - C(2,2)/C(4,2) = 5/6 and 1
    assert entry.lenient.means["pass"] == approx({1: 62.5, 2: 100 * 11 / 12, 4: 100}, abs=1e-5)
    assert entry.lenient.means["maj"] == {1: 100, 2: 100, 4: 100}
    assert entry.shares["unreadable"] == 37.5  # u and b have no block


def graded(store: Store, *texts: str) -> Entry:
    """The entry of one problem."""
    return grade_file(store({"arithmetic/0": list(texts)}), Problems(ROWS[:1]))


def test_the_lenient_majority_votes_with_lenient_answers(store: Store) -> None:
    """Equal marks, other answers: two sentences that end in the same wrong number are one class, as blocks two."""
    right = f"<answer>{ROWS[0].gold}</answer>"
    entry = graded(store, "<answer>We have some, -1</answer>", right, "<answer>There are now -1</answer>", right)
    assert entry.per_problem[0].correct == entry.per_problem[0].correct_lenient == "0101"
    assert entry.lenient is not None
    assert (entry.strict.means["maj"][4], entry.lenient.means["maj"][4]) == (100.0, 0.0)  # a tie: wrong occurs first


def test_an_empty_answer_block_is_unreadable(store: Store) -> None:
    texts = ["<answer></answer>", "<answer>$$</answer>", "<answer>7</answer>", "none"]
    assert graded(store, *texts).shares["unreadable"] == 75.0


def test_a_late_completion_is_wrong_and_counted(store: Store, monkeypatch: MonkeyPatch) -> None:
    late = "".join(f"<answer>{ROWS[0].gold}.{zeros}</answer>" for zeros in ("0", "00", "000"))
    path = store({"arithmetic/0": [late, f"<answer>{ROWS[0].gold}</answer>"]})
    problems = Problems(ROWS[:1])
    assert grade_file(path, problems).per_problem[0].correct == "11"
    decide = compare.decide
    monkeypatch.setattr(compare, "decide", lambda a, b: (decide(a, b)[0], 2.0))  # 2 s between blocks, 2 s for the gold
    for entry in (grade_file(path, problems), grade_file(path, problems)):
        assert (entry.per_problem[0].correct, entry.graded_by["timeouts"]) == ("01", 1)


def test_results_keep_entries_of_simultaneous_evaluations(
    store: Store, texts_by_hand: Texts, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The second ends after the first has read the stored scores, and before the first writes results.json."""
    first, second = (grade_file(store(texts_by_hand, name), PROBLEMS) for name in ("first", "second"))
    store(texts_by_hand, "not-graded")
    other = threading.Thread(target=write_results, args=(tmp_path, [second]))
    write = scores.write_atomically

    def write_slowly(path: Path, text: str) -> None:
        if path.name == "results.json" and not other.ident:
            other.start()
            other.join(timeout=1)  # without a lock it writes its results here
        write(path, text)

    monkeypatch.setattr(scores, "write_atomically", write_slowly)
    results = write_results(tmp_path, [first])
    other.join()
    assert read_json(results) == {"results": [first.write(), second.write()]}
    assert read_json(tmp_path / "second" / "arithmetic.json") == second.write()
    again = {"results": [second.write(), first.write()]}
    results.write_text(f"\n{json.dumps(again)}")  # in another order, and with a line before it
    assert write_results(tmp_path, [first]) == tmp_path / "results.json"
    assert read_json(results) == {"results": [first.write(), second.write()]}
    results.write_text('{"mine": 1}')
    with refused(r"results\.json"):
        write_results(tmp_path, [first])
    assert results.read_text() == '{"mine": 1}'


def test_completions_are_graded_by_their_own_tags(store: Store, texts_by_hand: Texts) -> None:
    """With other tags than the paper's, the same texts get the same scores."""

    def retagged(text: str) -> str:
        for old, new in (("reasoning", "think"), ("answer", "solution")):
            text = text.replace(f"<{old}>", f"[{new}]").replace(f"</{old}>", f"[/{new}]")
        return text

    texts = {problem: list(map(retagged, samples)) for problem, samples in texts_by_hand.items()}
    path = store(texts, "retagged", settings={"tags": "[think] [/think] [solution] [/solution]"})
    assert grade_file(path, PROBLEMS).strict == grade_file(store(texts_by_hand), PROBLEMS).strict
    by_math_verify = grade_file(path, replace(PROBLEMS, graded_by="math_verify"))
    assert [problem.c for problem in by_math_verify.per_problem] == [3, 1, 0]
    assert grade_file(store(texts, "of-the-paper"), PROBLEMS).shares["format"] == 0
