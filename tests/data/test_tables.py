"""Your data: CSV, Parquet, folders and the Hub, the names of columns, and what is wrong, by file and line."""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet

from gtpo.arguments import DataArguments
from gtpo.data.load import load_train, load_user_benchmark, to_demonstrations
from gtpo.data.tables import read_table
from gtpo.errors import UsageError
from gtpo.grading.user_functions import load_rewards
from gtpo.prompts import to_messages

NAMED = {"prompt_column": "task", "answer_column": "gold"}


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep test files out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Dataset]:
    """Write a file and load it."""

    def write_and_load(name: str, content: str | bytes, **flags: Any) -> Dataset:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_train(DataArguments(str(path), **flags))

    return write_and_load


# ---- columns ----


def test_named_columns_become_prompt_answer_and_solution_and_the_others_keep_their_names(
    load: Callable[..., Dataset],
) -> None:
    text = "level,task,gold,steps\n3,1 + 1?,2,1 + 1 = 2\n"
    rows = load("own.csv", text, **NAMED, solution_column="steps")
    assert rows.to_list() == [
        {"prompt": to_messages("1 + 1?"), "answer": "2", "solution": "1 + 1 = 2", "level": "3"},
    ]


def test_a_column_whose_name_is_taken_is_left_out(load: Callable[..., Dataset]) -> None:
    rows = load("own.csv", "prompt,answer,gold\na,wrong,2\n", answer_column="gold")
    assert rows["answer"][:] == ["2"] and set(rows.column_names) == {"prompt", "answer"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"has no column 'prompt': it has 'task', 'gold'; name the one with the prompt with --prompt_column\.$"),
        ({"prompt_column": "tsk"}, r"has no column 'tsk' \(did you mean 'task'\?\): it has 'task', 'gold'; "),
        ({"prompt_column": "task", "answer_column": "answers"}, r"has no column 'answers': .*--answer_column\.$"),
        ({**NAMED, "solution_column": "steps"}, r"has no column 'steps': .*--solution_column\.$"),
        ({**NAMED, "split": "test"}, r"^--split test is for a dataset of the Hub, and \S+ is a path: remove it"),
        ({**NAMED, "dataset_config": "main"}, r"^--dataset_config main is for a dataset of the Hub"),
    ],
)
def test_a_column_that_is_missing_is_named(flags: dict[str, str], message: str, load: Callable[..., Dataset]) -> None:
    with pytest.raises(UsageError, match=message):
        load("own.csv", "task,gold\na,b\n", **flags)


@pytest.mark.parametrize("name", ["gsm8k", "math", "arithmetic"])
@pytest.mark.parametrize("flag", ["prompt_column", "answer_column", "solution_column", "dataset_config"])
def test_the_datasets_of_the_paper_refuse_names_of_columns(name: str, flag: str) -> None:
    with pytest.raises(UsageError, match=rf"^--{flag} mine is for your own data, not for {name}: remove"):
        load_train(DataArguments(name, **{flag: "mine"}), dry_run=True)


def test_splits_and_limits_of_the_datasets_of_the_paper(data_dir: Path) -> None:
    assert len(load_train(DataArguments("math", limit=7), dry_run=True)) == 7
    assert len(load_train(DataArguments("gsm8k", split="test"), dry_run=True)) == 1319
    rows = load_train(DataArguments("gsm8k", str(data_dir), split="test", limit=3))
    first = json.loads((data_dir / "gsm8k_test.jsonl").read_text().partition("\n")[0])
    assert len(rows) == 3 and rows["prompt"][0] == to_messages(first["question"])
    held_out = load_train(DataArguments("arithmetic", split="test"))
    assert len(held_out) == 500 and held_out["prompt"][0] != load_train(DataArguments("arithmetic"))["prompt"][0]
    with pytest.raises(UsageError, match=r"^--split is 'dev': gsm8k has the splits train and test\.$"):
        load_train(DataArguments("gsm8k", split="dev"), dry_run=True)
    with pytest.raises(UsageError, match="--limit is 0: expected at least 1"):
        DataArguments(limit=0)


