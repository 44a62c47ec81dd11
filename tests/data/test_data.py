"""Training data and benchmarks: generated arithmetic, and the real files row by row."""

import json
import re
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from helpers.files import write_lines
from helpers.refusals import refused
from helpers.rows import planned
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import AutoTokenizer

from gtpo.arguments import DataArguments, ModelArguments, RunArguments, Settings
from gtpo.data.arithmetic import arithmetic
from gtpo.data.load import drop_long_prompts, load_benchmark, load_named, prepare_prompts
from gtpo.prompts import SYSTEM_PROMPT
from rewards import accuracy_reward, format_reward

pytestmark = pytest.mark.usefixtures("isolated_cache")


def jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return list(map(json.loads, file))


# ---- arithmetic ----

STORY = (
    r"(\w+) has (\d+) (\w+)\.((?: \1 (?:finds|gives away|gets) \d+(?: more| times as many)?\.)+)"
    r" How many \3 does \1 have\?"
)


def working(question: str) -> list[str]:
    """A line for each step of a story, from the text of the question only; the last one ends with the result."""
    match = re.fullmatch(STORY, question)
    assert match, question
    total = int(match[2])
    lines = []
    for verb, text in re.findall(r"(finds|gives away|gets) (\d+)", match[4]):
        number = int(text)
        sign, result = {
            "finds": ("+", total + number),
            "gives away": ("-", total - number),
            "gets": ("*", total * number),
        }[verb]
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    return lines


@pytest.mark.parametrize(("split", "seed"), [("train", 0), ("train", 7), ("test", 0)])
def test_arithmetic_gold_and_reasoning_follow_from_the_question(split: str, seed: int) -> None:
    counts = set()
    for row in arithmetic(split, 1500, seed):
        lines = working(row.prompt)
        assert row.solution == "\n".join(lines)
        assert lines[-1].endswith(f"= {row.gold}") and int(row.gold) > 0
        counts.add(len(lines))
    assert counts == {1, 2, 3}


def test_arithmetic_depends_only_on_the_seed() -> None:
    first = list(arithmetic("train", 300, seed=3))
    assert first[:100] == list(arithmetic("train", 100, seed=3))  # a longer list starts with the shorter one
    assert first != list(arithmetic("train", 300, seed=4))


@pytest.mark.parametrize(
    ("split", "prompt"),
    [
        ("train", "Leo has 6 eggs. Leo gets 3 times as many. Leo finds 1 more. How many eggs does Leo have?"),
        (
            "test",
            "Tom has 6 apples. Tom gets 2 times as many. Tom gives away 8. Tom gets 2 times as many. "
            "How many apples does Tom have?",
        ),
    ],
)
def test_the_first_problem_of_each_split_is_the_stored_one(split: str, prompt: str) -> None:
    assert next(arithmetic(split, 1, seed=0)).prompt == prompt


def test_arithmetic_train_and_test_are_disjoint_for_any_seed() -> None:
    test = {row.prompt for seed in (0, 1) for row in arithmetic("test", 500, seed)}
    for seed in (0, 1, 42, 3407):
        train = {row.prompt for row in arithmetic("train", 4000, seed)}
        assert len(train) == 4000 and not test & train


def test_arithmetic_as_a_benchmark() -> None:
    """The hard one has four and five steps: none of its problems is trained on, or in the other benchmark."""
    easy, hard = map(load_benchmark, ("arithmetic", "arithmetic_hard"))
    assert [(each.question, each.gold) for each in easy] == [
        (row.prompt, row.gold) for row in arithmetic("test", 500, 0)
    ]
    assert hard[0].id == "arithmetic_hard/0"
    lines = [working(problem.question) for problem in hard]
    assert [steps[-1].split()[-1] for steps in lines] == [problem.gold for problem in hard]
    assert {*map(len, lines)} == {4, 5}
    assert len({problem.question for problem in hard}) == len(hard) == 500


