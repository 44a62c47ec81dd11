"""Reading the answer of a completion and the gold answer of a GSM8K solution."""

import pytest
from helpers.files import tables_of

from gtpo.grading import extract_answer, gsm8k_gold

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("text", "expected", "reason"), TABLES["extract_answer"])
def test_extract_answer(text: str, expected: str | None, reason: str) -> None:
    assert extract_answer(text) == expected, reason


def test_extraction_of_many_tags_is_linear() -> None:
    assert extract_answer("<answer>" * 200_000) is None
    assert extract_answer("</answer>" * 200_000) is None
    assert extract_answer("<answer>1</answer>" * 50_000) == "1"


@pytest.mark.parametrize(("text", "gold"), TABLES["gsm8k_gold"])
def test_gsm8k_gold(text: str, gold: str | None) -> None:
    assert gsm8k_gold(text) == gold
