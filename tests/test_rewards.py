"""The rewards: tables of completions, each with the reason for its score."""

import re

import pytest
from helpers.files import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo.prompts import TAGS
from rewards import ACCURACY_MAX, accuracy_reward, format_reward, score_format

TABLES = tables_of(__file__)

GOOD = "<reasoning>9 + 9 = 18</reasoning>\n<answer>18</answer>"


@pytest.mark.parametrize(("text", "score", "reason"), TABLES["format"])
def test_format(text: str, score: float, reason: str) -> None:
    assert score_format(text) == score, reason


@pytest.mark.parametrize(("text", "gold", "correct", "reason"), TABLES["accuracy"])
def test_accuracy(text: str, gold: str, correct: bool, reason: str) -> None:
    assert accuracy_reward([text], answer=[gold]) == [ACCURACY_MAX if correct else 0.0], reason


def test_conversations_are_scored_by_their_text() -> None:
    conversation = [{"role": "assistant", "content": GOOD}]
    assert format_reward([conversation, [{"role": "assistant", "content": None}], []]) == [10.0, 0.0, 0.0]
    assert accuracy_reward([conversation], answer=["18"]) == [10.0]


def test_each_completion_is_compared_with_its_gold_answer() -> None:
    assert accuracy_reward([GOOD, GOOD, GOOD], answer=["18", "17", "18.0"]) == [10.0, 0.0, 10.0]
    with pytest.raises(ValueError, match="shorter"):
        accuracy_reward([GOOD, GOOD], answer=["18"])


def reference_format(text: str) -> float:
    """Section 8.2 by the sequence of tags in a text."""
    found = re.findall("</?(?:reasoning|answer)>", text)
    if not found:
        return 0.0
    return 10.0 if found == [*TAGS] and text.rstrip().endswith("</answer>") else 1.0


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.sampled_from([*TAGS, " ", "\n", "18", "x", "<", ">", "</"]), st.text(max_size=3)), max_size=9)
)
def test_format_of_random_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert format_reward([text]) == [reference_format(text)]


def test_rewards_are_logged_in_percent() -> None:
    logged: dict[str, float] = {}
    texts = [
        GOOD,
        "<reasoning>\n</reasoning>\n<answer>\n18\n</answer>",  # no reasoning
        "<reasoning>9</reasoning>\n<answer> </answer>",  # no answer
        "<reasoning></reasoning>",  # not in the format
        "18",
    ]
    format_reward(texts, log_metric=logged.__setitem__)  # 10, 10, 10, 1, 0
    accuracy_reward(texts, answer=["18"] * 5, log_metric=logged.__setitem__)
    assert logged.pop("formatting") == 62.0 and logged.pop("empty_blocks") == 40.0
    assert logged == {"accuracy": 40.0, "accuracy_lenient": 60.0, "grader_timeouts": 0.0}