def test_an_unknown_dataset_is_refused_by_its_flag() -> None:
    with refused("--dataset 'gsm' is unknown"):
        planned("gsm")
    with refused("--eval_dataset 'gsm' is unknown"):
        planned("arithmetic", eval_dataset="gsm")


# ---- training rows: of arithmetic, and of GSM8K and MATH from the real files ----


def check_training_rows(name: str, rows: Dataset) -> None:
    """Every reference solution scores 10 + 10: SFT trains on completions that earn the maximum reward."""
    unread = planned(name)  # without the Hub
    assert len(unread) == len(rows)
    assert {*unread.column_names} == {*rows.column_names} == {"prompt", "answer", "solution"}
    columns = rows[:]  # at once, not row by row
    for (system, user), answer, solution in zip(*map(columns.get, ("prompt", "answer", "solution")), strict=True):
        assert system == {"role": "system", "content": SYSTEM_PROMPT} and user["role"] == "user"
        assert isinstance(answer, str) and answer.strip() == answer != ""
        assert solution.startswith("<reasoning>\n") and solution.endswith(f"\n<answer>\n{answer}\n</answer>")
    solutions = columns["solution"]
    assert {*format_reward(solutions)} == {*accuracy_reward(solutions, columns["answer"])} == {10.0}


def test_arithmetic_as_a_dataset() -> None:
    rows = load_named(DataArguments("arithmetic"), seed=5)
    assert len(rows) == 4000
    assert rows["prompt"][0][1]["content"] == next(iter(arithmetic("train", 1, 5))).prompt
    check_training_rows("arithmetic", rows)


def test_gsm8k_train_row_by_row(data_dir: Path) -> None:
    source = jsonl(data_dir / "gsm8k_train.jsonl")
    rows = load_named(DataArguments("gsm8k", data_dir=str(data_dir)))
    assert len(rows) == 7473
    check_training_rows("gsm8k", rows)
    assert [prompt[1]["content"] for prompt in rows[:]["prompt"]] == [row["question"] for row in source]
    for row, answer, solution in zip(source, rows["answer"], rows["solution"], strict=True):
        text, gold = row["answer"].split("\n####")
        assert answer.replace(",", "") == gold.strip().replace(",", "")
        unmarked = "".join(part.split(">>")[-1] for part in text.split("<<"))  # without <<3*4=12>>
        assert solution.startswith(f"<reasoning>\n{unmarked.strip()}\n</reasoning>\n<answer>")


def last_box(solution: str) -> str:
    """Content of the last ``\\boxed``, counting braces one character at a time."""
    text = solution.rpartition("\\boxed")[2].lstrip()
    if text[0] != "{":
        return re.split(r"[$\s.,]", text)[0]
    depths = list(accumulate((char == "{") - (char == "}") for char in text))
    return text[1 : depths.index(0)].strip()


def test_math_train_row_by_row(data_dir: Path, caplog: LogCaptureFixture) -> None:
    source = jsonl(data_dir / "math_train.jsonl")
    rows = load_named(DataArguments("math", data_dir=str(data_dir)))
    assert (len(source), len(rows)) == (7500, 7498)
    assert "2 of 7500" in caplog.text  # dropped, with a warning
    empty = {"train/number_theory/7115.json", "train/number_theory/7117.json"}
    kept = [row for row in source if row["unique_id"] not in empty]
    check_training_rows("math", rows)
    assert [prompt[1]["content"] for prompt in rows[:]["prompt"]] == [row["problem"] for row in kept]
    assert rows["answer"][:] == [last_box(row["solution"]) for row in kept]
    assert all(row["solution"] in solution for row, solution in zip(kept, rows["solution"], strict=True))


