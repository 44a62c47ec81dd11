"""A reward that raises: file and line in the message, Python's traceback above it, and no step lost."""

import inspect
import os
import posix
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from helpers.weights import adapter_of, same_weights

from gtpo.errors import RunError, UsageError
from gtpo.grading.user_functions import checked_reward, load_rewards
from gtpo.runs.directory import RunDirectory, find_weights

REWARD = """
from pathlib import Path
calls = []

def late(completions, answer, **columns):
    calls.append(1)
    return [score(text[0]["content"], gold) for text, gold in zip(completions, answer)]

def score(text, gold):
    if len(calls) > 3 and Path("odd").exists():
        raise KeyError("weird row")
    return float(len(text) % 7)
"""
TRAIN = ["--model", "tiny", "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_steps", "6"]
TRAIN += ["--limit", "100", "--max_completion_length", "8", "--initial_entropy", "0.5", "--report_to", "none"]
TRAIN += ["--reward", "format", "accuracy", "rw.py:late"]


def test_a_reward_that_raises_loses_no_step(tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "rw.py").write_text(REWARD)
    (tmp_path / "odd").touch()
    ended = run_script(tmp_path, "train_gtpo.py", *TRAIN, "--output_dir", "outputs/late", code=1)
    *above, last = ended.stderr.splitlines()
    assert above[-1] == "KeyError: 'weird row'" and '    raise KeyError("weird row")' in above
    assert "the reward rw.py:late raised KeyError: 'weird row' (rw.py, line 11)" in last
    assert (tmp_path / "outputs/late/checkpoint-3/files.json").is_file()

    (tmp_path / "odd").unlink()
    (arguments,) = re.findall(r"python \S*train_gtpo\.py (--resume outputs/late.*?)\.$", last)
    run_script(tmp_path, "train_gtpo.py", *arguments.split())
    run_script(tmp_path, "train_gtpo.py", *TRAIN, "--output_dir", "outputs/whole")
    late, whole = (metrics_of(tmp_path / f"outputs/{run}") for run in ("late", "whole"))
    assert [row["loss"] for row in late[:3]] == [row["loss"] for row in whole[:3]] and len(late) == 6


ENDS = """
import os

def late(completions, trainer_state, **columns):
    if trainer_state.global_step == 3 and os.path.exists("odd"):
        os._exit(0)
    return [float(len(text[0]["content"]) % 7) for text in completions]
"""


def test_a_reward_that_ends_the_process_leaves_an_unfinished_run(tmp_path: Path, run_script: RunScript) -> None:
    """No code of Python sees it, so its exit code is that of the reward; nothing takes the run for a finished one."""
    (tmp_path / "rw.py").write_text(ENDS)
    (tmp_path / "odd").touch()
    flags = [*TRAIN, "--save_steps", "2", "--output_dir"]
    ended = run_script(tmp_path, "train_grpo.py", *without_entropy(flags), "outputs/cut", code=0)
    run = RunDirectory(tmp_path / "outputs/cut")
    assert "final weights" not in ended.stdout + ended.stderr and not run.is_finished
    with pytest.raises(UsageError, match=r"is not finished: `--resume` it, or take `--checkpoint 2`"):
        find_weights(run.path)
    (tmp_path / "odd").unlink()
    resume = ["--resume", "outputs/cut", "--reward", "format", "accuracy", "rw.py:late"]
    run_script(tmp_path, "train_grpo.py", *resume)
    run_script(tmp_path, "train_grpo.py", *without_entropy(flags), "outputs/whole")
    assert same_weights(adapter_of(run.adapter), adapter_of(tmp_path / "outputs/whole/adapter"))


def without_entropy(flags: list[str]) -> list[str]:
    place = flags.index("--initial_entropy")
    return flags[:place] + flags[place + 2 :]


def test_no_function_of_the_interpreter_is_replaced() -> None:
    """A program that imports the trainer keeps those of the system, ``os._exit`` among them."""
    from gtpo import GTPOTrainer

    assert GTPOTrainer.__module__.startswith("gtpo.")
    of_posix = {name for name, value in vars(posix).items() if inspect.isbuiltin(value) and hasattr(os, name)}
    assert "_exit" in of_posix and len(of_posix) > 100
    assert {name for name in of_posix if getattr(os, name) is not getattr(posix, name)} == set()
    assert [name for name, value in vars(os).items() if getattr(value, "__module__", "").startswith("gtpo")] == []


def test_the_message_names_the_line(tmp_path: Path) -> None:
    """Of the user's file, not of what it calls."""
    body = "import json\n    return [json.loads(text) for text in completions]"
    (tmp_path / "own.py").write_text(f"\n\ndef mine(completions, **columns):\n    {body}\n")
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], {}, [])
    with pytest.raises(RunError, match=r"\(own\.py, line 5\)\.$") as caught:
        reward(completions=["a", "b"])
    assert isinstance(caught.value.__cause__, ValueError)
    reward.defers = True
    assert reward(completions=["a", "b"]) == [0.0, 0.0] and "own.py:mine raised" in str(reward.failure)


def test_a_reward_with_own_keywords_gets_every_column() -> None:
    def count(completions: Any, answer: Any) -> Any:
        return [float(len(answer))]

    count.keywords = ["answer"]  # type: ignore[attr-defined]  # of the user, not of a functools.partial
    assert checked_reward(count)(completions=["so 3"], answer=["3"]) == [1.0]
