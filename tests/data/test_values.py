"""Gold answers as other projects store them: solutions, lists as text, objects, missing values. Right, or refused."""

from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of, write_lines

from gtpo.arguments import DataArguments
from gtpo.data.load import load_train, load_user_benchmark
from gtpo.data.values import gold_in, is_missing, to_answer
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
    assert is_correct(answer, gold_in(text)) and not is_correct("77", gold_in(text))
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": text}]))
    assert is_correct(answer, load_train(data)["answer"][0])
    [problem], dropped = load_user_benchmark("own", data.dataset, data)
    assert is_correct(answer, problem.gold) and not dropped
    assert load_train(data, graded=False)["answer"][:] == [text]  # for your own reward


LISTS = TABLES["lists"]


@pytest.mark.parametrize(("text", "elements"), LISTS, ids=[text for text, _ in LISTS])
def test_a_list_that_is_written_as_text(text: str, elements: list[str] | None, tmp_path: Path) -> None:
    assert listed(text) == elements
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": text}]))
    [gold] = load_train(data)["answer"][:]
    if elements is None:
        assert gold == text
        return
    assert all(is_correct(element, text) and is_correct(element, gold) for element in elements)
    typed = DataArguments(write(tmp_path / "typed.jsonl", [{"prompt": "a", "answer": elements}]))
    assert load_train(typed)["answer"][:] == [gold]
    every = DataArguments(data.dataset, answer_list="all")
    expected = ", ".join(elements)
    assert load_train(every)["answer"][:] == [expected]
    assert [problem.gold for problem in load_user_benchmark("own", every.dataset, every)[0]] == [expected]


@pytest.mark.parametrize("answer_list", ["any", "all"])
def test_an_element_that_is_there_twice_counts_once(answer_list: str) -> None:
    assert to_answer(["5", " 5"], ["5", "5"], "row 1", answer_list) == "5"
    assert to_answer([], ["1", "2", "1"], "row 1", "all") == "1, 2"
    assert to_answer([], ["1", "2", "1"], "row 1", "any") == '["1", "2"]'


def test_texts_of_a_missing_answer() -> None:
    texts = ["NA", "-", "--", "?", "...", "N/A", "n.a.", "#N/A", "None", "NULL", "NaN", "<NA>", " ", "", None]
    assert all(map(is_missing, texts))
    assert not any(map(is_missing, ["Na", "na", "no", "0", 0, 0.0, "---"]))


UNREADABLE = ["NaN", "nan", "N/A", "n/a", "NA", "None", "null", "NULL", "<NA>", "-", "?", "...", " ", "x" * 1001, "((("]


def test_rows_without_gold_are_dropped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    golds = ["5", *UNREADABLE, "Na"]
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": gold} for gold in golds]))
    assert load_train(data)["answer"][:] == ["5", "Na"]
    told = caplog.text
    caplog.clear()
    problems, dropped = load_user_benchmark("own", data.dataset, data)
    assert [problem.gold for problem in problems] == ["5", "Na"]
    assert told.partition("rows dropped")[2] == caplog.text.partition("rows dropped")[2]
    for text in (
        "15 of 17 rows",
        "1 with an empty answer (first: line 14 of",
        "14 without a readable gold answer (first: line 2 of",
    ):
        assert text in caplog.text
    assert dropped == {"with an empty answer": 1, "without a readable gold answer": 14}
    assert load_train(data, graded=False)["answer"][:4] == ["5", "NaN", "nan", "N/A"]  # your own reward decides


@pytest.mark.parametrize(
    ("gold", "is_told"), [("2,5", True), ("-0,25", True), ("1.234,50", True), ("1,234", False), ("2, 5", False)]
)
def test_decimal_commas_are_told(gold: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = DataArguments(write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": gold}]))
    load_train(data)
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
    found = load_train(data)
    assert found["answer"][:] == ["5"] and found["prompt"][0][-1]["content"] == "2+3?"
    assert {"reward_model", "extra"} <= set(
        found.column_names
    ) and "reward_model.ground_truth" not in found.column_names
    problems, dropped = load_user_benchmark("own", data.dataset, data)
    assert [(problem.question, problem.gold) for problem in problems] == [("2+3?", "5")]
    assert dropped == {"with an empty answer": 1}
    problems, _ = load_user_benchmark("own", data.dataset, data, with_grader=True)
    assert [problem.columns["answer"] for problem in problems] == ["5", None]  # as rewards see it


def test_a_column_whose_name_has_a_dot_comes_first(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "a.b": "1", "a": {"b": "2"}}]
    assert load_train(DataArguments(write(tmp_path / "own.jsonl", rows), answer_column="a.b"))["answer"][:] == ["1"]