@pytest.mark.parametrize(
    ("name", "size", "file"),
    [
        ("gsm8k", 1319, "gsm8k_test.jsonl"),
        ("math", 5000, "math_test.jsonl"),
        ("math500", 500, "math500_test.jsonl"),
        ("aime24", 30, "aime2024.jsonl"),
        ("aime25", 30, "aime2025.jsonl"),
        ("amc23", 40, "amc2023.jsonl"),
    ],
)
def test_benchmarks_are_complete_and_in_order(name: str, size: int, file: str, data_dir: Path) -> None:
    source = jsonl(data_dir / file)
    problems = load_benchmark(name, str(data_dir))
    assert len(problems) == size
    assert [problem.question for problem in problems] == [row.get("question") or row["problem"] for row in source]
    assert [problem.id for problem in problems] == [f"{name}/{number}" for number in range(size)]
    golds = [last_box(row["solution"]) if name == "math" else str(row["answer"]) for row in source]
    if name == "gsm8k":
        golds = [gold.rpartition("#### ")[2].replace(",", "") for gold in golds]
    assert [problem.gold for problem in problems] == golds


PLATINUM = {"question": "How many?", "answer": "2 * 4 = <<2*4=8>>8\n#### 8", "cleaning_status": "consensus"}
AIME_2026 = {"problem_idx": 1, "answer": 277, "problem": "Find $m+n$."}
HMMT = {"problem_idx": 1, "answer": "-\\frac{1}{21}", "problem_type": ["Algebra"], "problem": "Compute $x$."}


@pytest.mark.parametrize(
    ("name", "file", "row", "gold"),
    [
        ("gsm8k_platinum", "gsm8k_platinum_test.jsonl", PLATINUM, "8"),
        ("aime26", "aime2026.jsonl", AIME_2026, "277"),
        ("hmmt_feb26", "hmmt_feb2026.jsonl", HMMT, r"-\frac{1}{21}"),
    ],
)
def test_benchmarks_of_2026_have_the_columns_of_their_cards(
    name: str, file: str, row: dict[str, Any], gold: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / file, [row, row | {"answer": None}])  # the second one is dropped
    [problem] = load_benchmark(name, str(tmp_path))
    assert (problem.question, problem.gold) == (row.get("question") or row["problem"], gold)


# ---- downloads from the Hub ----


