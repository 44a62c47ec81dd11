"""Your data: CSV, Parquet, folders and the Hub, the names of columns, and what is wrong, by file and line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset
from helpers.refusals import refused
from helpers.rows import planned
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.arguments import DataArguments
from gtpo.data.load import load_benchmark, load_named, load_own, load_user_benchmark, to_demonstrations
from gtpo.data.tables import read_table
from gtpo.grading.user_functions import load_rewards
from gtpo.prompts import to_messages

pytestmark = pytest.mark.usefixtures("isolated_cache")

Load = Callable[..., Dataset]
NAMED = {"prompt_column": "task", "answer_column": "gold"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a file and load it."""

    def write_and_load(name: str, text: str, graded: bool = True, **flags: Any) -> Dataset:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return load_own(DataArguments(str(path), **flags), graded=graded)

    return write_and_load


# ---- columns ----


def test_named_columns_are_renamed_and_others_keep_their_names(load: Load) -> None:
    """Two are left out: one whose name is taken, and the row numbers of pandas."""
    text = ",level,task,answer,gold,steps\n0,3,1 + 1?,wrong,2,1 + 1 = 2\n"
    rows = load("own.csv", text, **NAMED, solution_column="steps")
    assert rows.to_list() == [{"prompt": to_messages("1 + 1?"), "answer": "2", "solution": "1 + 1 = 2", "level": "3"}]


def test_columns_that_are_called_like_a_field_of_a_row_are_kept(load: Load) -> None:
    rows = load("own.csv", "prompt,answer,gold,place,others\na,1,g,p,o\n")
    expected = {"prompt": to_messages("a"), "answer": "1", "gold": "g", "place": "p", "others": "o"}
    assert rows.to_list() == [expected]


def test_splits_and_limits_of_the_datasets_of_the_paper(data_dir: Path) -> None:
    assert len(planned("math", limit=7)) == 7
    assert len(planned("gsm8k", split="test")) == 1319
    rows = load_named(DataArguments("gsm8k", data_dir=str(data_dir), limit=3), "test")
    first = load_benchmark("gsm8k", str(data_dir))[0]
    assert len(rows) == 3 and rows["prompt"][0] == to_messages(first.question)
    assert len(planned("arithmetic", split="test")) == 500
    for flag in ("split", "prompt_column", "answer_column", "solution_column", "dataset_config"):
        with refused(f"^--{flag} "):
            planned("gsm8k", **{flag: "mine"})


# ---- rows that cannot be used ----


