"""A reward that raises: file and line in the message, the traceback in a log, and no step lost."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from helpers.weights import adapter_of, same_weights

from gtpo.errors import RunError
from gtpo.grading.user_functions import OF_RUNS, OF_RUNS_BEGIN, checked_reward, load_rewards
from gtpo.prompts import PAPER
from rewards import rewards_in

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
TRAIN += ["--max_completion_length", "8", "--initial_entropy", "0.5", "--report_to", "none"]
TRAIN += ["--reward", "format", "accuracy", "rw.py:late"]


def test_a_reward_that_raises_loses_no_step(tmp_path: Path, run_script: RunScript) -> None:
    """Every metric of the run has a name that is reserved, too."""
    (tmp_path / "rw.py").write_text(REWARD)
    (tmp_path / "odd").touch()
    ended = run_script(tmp_path, "train_gtpo.py", *TRAIN, "--output_dir", "outputs/late", code=1)
    last = ended.stderr.splitlines()[-1]
    assert re.search(r"the reward rw\.py:late raised KeyError: 'weird row' \(rw\.py, line 11\)", last), last
    assert "--resume outputs/late" in last
    log = re.search(r"(\S+\.log) has the traceback", last)
    assert log and 'raise KeyError("weird row")' in Path(log[1]).read_text()
    assert (tmp_path / "outputs/late/checkpoint-3/files.json").is_file()

    (tmp_path / "odd").unlink()
    command = re.search(r"python (train_gtpo\.py|\S+/train_gtpo\.py) (--resume .*?)\. /", last)
    assert command
    run_script(tmp_path, "train_gtpo.py", *command[2].split())
    run_script(tmp_path, "train_gtpo.py", *TRAIN, "--output_dir", "outputs/whole")
    assert same_weights(*(adapter_of(tmp_path / f"outputs/{run}/adapter") for run in ("late", "whole")))
    names = set(metrics_of(tmp_path / "outputs/whole")[0])
    assert len(names) > 25
    assert not [name for name in names - set(OF_RUNS["log_metric"]) if not name.startswith(OF_RUNS_BEGIN)]


# Body of a reward of two completions -> the line in the message.
PLACES = {
    "return [1 / (text == 'a') for text in completions]": 4,
    "import json\n    return [json.loads(text) for text in completions]": 5,
    "if len(completions) > 1:\n        raise OSError('busy')\n    return [1.0]": 5,
}


@pytest.mark.parametrize(("body", "line"), PLACES.items())
def test_the_message_names_the_line(body: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"\n\ndef mine(completions, **columns):\n    {body}\n")
    (reward,) = load_rewards([f"{tmp_path}/own.py:mine"], {}, [])
    with pytest.raises(RunError, match=rf"\(own\.py, line {line}\)\.$") as caught:
        reward(completions=["a", "b"])
    assert caught.value.__cause__ is not None
    reward.defers = True
    assert reward(completions=["a", "b"]) == [0.0, 0.0] and "own.py:mine raised" in str(reward.failure)


def test_a_reward_changes_its_own_copy_of_the_rows() -> None:
    def mutate(completions: Any, answer: Any, **_: Any) -> list[float]:
        for i, completion in enumerate(completions):
            completion[0]["content"] = "gone"
            answer[i] = "gone"
        return [1.0] * len(completions)

    text = "<reasoning>a</reasoning><answer>3</answer>"
    rows = {"completions": [[{"role": "assistant", "content": text}]], "answer": ["3"], "prompts": ["p"]}
    rewards = [checked_reward(mutate), *load_rewards(["accuracy"], rewards_in(PAPER), [])]
    assert [reward(**rows) for reward in rewards] == [[1.0], [10.0]]
    assert rows["completions"][0][0]["content"] == text and rows["answer"] == ["3"]


def test_a_reward_with_own_keywords_gets_every_column() -> None:
    def words(completions: list[str], answer: list[str]) -> list[float]:
        return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]

    words.keywords = ["answer"]  # type: ignore[attr-defined]  # of the user, not of a functools.partial
    assert checked_reward(words)(completions=["so 3"], answer=["3"]) == [1.0]


def test_the_rewards_of_the_paper_may_log_their_names(tmp_path: Path) -> None:
    logged: dict[str, float] = {}
    for reward in load_rewards(["format", "accuracy"], rewards_in(PAPER), []):
        reward(completions=["<answer>3</answer>"], answer=["3"], log_metric=logged.__setitem__)
        assert set(reward.function.metrics) <= set(OF_RUNS["log_metric"])
    assert set(logged) == {"formatting", "empty_blocks", "accuracy", "accuracy_lenient", "grader_timeouts"}