def test_math_is_downloaded_with_all_its_subjects(monkeypatch: MonkeyPatch) -> None:
    """Each of the seven subjects is a separate config; loading one of them gives a seventh of MATH."""
    configs = []

    def hub(hub_id: str, config: str, split: str) -> Dataset:
        assert (hub_id, split) == ("EleutherAI/hendrycks_math", "train")
        configs.append(config)
        return Dataset.from_dict({"problem": [f"{config}?"], "solution": [rf"\boxed{{{len(configs)}}}"]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert load_named(DataArguments("math"))["answer"][:] == list("1234567")
    assert configs == sorted({*configs})


# ---- invalid input ----

VALID_ROW = {"question": "1 + 2?", "answer": "It is <<1+2=3>>3.\n#### 3"}


def test_rows_without_a_readable_gold_are_dropped_and_counted(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    bad = [
        {"question": "No mark?", "answer": "It is 3."},
        {"question": "Nothing after the mark?", "answer": "It is 3.\n#### "},
        {"question": "No answer?", "answer": None},
        {"question": "No column?"},
        {"question": None, "answer": "#### 3"},
    ]
    write_lines(tmp_path / "gsm8k_train.jsonl", [VALID_ROW, *bad, VALID_ROW])
    rows = load_named(DataArguments("gsm8k", data_dir=str(tmp_path)))
    assert rows["answer"][:] == ["3", "3"] and "5 of 7" in caplog.text
    assert set(rows["solution"][:]) == {"<reasoning>\nIt is 3.\n</reasoning>\n<answer>\n3\n</answer>"}  # no <<1+2=3>>


def test_the_data_directory_is_that_of_the_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    given = tmp_path / "given"
    given.mkdir()
    write_lines(tmp_path / "gsm8k_train.jsonl", [VALID_ROW])
    write_lines(given / "gsm8k_train.jsonl", [VALID_ROW] * 2)
    monkeypatch.setenv("GTPO_DATA_DIR", str(tmp_path))
    assert len(load_named(DataArguments("gsm8k"))) == len(planned("gsm8k")) == 1
    assert len(load_named(DataArguments("gsm8k", data_dir=str(given)))) == 2  # --data_dir wins
    assert len(planned("gsm8k", data_dir=str(given))) == 2 and len(planned("gsm8k", data_dir=str(given), limit=1)) == 1
    for none in ("", None):  # empty is not set: a plan then knows how many rows the Hub has
        monkeypatch.delenv("GTPO_DATA_DIR") if none is None else monkeypatch.setenv("GTPO_DATA_DIR", none)
        assert len(planned("gsm8k")) == 7473 and len(planned("gsm8k", limit=5)) == 5


# ---- length ----


@pytest.mark.parametrize("flag", ["--max_prompt_length", "--max_length"])
def test_prompts_and_demonstrations_that_are_too_long_are_dropped(
    flag: str, tiny: Path, caplog: LogCaptureFixture
) -> None:
    """SFT would cut a demonstration."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = [[{"role": "user", "content": "1 " * count}] for count in (1, 2, 3)]
    answer = [{"role": "assistant", "content": "2"}]
    rows = Dataset.from_dict({"prompt": prompts, "completion": [answer] * 3})
    asks = flag == "--max_prompt_length"
    longest = prompts[1] if asks else prompts[1] + answer
    limit = len(tokenizer.apply_chat_template(longest, add_generation_prompt=asks)["input_ids"])
    data = DataArguments(max_prompt_length=limit) if asks else DataArguments()
    trainer = SimpleNamespace(max_length=None if asks else limit)
    settings = Settings("sft", data, ModelArguments(), RunArguments(), trainer)
    assert drop_long_prompts(rows, tokenizer, settings)["prompt"][:] == prompts[:2]
    what = "prompts" if asks else "prompts with their solution"
    assert f"1 of 3 {what} dropped: over {limit} tokens" in caplog.text
    tokenizer.chat_template += "{{ more }}"
    settings.prompt.chat_template_kwargs = {"more": "x"}
    assert drop_long_prompts(rows, tokenizer, settings)["prompt"][:] == prompts[:1]


def test_held_out_rows_that_are_too_long_are_dropped_too(
    tiny: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """Two of the training rows and two of the held-out ones; the first process alone looks at the rest."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = [[{"role": "user", "content": "1 " * count}] for count in (1, 9, 2, 9, 3)]
    longest = tokenizer.apply_chat_template(prompts[4], add_generation_prompt=True)["input_ids"]
    data = DataArguments(max_prompt_length=len(longest))
    settings = Settings("sft", data, ModelArguments(), RunArguments(), SimpleNamespace(max_length=None))
    rows = Dataset.from_dict({"prompt": prompts, "answer": ["1"] * 5})
    held_out = Dataset.from_dict({"prompt": prompts[::-1], "answer": ["1"] * 5})
    looked: list[Any] = []
    monkeypatch.setattr("gtpo.data.load.check_first_rows", lambda *given: looked.append(given))
    found = prepare_prompts(rows, held_out, tokenizer, settings)
    kept = [prompts[0], prompts[2], prompts[4]]
    assert [part["prompt"][:] for part in found] == [kept, kept[::-1]]
    assert caplog.text.count(f"2 of 5 prompts dropped: over {len(longest)} tokens (--max_prompt_length)") == 2
    [(_, seen, golds, prompt, scored)] = looked
    assert (seen[:], golds[:], prompt, scored) == (kept, ["1"] * 3, settings.prompt, ("format",))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = rows.remove_columns("answer")
    without, none = prepare_prompts(rows, None, tokenizer, settings)
    assert len(looked) == 1 and (len(without), none) == (3, None)
    monkeypatch.delenv("RANK")
    prepare_prompts(rows, None, tokenizer, settings)
    assert looked[1][2] == [None] * 3  # without answers