def test_dropped_rows_are_counted_by_reason_outside_the_limit(
    load: Load, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    text = 'task,gold\na,1\n" ",2\nb,\n,\n"c\nc",3\nd,4\n'
    rows = load("own.csv", text, **NAMED, limit=2)
    assert rows["answer"][:] == ["1", "3"] and rows["prompt"][1] == to_messages("c\nc")
    assert "3 of 6 rows" in caplog.text and "line 3 of" in caplog.text and "line 4 of" in caplog.text
    flags = DataArguments(str(tmp_path / "own.csv"), **NAMED)
    problems, _ = load_user_benchmark("own", flags.dataset, flags, limit=2)
    assert [(problem.id, problem.gold) for problem in problems] == [("own/0", "1"), ("own/1", "3")]


def test_rows_without_a_solution_are_dropped_for_sft_alone(load: Load, caplog: LogCaptureFixture) -> None:
    rows = load("own.csv", "prompt,answer,solution\na,1,s\nb,2,\n")
    assert rows["solution"][:] == ["s", None]
    assert to_demonstrations(rows)["completion"][:] == [[{"role": "assistant", "content": "s"}]]
    assert "1 of 2 rows" in caplog.text
    for without in (rows.select([1]), load("none.csv", "prompt,answer\na,1\n")):
        with refused("no row has a reference solution.*--solution_column"):
            to_demonstrations(without)


# ---- CSV ----


def test_every_value_of_a_csv_file_stays_text(load: Load) -> None:
    golds = ["18", "18.0", "007", "TRUE", "1,000", "1e3", "3/4", "5 %", "2024-01-02"]
    text = "\ufefftask,gold,gap\r\n" + "".join(f'q,"{gold}",\r\n' for gold in golds)
    rows = load("own.csv", text, **NAMED)
    assert rows["answer"][:] == golds and set(rows["gap"][:]) == {""}


def test_line_numbers_count_line_breaks_within_csv_fields(load: Load, tmp_path: Path) -> None:
    rows = load("own.csv", 'prompt\n"a\n\nb"\n\nc\r\nd\n \n', graded=False)
    assert len(rows) == 3  # a line of white space is a row without a prompt
    table = read_table(str(tmp_path / "own.csv"), DataArguments(), "train")
    assert [place.split()[1] for _, place in table.rows] == ["4", "6", "7", "8"]  # where they end
    with refused("line 7 "):
        load("own.csv", 'task,gold\n"a\n\nb",1\n\nc,2\nd, e,3\n', **NAMED)


def test_a_conversation_in_a_cell_is_json(load: Load) -> None:
    cell = '[{""role"": ""user"", ""content"": ""Hi, you""}]'
    assert load("own.csv", f'prompt\n"{cell}"\n', graded=False)["prompt"][0] == [{"role": "user", "content": "Hi, you"}]
    sets = "[{1}, {2}] has how many sets?"
    assert load("own.csv", f'prompt\n"{sets}"\n', graded=False)["prompt"][0] == to_messages(sets)


# ---- JSON ----


def test_numbers_in_the_answer_column_are_written_out(load: Load) -> None:
    answers = "18", "18.0", "2.50", "-0.0", "9007199254740993", "16777216.0", "9007199254740991.0"
    lines = "".join(f'{{"prompt": "a", "answer": {answer}}}\r\n' for answer in answers)
    expected = ["18", "18", "2.5", "-0", "9007199254740993", "16777216", "9007199254740991"]
    assert load("own.jsonl", f"\ufeff{lines}")["answer"][:] == expected  # with a byte order mark
    for lost in ("1e20", "9007199254740993.0", "-9007199254740992.0", '"9007199254740992.0"', "[1, 1e17]"):
        with refused(r"line 1 of .*a float of 2\^53 or more"):
            load("own.jsonl", f'{{"prompt": "a", "answer": {lost}}}\n')
    with refused("is True: expected a string or a number"):
        load("own.jsonl", '{"prompt": "a", "answer": true}\n')


# ---- Parquet ----


def test_parquet_of_pandas_keeps_integers_with_gaps(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    table = pandas.DataFrame({"task": ["a", "b", "c"], "gold": [18, None, 7], "turn": [1, 2, 3]})
    assert table["gold"].dtype == float
    table.to_parquet(tmp_path / "own.parquet")
    rows = load_own(DataArguments(str(tmp_path / "own.parquet"), **NAMED))
    assert rows["answer"][:] == ["18", "7"] and rows["turn"][:] == [1, 3]
    assert "row 2 of" in caplog.text


def test_numbers_of_32_bits_are_read_as_written(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    small = pyarrow.float32()
    columns = {
        "prompt": ["a", "b"],
        "answer": pyarrow.array([0.1, 2.5], small),
        "more": pyarrow.array([[0.1], [0.3, None]], pyarrow.list_(small)),
        "reward_model": pyarrow.array([{"x": 0.7}, None], pyarrow.struct([("x", small)])),
    }
    write_table(pyarrow.table(columns), tmp_path / "own.parquet")
    rows = load_own(DataArguments(str(tmp_path / "own.parquet")))
    assert rows.remove_columns("prompt").to_list() == [
        {"answer": "0.1", "more": [0.1], "reward_model": {"x": 0.7}},
        {"answer": "2.5", "more": [0.3, None], "reward_model": None},
    ]


# ---- the Hub ----


def test_a_hub_dataset_has_its_config_and_split(monkeypatch: MonkeyPatch) -> None:
    asked = []

    def hub(*args: Any, **kwargs: Any) -> Dataset:
        asked.append((args, kwargs))
        return Dataset.from_dict({"task": ["a", ""], "gold": [18, 19], "level": [1, 2]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    rows = load_own(DataArguments("owner/name", **NAMED, dataset_config="main", split="dev"))
    assert rows.to_list() == [{"prompt": to_messages("a"), "answer": "18", "level": 1}]
    load_own(DataArguments("owner/name", **NAMED))
    assert asked == [(("owner/name", "main"), {"split": "dev"}), (("owner/name", None), {"split": "train"})]
    with refused("--prompt_column"):
        load_own(DataArguments("owner/name"))


def test_a_dry_run_does_not_ask_the_hub(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)  # not called
    rows = planned("owner/name", prompt_column="task")
    assert (len(rows), rows.column_names) == (0, [])
    assert to_demonstrations(rows).column_names == []
    (tmp_path / "own.py").write_text(
        "def mine(completions, keyword, **columns):\n    return [1.0] * len(completions)\n"
    )
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], {}, rows.column_names)
    assert reward(["a"], keyword=["b"]) == [1.0]


def test_a_file_that_is_no_csv_of_ours_says_what_to_change(load: Load, tmp_path: Path) -> None:
    for encoding in ("utf-16", "latin-1"):
        path = tmp_path / "own.csv"
        path.write_bytes("prompt,answer\né,1\n".encode(encoding))
        with refused("own.csv is not in UTF-8: save it as UTF-8, in a spreadsheet as CSV UTF-8"):
            read_table(str(path), DataArguments(), "train")
    with refused("its first line, which names the columns, has 'Anna has 3 b...oes she have.', '4'; set"):
        load("own.csv", "Anna has 3 books and buys one more. How many does she have?,4\nB,5\n")
    with refused("line 3: field larger .*close a double quote above, or shorten the field"):
        load("own.csv", f"prompt,answer\na,1\n{'b' * 140_000},2\n")
    with refused("line 3: unexpected end of data"):
        load("own.csv", 'prompt,answer\na,1\n"b,2\n')