# ---- rows that cannot be used ----


def test_dropped_rows_are_counted_by_reason_and_the_limit_counts_the_others(
    load: Callable[..., Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    text = 'task,gold\na,1\n" ",2\nb,\n,\n"c\nc",3\nd,4\n'
    with caplog.at_level(logging.WARNING):
        rows = load("own.csv", text, **NAMED, limit=2)
    assert rows["answer"][:] == ["1", "3"] and rows["prompt"][1] == to_messages("c\nc")
    expected = r"3 of 6 rows dropped: 2 with an empty prompt \(first: line 3 of \S+own\.csv\), "
    assert re.search(expected + r"1 with an empty answer \(first: line 4 of \S+own\.csv\)", caplog.text)


def test_rows_without_a_solution_are_dropped_for_sft_alone(
    load: Callable[..., Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    rows = load("own.csv", "prompt,answer,solution\na,1,s\nb,2,\n")
    assert rows["solution"][:] == ["s", None]
    assert to_demonstrations(rows)["completion"][:] == [[{"role": "assistant", "content": "s"}]]
    assert "1 of 2 rows dropped: with an empty solution" in caplog.text
    with pytest.raises(UsageError, match="the column 'solution' of all 1 rows is empty"):
        to_demonstrations(rows.select([1]))


# ---- CSV ----


def test_every_value_of_a_csv_file_stays_the_text_that_it_is(load: Callable[..., Dataset]) -> None:
    golds = ["18", "18.0", "007", "TRUE", "1,000", "1e3", "NA", "null", "3/4", "5 %", 'a "b"', "2024-01-02"]
    text = "task,gold,gap\r\n" + "".join(f'q,"{gold.replace(chr(34), chr(34) * 2)}",\r\n' for gold in golds)
    rows = load("own.csv", b"\xef\xbb\xbf" + text.encode(), **NAMED)
    assert rows["answer"][:] == golds and set(rows["gap"][:]) == {""}


def test_a_csv_line_is_that_of_the_file_also_after_a_field_with_line_breaks(
    load: Callable[..., Dataset], tmp_path: Path
) -> None:
    load("own.csv", 'prompt\n"a\n\nb"\n\nc\r\nd\n')
    places = read_table(str(tmp_path / "own.csv"), None, "train").locations
    assert [place.split()[1] for place in places] == ["4", "6", "7"]  # where they end
    with pytest.raises(
        UsageError, match=r"line 7 has more or fewer fields than the header \(task, gold\): put a field"
    ):
        load("own.csv", 'task,gold\n"a\n\nb",1\n\nc,2\nd, e,3\n', **NAMED)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"^\S+own\.csv has no rows\.$"),
        ("task,gold\n", r"^\S+own\.csv has no rows"),
        ("task;gold\na;b\n", r"^\S+own\.csv has no column 'task': it has 'task;gold'; a CSV file has commas"),
        ("task\tgold\na\tb\n", r"it has 'task\\tgold'"),
        ("task,gold\na\n", r"^\S+own\.csv cannot be read: line 2 has more or fewer fields than the header"),
        ('task,gold\na,1\nb,"2\n\n', r"the row that ends at line 4 is not valid CSV: unexpected end of data"),
        ('task,gold\na,"1"2\n', r"the row that ends at line 2 is not valid CSV: ',' expected after '\"'"),
        (
            "task,gold\na,1\nb,é\n".encode("latin-1"),
            r"own\.csv cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 16",
        ),
        ("task,gold\na,1\n".encode("utf-16"), r"own\.csv cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_an_unusable_csv_file_is_refused(content: str | bytes, message: str, load: Callable[..., Dataset]) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load("own.csv", content, **NAMED)
    assert "\n" not in str(caught.value)


def test_a_conversation_in_a_cell_is_json(load: Callable[..., Dataset]) -> None:
    turns = [{"role": "user", "content": "Hi, you"}]
    cell = json.dumps(turns).replace('"', '""')
    assert load("own.csv", f'prompt\n"{cell}"\n')["prompt"][:] == [turns]
    assert load("own.csv", 'prompt\n"[{1}, {2}] has how many sets?"\n')["prompt"][0] == to_messages(
        "[{1}, {2}] has how many sets?"
    )
    with pytest.raises(UsageError, match=r"^line 2 of \S+: prompt .* is neither a string nor a conversation, in JSON"):
        load("own.csv", "prompt\n\"[{'role': 'user', 'content': 'Hi'}]\"\n")
    with pytest.raises(UsageError, match=r"^line 2 of \S+: prompt .*'content': 5.* is neither"):
        load("own.csv", 'prompt\n"[{""role"": ""user"", ""content"": 5}]"\n')


# ---- JSON ----


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "own.jsonl",
            '{"prompt": "a"}\n{"prompt" "b"}\n',
            r"own\.jsonl cannot be read: line 2 is not valid JSON: .* column 11 ",
        ),
        ("own.jsonl", '[{"prompt": "a"}]', r"line 1 is \[{'prompt': 'a'}\], expected a JSON object"),
        (
            "own.jsonl",
            '[\n{"prompt": "a"}\n]',
            r"own\.jsonl cannot be read: line 1 is not valid JSON: ",
        ),
        (
            "own.json",
            '[{"prompt": "a"}]',
            r"own\.json: unknown format, expected \.jsonl \(one JSON object per line\), \.csv or",
        ),
        ("own.json.gz", "", r"own\.json\.gz: unknown format, .*, not compressed\.$"),
        ("own.csv.GZ", "", r"own\.csv\.GZ: unknown format, .*, not compressed\.$"),
        ("own.arrow", "", r"own\.arrow: unknown format"),
        ("own.jsonl", '{"prompt": "a", "answer": NaN}\n', "no usable row: 1 with an empty answer"),
        ("own.jsonl", '{"prompt": "a", "answer": Infinity}\n', r"^line 1 of \S+: column 'answer' is inf: expected"),
    ],
)
def test_an_unusable_json_file_is_refused(name: str, content: str, message: str, load: Callable[..., Dataset]) -> None:
    with pytest.raises(UsageError, match=message):
        load(name, content)


def test_numbers_in_the_answer_column_are_written_out(load: Callable[..., Dataset]) -> None:
    answers = "18", "18.0", "2.50", "-0.0", "1e20", "9007199254740993", "16777216.0"
    lines = "".join(f'{{"prompt": "a", "answer": {answer}}}\n' for answer in answers)
    assert load("own.jsonl", lines)["answer"][:] == ["18", "18", "2.5", "-0", "1e+20", "9007199254740993", "16777216"]


def test_the_problems_of_a_benchmark_are_numbered_from_0(tmp_path: Path) -> None:
    """Stored completions are matched by these ids."""
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "answer": 1}\n' * 2)
    flags = DataArguments(str(tmp_path / "own.jsonl"))
    assert [problem.id for problem in load_user_benchmark("own", flags.dataset, flags)[0]] == ["own/0", "own/1"]


