"""Gold answers as other projects store them: solutions, lists as text, objects, missing values. Right, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of, write_lines
from helpers.refusals import refused
from pandas import DataFrame
from pytest import LogCaptureFixture

from gtpo.arguments import DataArguments
from gtpo.data.load import is_sentence, load_own, load_user_benchmark
from gtpo.data.tables import read_file
from gtpo.data.values import to_answer
from gtpo.grading import is_correct, listed

TABLES = tables_of(__file__)

pytestmark = pytest.mark.usefixtures("isolated_cache")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    write_lines(path, rows)
    return str(path)


# The text of a gold column -> what a completion has to answer.
SOLUTIONS = TABLES["solutions"]


@pytest.mark.parametrize(("text", "answer"), SOLUTIONS, ids=[text[:30] for text, _ in SOLUTIONS])
def test_the_gold_answer_of_a_whole_solution(text: str, answer: str, tmp_path: Path) -> None:
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": text}]))
    [gold] = load_own(data)["answer"][:]
    assert is_correct(answer, gold) and not is_correct("77", gold)
    [problem], dropped = load_user_benchmark("own", data.dataset, data)
    assert problem.gold == gold and not dropped
    assert load_own(data, graded=False)["answer"][:] == [text]  # for your own reward


LISTS = TABLES["lists"]


@pytest.mark.parametrize(("text", "elements"), LISTS, ids=[text for text, _ in LISTS])
def test_a_list_that_is_written_as_text(text: str, elements: list[str] | None, tmp_path: Path) -> None:
    assert listed(text) == elements
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": text}]))
    [gold] = load_own(data)["answer"][:]
    if elements is None:
        assert gold == text
        return
    assert all(is_correct(element, text) and is_correct(element, gold) for element in elements)
    typed = DataArguments(write(tmp_path / "typed.jsonl", [{"prompt": "a", "answer": elements}]))
    assert load_own(typed)["answer"][:] == [gold]
    every = DataArguments(data.dataset, answer_list="all")
    assert load_own(every)["answer"][:] == [", ".join(elements)]


def test_an_element_that_is_there_twice_counts_once() -> None:
    assert to_answer([], ["5", "5"], "row 1", "any") == "5"
    assert to_answer([], ["1", "2", "1"], "row 1", "all") == "1, 2"
    assert to_answer([], ["1", "2", "1"], "row 1", "any") == '["1", "2"]'


MISSING = ["NA", "-", "--", "?", "...", "N/A", "n/a", "n.a.", "#N/A", "None", "none", "NULL", "NaN", "nan", "<NA>"]
READABLE = ["Na", "na", "no", 0, 0.0]  # sodium is no missing value, and 0 is a number


def test_rows_without_gold_are_dropped_and_named(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    golds = ["5", *MISSING, " ", "x" * 1001, "(((", *READABLE]
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": gold} for gold in golds]))
    expected = ["5", "Na", "na", "no", "0", "0"]
    assert load_own(data)["answer"][:] == expected
    problems, dropped = load_user_benchmark("own", data.dataset, data)
    assert [problem.gold for problem in problems] == expected
    assert dropped == {"with an empty answer": 1, "without a readable gold answer": 17}
    for text in (
        "18 of 24 rows",
        "1 with an empty answer (first: line 17 of",
        "17 without a readable gold answer (first: line 2 of",
    ):
        assert caplog.text.count(text) == 2
    assert load_own(data, graded=False)["answer"][:4] == ["5", "NA", "-", "--"]  # your own reward decides


@pytest.mark.parametrize(
    ("gold", "is_told"), [("2,5", True), ("-0,25", True), ("1.234,50", True), ("1,234", False), ("2, 5", False)]
)
def test_decimal_commas_are_told(gold: str, is_told: bool, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": gold}]))
    load_own(data)
    assert ("write a decimal comma as a point" in caplog.text) is is_told
    assert not is_told or f"{gold!r} (line 1 of" in caplog.text


# ---- objects in columns: verl, DAPO, prime-rl ----

NESTED = {"ground_truth": "5", "style": "rule"}


def test_a_dotted_name_is_a_field(tmp_path: Path) -> None:
    rows = [
        {"extra": {"q": {"text": "2+3?"}}, "reward_model": NESTED},
        {"extra": {"q": {"text": "b"}}, "reward_model": None},
    ]
    names = {"prompt_column": "extra.q.text", "answer_column": "reward_model.ground_truth"}
    data = DataArguments(write(tmp_path / "own.jsonl", rows), **names)
    found = load_own(data)
    assert found["answer"][:] == ["5"] and found["prompt"][0][-1]["content"] == "2+3?"
    assert {*found.column_names} == {"prompt", "answer", "reward_model", "extra"}
    problems, _ = load_user_benchmark("own", data.dataset, data, with_grader=True)
    assert [problem.question for problem in problems] == ["2+3?", "b"]
    assert [problem.columns["answer"] for problem in problems] == ["5", None]  # as rewards see it


def test_a_column_whose_name_has_a_dot_comes_first(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "a.b": "1", "a": {"b": "2"}}]
    assert load_own(DataArguments(write(tmp_path / "own.jsonl", rows), answer_column="a.b"))["answer"][:] == ["1"]


SENTENCES = [
    ("She bought 4 books and lost one.", True),
    ("She has 4 books in total.", False),  # 4 is right
    ("The train arrives in the evening", True),
    ("It takes 2 hours and 5 minutes", True),
    ("The answer is 4", False),  # 4 is right
    ("There are 5 apples.", False),
    ("the odd ones", False),  # three words may be a name
    ("x = 3 y + 2 z", False),
    (r"\frac{1}{2} + \sqrt{3} x", False),
    ("4", False),
]


@pytest.mark.parametrize("graded", [True, False])
def test_gold_answers_that_only_a_copy_equals_are_counted(
    graded: bool, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """In one line, with the first of them; for training and for a benchmark, unless another reward decides."""
    rows = [{"prompt": f"{i}?", "answer": gold} for i, (gold, _) in enumerate([("7", False), *SENTENCES])]
    source = write(tmp_path / "own.jsonl", rows)
    assert [is_sentence(gold) for gold, _ in SENTENCES] == [expected for _, expected in SENTENCES]
    load_own(DataArguments(source), graded=graded)
    load_user_benchmark("own", source, DataArguments(), with_grader=not graded)
    said = "3 of 11 gold answers are sentences, such as 'She bought 4 books and lost one.' (line 2 of"
    assert [said in message for message in caplog.messages] == [True] * 2 * graded


HALF = r'{"prompt": "2 + %s?", "answer": "%s", "more": [{"a": "%s"}]}'


@pytest.mark.parametrize(("texts", "column"), [((0, "", ""), "prompt"), (("", 0, ""), "answer"), (("", "", 0), "more")])
def test_half_a_character_is_refused_by_line_and_column(texts: Any, column: str, tmp_path: Path) -> None:
    """JSON can write it; the whole one and other escapes are text. No tokenizer takes it."""
    path = tmp_path / "own.jsonl"
    good = HALF % (r"\ud83d\ude00", r"2 \u00e9", r"\u4e00")
    bad = HALF % tuple(r"\ud83d" if text == 0 else text for text in texts)
    path.write_text(f"{good}\n{good}\n{bad}\n")
    with refused(rf"own.jsonl cannot be read: line 3, column '{column}' has '.ud83d', half of a character"):
        read_file(path)
    path.write_text(f"{good}\n")
    assert read_file(path).rows[0][0]["prompt"] == "2 + \U0001f600?"


def test_half_a_character_of_a_conversation_in_a_cell_is_refused(tmp_path: Path) -> None:
    cell = json.dumps([{"role": "user", "content": "2 \ud83d?"}])
    frame = DataFrame({"prompt": ["1?", cell], "answer": ["1", "2"]})
    frame.to_csv(tmp_path / "own.csv", index=False)
    with refused(r"line 3 of .*own.csv, the prompt, has '.ud83d', half of a character"):
        load_own(DataArguments(str(tmp_path / "own.csv")))


@pytest.mark.parametrize("as_text", [False, True])
def test_a_problem_that_shows_its_answer_is_refused(as_text: bool, here: Path) -> None:
    """A conversation as it is, or as text; the second row."""
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    shown = [[json.dumps(each)] if as_text else [each] for each in (turns[:1], turns)]
    write_lines(Path("mine.jsonl"), [{"prompt": prompt, "answer": "2"} for [prompt] in shown])
    data = DataArguments(dataset="mine.jsonl")
    with refused("2.*: the last turn of the prompt is the assistant's"):
        load_user_benchmark("own", data.dataset, data)
    data = DataArguments(dataset="mine.jsonl", limit=1)
    [problem], _ = load_user_benchmark("own", data.dataset, data, limit=1)
    assert problem.question == turns[:1]
