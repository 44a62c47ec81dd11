"""User data and rewards: a JSONL file and a Python function, without changes to the project."""

import asyncio
from pathlib import Path

import pytest
from helpers.files import read_json, tables_of, write_lines
from helpers.parrot import build_parrot
from helpers.refusals import refused
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from trl.trainer.utils import get_callable_name, is_async_callable

from gtpo.arguments import DataArguments
from gtpo.data.load import load_own, load_user_benchmark, to_demonstrations
from gtpo.errors import RunError
from gtpo.grading.user_functions import checked_reward, load_rewards
from gtpo.prompts import PAPER
from rewards import accuracy_reward, format_reward, rewards_in

TABLES = tables_of(__file__)

pytestmark = pytest.mark.usefixtures("isolated_cache")

REWARD = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Pair:
    a: int

def short(completions, limit, **columns):
    return [float(len(str(completion)) < n) for completion, n in zip(completions, limit)]
"""
KNOWN = {"format": format_reward, "accuracy": accuracy_reward}


def write(path: Path, *rows: dict[str, object]) -> str:
    write_lines(path, rows)
    return str(path)


def test_a_column_missing_from_some_rows_drops_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"prompt": "a", "hint": "b"}, {"prompt": "c", "note": None})
    assert load_own(DataArguments(path), graded=False)["hint"][:] == ["b", None]


@pytest.mark.parametrize("name", ["my_rewards", "rewards", "json"])
def test_rewards_load_by_name_by_file_and_by_module(name: str, here: Path) -> None:
    """A module in the working directory takes precedence, and a file may be named like a module elsewhere."""
    (here / f"{name}.py").write_text(REWARD)
    for path in (f"{name}:short", f"{here}/{name}.py:short"):
        formatting, reward = load_rewards(["format", path], KNOWN, ["prompt", "answer", "limit"])
        assert formatting.function is format_reward
        assert get_callable_name(reward) == "short"  # TRL logs it under this name
        assert reward(["abc", "abcdef"], limit=[5, 5]) == [1.0, 0.0] == reward.returned


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("completions, limit, **columns", "'limit'"),
        ("completions, prompt, **columns", "'prompt'"),
        ("completions, prompts", "'answer'"),  # TRL passes more than these
    ],
)
def test_a_reward_takes_the_columns_when_it_is_loaded(arguments: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def mine({arguments}):\n    return []\n")
    with refused(rf"own\.py:mine .*{named}"):
        load_rewards([f"{tmp_path}/own.py:mine"], KNOWN, ["prompt", "answer"])


@pytest.mark.parametrize(("body", "named"), TABLES["what_a_reward_does_wrong_while_training_ends_in_a_sentence"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_reward_does_wrong_is_a_sentence(kind: str, body: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{kind} mine(completions, **columns):\n    {body}\n")
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], KNOWN, ["prompt"])
    assert is_async_callable(reward) == (kind == "async def")  # TRL awaits it then
    with pytest.raises(RunError, match=rf"own\.py:mine .*{named}"):
        asyncio.run(reward(completions=["a", "b"], prompts=["p", "p"], log_metric=print, log_extra=print))


def test_a_reward_of_nan_reaches_trl_as_infinity() -> None:
    """TRL takes NaN for None, and warns that every reward function returned None."""
    reward = checked_reward(lambda completions, **kwargs: [float("nan"), None, 1])
    assert reward(completions=["a", "b", "c"]) == [float("inf"), None, 1.0]
    assert str(reward.returned) == "[nan, None, 1.0]"


def test_what_a_reward_logs_reaches_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def mine(completions, log_metric, log_extra, **columns):\n"
        "    log_metric('n', 1)\n"
        "    log_extra('upper', [text.upper() for text in completions])\n"
        "    return [0] * len(completions)\n"
    )
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], KNOWN, ["prompt"])
    logged: dict[str, object] = {}
    values = reward(completions=["a", "b"], log_metric=logged.__setitem__, log_extra=logged.__setitem__)
    assert values == [0.0, 0.0] and logged == {"n": 1, "upper": ["A", "B"]}


def test_two_rewards_of_one_name_are_refused(tmp_path: Path) -> None:
    """Metrics and the table of completions have one column for each name."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def f(completions, **columns): ...\n")
    with refused("--reward"):
        load_rewards([f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f"], KNOWN, ["prompt"])


def test_a_column_replaces_no_bound_argument() -> None:
    rewards = load_rewards(["format"], rewards_in(PAPER), ["prompt", "prompt_format"])
    good = "<reasoning>a</reasoning><answer>b</answer>"
    assert [reward(completions=[good], prompt_format=["x"]) for reward in rewards] == [[10.0]]


THINK = "<think> </think> <answer> </answer>"


@pytest.mark.slow
def test_csv_files_think_tags_and_no_system_prompt(tiny: Path, run_script: RunScript, tmp_path: Path) -> None:
    """The commands of the README: training on one file, evaluation on another with what the run has stored."""
    build_parrot(tiny, tmp_path / "parrot", "<think>\n3 + 4 = 7\n</think>\n<answer>\n7\n</answer>")
    (tmp_path / "my_train.csv").write_text("task,gold\n" + "".join(f"What is {i} + {7 - i}?,7\n" for i in range(8)))
    (tmp_path / "my_test.csv").write_text('task,gold\n"Three, and four?",7\nFive and four?,9\n')
    columns = ("--prompt_column", "task", "--answer_column", "gold")
    prompts = ("--tags", THINK, "--system_prompt", "none")
    flags = ("--G", "4", "--max_completion_length", "12", "--max_steps", "2")
    data = ("--model", "parrot", "--dataset", "my_train.csv", "--prompts_per_step", "1", "--output_dir", "run")
    run_script(tmp_path, "train_gtpo.py", *data, *columns, *prompts, *flags, "--initial_entropy", "0.5")
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == 2 and all(row["formatting"] == row["accuracy"] > 0 for row in metrics)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<b>user</b>" in report and "<b>system</b>" not in report
    assert "&lt;think&gt;" in report and "reasoning&gt;" not in report

    asked = ("--benchmarks", "my_test.csv", *columns, "--k", "8", "--max_new_tokens", "12", "--runs", "run")
    run_script(tmp_path, "evaluate.py", *asked)
    [scores] = (tmp_path / "outputs" / "evaluation").glob("**/run*/my_test.json")
    entry = read_json(scores)
    assert (entry["settings"]["tags"], entry["settings"]["system_prompt"]) == (THINK, "none")
    first, second = entry["per_problem"]
    assert first["c"] == first["formatted"] > 0 and second["c"] == 0 < second["formatted"]


# ---- the formats of chats, and lists of answers ----

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
ANSWERED = [*TURNS, {"role": "assistant", "content": "It is 2."}]


def test_a_conversation_with_its_answer_trains_sft_alone(tmp_path: Path) -> None:
    data = DataArguments(write(tmp_path / "own.jsonl", {"messages": ANSWERED, "answer": "2"}), prompt_column="messages")
    with refused(r"line 1 of .*assistant"):
        load_own(data)
    with refused("assistant"):
        load_user_benchmark("own", data.dataset, data)
    (row,) = to_demonstrations(load_own(data, for_sft=True))
    assert row == {"prompt": TURNS, "completion": [{"role": "assistant", "content": "It is 2."}]}