# ---- Parquet ----


def test_a_parquet_file_as_pandas_writes_it_keeps_integers_with_gaps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pandas.DataFrame({"task": ["a", "b", "c"], "gold": [18, None, 7], "turn": [1, 2, 3]})
    assert table["gold"].dtype == float
    table.to_parquet(tmp_path / "own.parquet")
    with caplog.at_level(logging.WARNING):
        rows = load_train(DataArguments(str(tmp_path / "own.parquet"), **NAMED))
    assert rows["answer"][:] == ["18", "7"] and rows["turn"][:] == [1, 3]
    assert re.search(r"1 with an empty answer \(first: row 2 of \S+own\.parquet\)", caplog.text)


def test_an_unusable_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    path.write_bytes(b"task,gold\na,b\n")
    with pytest.raises(UsageError, match=r"own\.parquet cannot be read: .*magic bytes.*\.$"):
        load_train(DataArguments(str(path)))
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": [{"is": "1"}, {"is": "2"}]}), path)
    with pytest.raises(UsageError, match=r"^row 1 of \S+own\.parquet: column 'answer' is {'is': '1'}: expected"):
        load_train(DataArguments(str(path)))
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), path)
    with pytest.raises(UsageError, match=r"own\.parquet has no rows"):
        load_train(DataArguments(str(path)))


