"""The rewards: tables of completions, each with the reason for its score."""

import pytest
from helpers.files import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo.prompts import TAGS
from rewards import ACCURACY_MAX, accuracy_reward, format_reward, score_format

TABLES = tables_of(__file__)

GOOD = "<reasoning>9 + 9 = 18</reasoning>\n<answer>18</answer>"


@pytest.mark.parametrize(
    ("text", "score", "reason"),
    TABLES["format"],
)
def test_format(text: str, score: float, reason: str) -> None:
    assert score_format(text) == score, reason


@pytest.mark.parametrize(
    ("text", "gold", "correct", "reason"),
    TABLES["accuracy"],
)
def test_accuracy(text: str, gold: str, correct: bool, reason: str) -> None:
    assert accuracy_reward([text], answer=[gold]) == [ACCURACY_MAX if correct else 0.0], reason


def test_conversations_are_scored_by_their_text() -> None:
    conversation = [{"role": "assistant", "content": GOOD}]
    assert format_reward([conversation, GOOD]) == [10.0, 10.0]
    assert accuracy_reward([conversation, GOOD], answer=["18", "18"]) == [10.0, 10.0]
    assert format_reward([[{"role": "assistant", "content": None}], []]) == [0.0, 0.0]


def test_each_completion_is_compared_with_its_gold_answer() -> None:
    assert accuracy_reward([GOOD, GOOD, GOOD], answer=["18", "17", "18.0"]) == [10.0, 0.0, 10.0]
    with pytest.raises(ValueError, match="shorter"):
        accuracy_reward([GOOD, GOOD], answer=["18"])


def reference_format(text: str) -> float:
    """Section 8.2 by scanning the text for tags, sharing no code with rewards.py."""
    found = []
    rest = text
    while rest:
        tag = next((tag for tag in TAGS if rest.startswith(tag)), None)
        if tag:
            found.append(tag)
        rest = rest[len(tag) :] if tag else rest[1:]
    if not found:
        return 0.0
    return 10.0 if tuple(found) == TAGS and not text.split("</answer>")[1].strip() else 1.0


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.sampled_from([*TAGS, " ", "\n", "18", "x", "<", ">", "</"]), st.text(max_size=3)), max_size=9)
)
def test_format_of_random_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert score_format(text) == reference_format(text)
    assert format_reward([text]) == [score_format(text)]


def test_rewards_are_logged_in_percent() -> None:
    logged: dict[str, float] = {}
    good = "<reasoning>9 + 9 = 18</reasoning>\n<answer>18</answer>"
    format_reward([good, "<answer>18</answer>", "18", ""], log_metric=logged.__setitem__)  # 10, 1, 0, 0
    accuracy_reward([good, "<answer>18</answer>", "18", good], answer=["18"] * 4, log_metric=logged.__setitem__)
    assert logged.pop("empty_blocks") == 0.0
    assert logged == {"formatting": 27.5, "accuracy": 75.0, "accuracy_lenient": 100.0, "grader_timeouts": 0.0}


def test_empty_blocks_are_those_of_completions_in_the_format() -> None:
    logged: dict[str, float] = {}
    texts = [
        "<reasoning>\n</reasoning>\n<answer>\n18\n</answer>",  # no reasoning
        "<reasoning>9</reasoning>\n<answer> </answer>",  # no answer
        "<reasoning>9</reasoning>\n<answer>18</answer>",
        "<reasoning></reasoning>",  # not in the format
    ]
    format_reward(texts, log_metric=logged.__setitem__)
    assert logged["empty_blocks"] == 50.0
