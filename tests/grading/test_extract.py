"""Reading the answer of a completion and the gold answer of a GSM8K solution."""

import pytest

from gtpo.grading import extract_answer, gsm8k_gold


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("<answer>18</answer>", "18", "one block"),
        ("<answer>\n 18 \n</answer>", "18", "white space is stripped"),
        ("18", None, "no tags"),
        ("<answer>18", None, "no closing tag"),
        ("18</answer>", None, "no opening tag"),
        ("<answer></answer>", None, "empty"),
        ("<answer> \n</answer>", None, "blank"),
        ("<answer>18</answer> <answer>20", "18", "the last complete block counts"),
        ("<answer>18</answer><answer>18.0</answer>", "18.0", "blocks that agree"),
        ("<answer>18</answer><answer>20</answer>", None, "blocks that disagree"),
        ("<answer>20</answer><answer>18</answer>", None, "blocks that disagree, in the other order"),
        ("<answer>18</answer><answer></answer>", None, "an empty block disagrees"),
        ("<answer>18</answer>" * 3 + "<answer>20</answer>", None, "one of many disagrees"),
        ("write it in <answer> tags: <answer>18</answer>", "18", "a block starts at the last opening tag"),
        ("<answer>18</answer></answer>", "18", "an extra closing tag"),
        ("</answer><answer>18</answer>", "18", "an extra closing tag before the block"),
        ("<reasoning><answer>18</answer></reasoning>", "18", "reasoning tags do not matter"),
        ("<ANSWER>18</ANSWER>", None, "the tags are lower case"),
    ],
)
def test_extract_answer(text: str, expected: str | None, reason: str) -> None:
    assert extract_answer(text) == expected, reason


def test_extraction_of_many_tags_is_linear() -> None:
    assert extract_answer("<answer>" * 200_000) is None
    assert extract_answer("</answer>" * 200_000) is None
    assert extract_answer("<answer>1</answer>" * 50_000) == "1"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        *(("6*3=<<6*3=18>>18\n#### 18", "18"), ("#### 57,500", "57500"), ("#### 1\n#### -2", "-2")),
        *(("####  7 ", "7"), ("18", None), ("#### ", None)),
    ],
)
def test_gsm8k_gold(text: str, gold: str | None) -> None:
    assert gsm8k_gold(text) == gold