# ---- the Hub ----


def test_a_dataset_of_the_hub_is_loaded_with_its_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(*args: Any, **kwargs: Any) -> Dataset:
        asked.append((args, kwargs))
        return Dataset.from_dict({"task": ["a", ""], "gold": [18, 19], "level": [1, 2]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    rows = load_train(DataArguments("owner/name", **NAMED, dataset_config="main", split="dev"))
    assert rows.to_list() == [{"prompt": to_messages("a"), "answer": "18", "level": 1}]
    load_train(DataArguments("owner/name", **NAMED))
    assert asked == [(("owner/name", "main"), {"split": "dev"}), (("owner/name", None), {"split": "train"})]
    with pytest.raises(UsageError, match=r"^owner/name has no column 'prompt': it has 'task', 'gold', 'level'"):
        load_train(DataArguments("owner/name"))


def test_a_dataset_that_the_hub_does_not_give_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Dataset:
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(
        UsageError, match=r"^cannot read owner/name, split 'train', from the Hub .*'main', 'socratic'\]"
    ):
        load_train(DataArguments("owner/name"))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_dict({"prompt": []}))
    with pytest.raises(UsageError, match=r"^owner/name has no rows in its split 'train'"):
        load_train(DataArguments("owner/name"))


def test_a_dry_run_does_not_ask_the_hub_and_knows_no_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)  # not called
    rows = load_train(DataArguments("owner/name", prompt_column="task"), dry_run=True)
    assert (len(rows), rows.column_names) == (0, [])
    assert to_demonstrations(rows) is rows
    (tmp_path / "own.py").write_text(
        "def mine(completions, keyword, **columns):\n    return [1.0] * len(completions)\n"
    )
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], {}, rows.column_names)
    assert reward(["a"], keyword=["b"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such.csv",
            r"^no_such\.csv does not exist or is not a regular file: expected a file or a Hub id",
        ),
        ("data/no_such.parquet", r"^data/no_such\.parquet does not exist"),
        (
            "gsm8",
            r"^--dataset 'gsm8' is unknown \(did you mean 'gsm8k'\?\): pick one of gsm8k, math, arithmetic, or name",
        ),
        ("own.txt", r"own\.txt: unknown format, expected \.jsonl"),
        ("data/no_such.json.gz", r"^data/no_such\.json\.gz does not exist or"),
        ("", r"^--dataset '' is unknown: pick one of gsm8k, math, arithmetic, or name a file"),
        ("..", r"^\.\. does not exist or is not a regular file"),
        ("pipe.jsonl", r"^pipe\.jsonl does not exist or is not a regular file"),
        ("/dev/zero", r"^/dev/zero does not exist or is not a regular file"),
        ("loop", r"^loop does not exist or is not a regular file: "),
        ("gone.csv", r"^gone\.csv does not exist or is not a regular file: "),
    ],
)
def test_a_name_that_is_nothing_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    Path("own.txt").write_text("a")
    Path("base/config.json").write_text("{}")
    Path("base/rows.jsonl").write_text('{"prompt": "a"}')
    os.mkfifo("pipe.jsonl")
    Path("loop").symlink_to("loop")
    Path("gone.csv").symlink_to("no_such.csv")
    with pytest.raises(UsageError, match=message):
        load_train(DataArguments(name))
