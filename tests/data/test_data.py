"""Training data and benchmarks: generated arithmetic, and the real files row by row."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from helpers.files import write_lines
from helpers.refusals import refused
from transformers import AutoTokenizer

from gtpo.arguments import DataArguments, ModelArguments, RunArguments, Settings
from gtpo.data.arithmetic import arithmetic
from gtpo.data.load import (
    ARITHMETIC_TEST_ROWS,
    ARITHMETIC_TRAIN_ROWS,
    SOURCES,
    drop_long_prompts,
    load_benchmark,
    load_train,
    to_demonstrations,
)
from gtpo.prompts import SYSTEM_PROMPT
from rewards import accuracy_reward, format_reward

pytestmark = pytest.mark.usefixtures("isolated_cache")


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


# ---- arithmetic ----

STORY = re.compile(
    r"(?P<who>\w+) has (?P<start>\d+) (?P<what>\w+)\.(?P<steps>(?: (?P=who) .*?\.)*)"
    r" How many (?P=what) does (?P=who) have\?"
)


def result_of_story(question: str) -> tuple[int, int]:
    """(result, number of steps), parsed from the text of the question only."""
    match = STORY.fullmatch(question)
    assert match, question
    total = int(match["start"])
    steps = match["steps"].split(".")[:-1]
    for step in steps:
        number = int(re.findall(r"\d+", step)[0])
        if "finds" in step:
            total += number
        elif "gives away" in step:
            total -= number
        else:
            assert "times as many" in step
            total *= number
    return total, len(steps)


@pytest.mark.parametrize(("split", "seed"), [("train", 0), ("train", 7), ("test", 0)])
def test_arithmetic_gold_is_the_result_of_question_and_reasoning(split: str, seed: int) -> None:
    seen_steps = set()
    for row in arithmetic(split, 1500, seed):
        expected, steps = result_of_story(row["question"])
        assert int(row["gold"]) == expected > 0
        chain = [re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", line) for line in row["reasoning"].split("\n")]
        value = row["question"].split()[2]
        for step in chain:
            assert step and step[1] == value, row  # continues from the previous result
            a = int(step[1])
            b = int(step[3])
            assert int(step[4]) == {"+": a + b, "-": a - b, "*": a * b}[step[2]]
            value = step[4]
        assert value == row["gold"] and len(chain) == steps
        seen_steps.add(steps)
    assert seen_steps == {1, 2, 3}


def test_arithmetic_depends_only_on_the_seed() -> None:
    first = list(arithmetic("train", 300, seed=3))
    assert first == list(arithmetic("train", 300, seed=3))
    assert first != list(arithmetic("train", 300, seed=4))
    assert first[:100] == list(arithmetic("train", 100, seed=3))  # a longer list starts with the shorter one


def test_arithmetic_train_and_test_are_disjoint_for_any_seed() -> None:
    test = {row["question"] for seed in (0, 1) for row in arithmetic("test", 500, seed)}
    for seed in (0, 1, 42, 3407):
        train = [row["question"] for row in arithmetic("train", 4000, seed)]
        assert len(set(train)) == len(train) == 4000
        assert not test & set(train)


@pytest.mark.parametrize(("held_out", "flag"), [(False, "--dataset"), (True, "--eval_dataset")])
def test_an_unknown_dataset_is_refused_by_its_flag(held_out: bool, flag: str) -> None:
    with refused(f"{flag} 'gsm' is unknown"):
        load_train(DataArguments("gsm"), held_out=held_out)


def test_arithmetic_as_a_dataset() -> None:
    rows = load_train(DataArguments("arithmetic"), seed=5)
    assert len(rows) == ARITHMETIC_TRAIN_ROWS == 4000
    assert rows["prompt"][0][1]["content"] == next(iter(arithmetic("train", 1, 5)))["question"]
    problems = load_benchmark("arithmetic")
    assert len(problems) == ARITHMETIC_TEST_ROWS == 500
    assert not {problem.question for problem in problems} & {prompt[1]["content"] for prompt in rows["prompt"]}


# ---- format of a training row ----


def assert_rows_are_training_rows(rows: Dataset) -> None:
    assert set(rows.column_names) == {"prompt", "answer", "solution"}
    for prompt, answer, solution in zip(rows["prompt"], rows["answer"], rows["solution"], strict=True):
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert prompt[0]["content"] == SYSTEM_PROMPT and prompt[1]["content"]
        assert isinstance(answer, str) and answer.strip() == answer != ""
        assert solution.startswith("<reasoning>\n") and solution.endswith(f"\n<answer>\n{answer}\n</answer>")


def assert_maximum_reward(rows: Dataset) -> None:
    """Every reference solution scores 10 + 10: SFT trains on completions that earn the maximum reward."""
    solutions = list(rows["solution"])
    format_scores = format_reward(solutions)
    accuracy_scores = accuracy_reward(solutions, list(rows["answer"]))
    wrong = [i for i, scores in enumerate(zip(format_scores, accuracy_scores, strict=True)) if scores != (10.0, 10.0)]
    assert not wrong, [(rows["answer"][i], solutions[i][-200:]) for i in wrong[:3]]


def test_hard_arithmetic_has_more_steps_and_is_held_out() -> None:
    """Four and five steps; training has at most three. No problem is in the training set or the other benchmark."""
    problems = load_benchmark("arithmetic_hard")
    assert len(problems) == 500 and problems[0].id == "arithmetic_hard/0"
    solved = [result_of_story(problem.question) for problem in problems]
    assert [str(total) for total, _ in solved] == [problem.gold for problem in problems]
    assert {steps for _, steps in solved} == {4, 5}
    questions = {problem.question for problem in problems}
    assert len(questions) == 500
    assert not questions & {problem.question for problem in load_benchmark("arithmetic")}
    assert not questions & {row["question"] for seed in range(3) for row in arithmetic("train", 4000, seed)}


def test_arithmetic_solutions_earn_the_maximum_reward() -> None:
    rows = load_train(DataArguments("arithmetic"))
    assert_rows_are_training_rows(rows)
    assert_maximum_reward(rows)


# ---- GSM8K and MATH from the real files ----


def without_calculator_marks(text: str) -> str:
    """Remove ``<<3*4=12>>`` with str.find, sharing no code with data.py."""
    while (start := text.find("<<")) >= 0:
        text = text[:start] + text[text.index(">>", start) + 2 :]
    return text


def test_gsm8k_train_row_by_row(data_dir: Path) -> None:
    source = jsonl(data_dir / "gsm8k_train.jsonl")
    rows = load_train(DataArguments("gsm8k", data_dir=str(data_dir)))
    assert len(rows) == len(source) == 7473
    assert_rows_are_training_rows(rows)
    golds = [row["answer"].split("#### ")[-1].strip() for row in source]
    assert sum("," in gold for gold in golds) > 50  # thousands separators occur
    assert [answer.replace(",", "") for answer in rows["answer"]] == [gold.replace(",", "") for gold in golds]
    assert [prompt[1]["content"] for prompt in rows["prompt"]] == [row["question"] for row in source]
    for row, solution in zip(source, rows["solution"], strict=True):
        assert "<<" not in solution and ">>" not in solution and "####" not in solution
        reasoning = without_calculator_marks(row["answer"].split("\n####")[0]).strip()
        assert solution.startswith(f"<reasoning>\n{reasoning}\n</reasoning>\n")
    assert_maximum_reward(rows)


def matched_boxes(solution: str) -> list[str]:
    """Contents of all ``\\boxed``, counting braces one character at a time."""
    boxes = []
    for piece in solution.split("\\boxed")[1:]:
        piece = piece.lstrip()
        if piece[0] != "{":
            boxes.append(piece[: re.search(r"[$\s.,]", piece).start()])  # type: ignore[union-attr]
            continue
        depth = 0
        for place, char in enumerate(piece):
            depth += (char == "{") - (char == "}")
            if depth == 0:
                boxes.append(piece[1:place].strip())
                break
    return boxes


def test_math_train_row_by_row(data_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = jsonl(data_dir / "math_train.jsonl")
    rows = load_train(DataArguments("math", data_dir=str(data_dir)))
    assert (len(source), len(rows)) == (7500, 7498)
    assert "2 of 7500" in caplog.text  # dropped, with a warning
    empty = {"train/number_theory/7115.json", "train/number_theory/7117.json"}
    kept = [row for row in source if row["unique_id"] not in empty]
    assert_rows_are_training_rows(rows)
    assert [prompt[1]["content"] for prompt in rows["prompt"]] == [row["problem"] for row in kept]
    golds = [matched_boxes(row["solution"])[-1] for row in kept]
    assert rows["answer"][:] == golds
    assert sum("{" in gold and "}" in gold for gold in golds) == 1726  # nested braces, as counted in the data's notes
    assert all(row["solution"] in solution for row, solution in zip(kept, rows["solution"], strict=True))
    assert_maximum_reward(rows)


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
    assert len(problems) == len(source) == size
    assert [problem.question for problem in problems] == [row.get("question") or row["problem"] for row in source]
    assert len({problem.id for problem in problems}) == size
    assert all(isinstance(problem.gold, str) and problem.gold.strip() for problem in problems)
    if name.startswith(("aime", "amc")):
        assert [int(problem.gold) for problem in problems] == [int(row["answer"]) for row in source]
    if name.startswith("aime"):
        assert all(0 <= int(problem.gold) <= 999 for problem in problems)
    if name == "math500":
        assert [problem.gold for problem in problems] == [row["answer"] for row in source]
    if name == "math":
        assert [problem.gold for problem in problems] == [matched_boxes(row["solution"])[-1] for row in source]


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
    name: str, file: str, row: dict[str, Any], gold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row] * SOURCES[f"test/{name}"].rows
    write_lines(tmp_path / file, rows)
    problems = load_benchmark(name, str(tmp_path))
    assert {(problem.question, problem.gold) for problem in problems} == {(row.get("question") or row["problem"], gold)}
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: asked.append((a, k)) or Dataset.from_list(rows))
    assert [problem.gold for problem in load_benchmark(name)] == [gold] * len(rows)
    assert asked[0][0][0] == SOURCES[f"test/{name}"].hub_id


# ---- downloads from the Hub ----


def test_math_is_downloaded_with_all_its_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the seven subjects is a separate config; loading one of them gives a seventh of MATH."""
    requested = []

    def hub(hub_id: str, config: str, split: str) -> Dataset:
        requested.append((hub_id, config, split))
        return Dataset.from_dict({"problem": [f"{config}?"], "solution": [rf"\boxed{{{len(requested)}}}"]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    rows = load_train(DataArguments("math"))
    assert rows["answer"][:] == list("1234567")
    assert {hub_id for hub_id, _, _ in requested} == {"EleutherAI/hendrycks_math"} and {s for *_, s in requested} == {
        "train"
    }
    assert [config for _, config, _ in requested] == sorted({config for _, config, _ in requested})


# ---- invalid input ----

VALID_ROW = json.dumps({"question": "1 + 2?", "answer": "It is <<1+2=3>>3.\n#### 3"})


@pytest.mark.parametrize(
    "row",
    [
        {"question": "No mark?", "answer": "It is 3."},
        {"question": "Nothing after the mark?", "answer": "It is 3.\n#### "},
        {"question": "No answer?", "answer": None},
        {"question": "No column?"},
        {"question": None, "answer": "#### 3"},
    ],
    ids=["no-mark", "nothing-after-mark", "null-answer", "column-missing-in-row", "null-question"],
)
def test_row_without_a_readable_gold_is_dropped_and_counted(
    row: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text(f"{VALID_ROW}\n{json.dumps(row)}\n{VALID_ROW}\n")
    rows = load_train(DataArguments("gsm8k", data_dir=str(tmp_path)))
    assert rows["answer"][:] == ["3", "3"] and "1 of 3" in caplog.text
    assert set(rows["solution"][:]) == {"<reasoning>\nIt is 3.\n</reasoning>\n<answer>\n3\n</answer>"}  # no <<1+2=3>>


def test_the_data_directory_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text(f"{VALID_ROW}\n")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "gsm8k_train.jsonl").write_text(f"{VALID_ROW}\n" * 2)
    monkeypatch.setenv("GTPO_DATA_DIR", str(tmp_path))
    assert len(load_train(DataArguments("gsm8k"))) == len(load_train(DataArguments("gsm8k"), dry_run=True)) == 1
    assert len(load_train(DataArguments("gsm8k", data_dir=str(tmp_path / "given")))) == 2  # --data_dir wins


def test_benchmark_row_without_an_answer_is_dropped(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "033"}, {"problem": "q", "answer": None}]
    write_lines(tmp_path / "aime2024.jsonl", rows)
    assert [problem.gold for problem in load_benchmark("aime24", str(tmp_path))] == ["033"]


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n')
    assert len(load_train(DataArguments(str(tmp_path / "own.jsonl")))) == 1


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_a_dry_run_counts_rows_without_the_hub(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)  # not called
    planned = load_train(DataArguments(name), dry_run=True)
    rows = load_train(DataArguments(name, data_dir=str(data_dir)), dry_run=True)
    assert (len(planned), set(planned.column_names)) == (len(rows), set(rows.column_names))


# ---- prompt length ----


def up_to(max_prompt_length: int) -> Settings:
    data = DataArguments(max_prompt_length=max_prompt_length)
    return Settings("gtpo", data, ModelArguments(), RunArguments(), trainer=None)


def test_long_prompts_are_dropped_and_counted(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = load_train(DataArguments("arithmetic")).select(range(60))
    lengths = [
        len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)["input_ids"])
        for prompt in rows["prompt"]
    ]
    limit = sorted(lengths)[30]
    expected = [prompt for prompt, length in zip(rows["prompt"], lengths, strict=True) if length <= limit]
    assert 0 < len(expected) < 60 and limit in lengths  # a prompt of exactly the limit is kept
    kept = drop_long_prompts(rows, tokenizer, up_to(limit))
    assert kept["prompt"][:] == expected
    assert f"{60 - len(expected)} of 60 prompts" in caplog.text
    settings = up_to(max(lengths))
    assert len(drop_long_prompts(rows, tokenizer, settings)) == 60
    tokenizer.chat_template += "{{ more }}"
    settings.prompt.chat_template_kwargs = {"more": "a few words"}
    assert len(drop_long_prompts(rows, tokenizer, settings)) < 60


def test_demonstrations_that_sft_would_cut_are_dropped_and_counted(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = to_demonstrations(load_train(DataArguments("arithmetic")).select(range(60)))
    whole = [
        len(tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=True)["input_ids"])
        for row in rows
    ]
    limit = sorted(whole)[30]
    settings = up_to(4000)
    settings.trainer = SimpleNamespace(max_length=limit)
    kept = drop_long_prompts(rows, tokenizer, settings)
    expected = [row["prompt"] for row, length in zip(rows, whole, strict=True) if length <= limit]
    assert kept["prompt"][:] == expected and 0 < len(expected) < 60
    assert f"{60 - len(expected)} of 60 prompts with their solution dropped: over {limit} tokens" in caplog.text
    settings.trainer.max_length = None
    assert len(drop_long_prompts(rows, tokenizer, settings)) == 60


def test_training_rows_are_not_in_the_benchmarks(data_dir: Path) -> None:
    for name in ("gsm8k", "math"):
        train = {prompt[1]["content"] for prompt in load_train(DataArguments(name, data_dir=str(data_dir)))["prompt"]}
        test = [problem.question for problem in load_benchmark(name, str(data_dir))]
        assert sum(question in train for question in test) <= 3, name  # MATH itself repeats a few
