"""Verdicts on no answer and on random text; those of the tables are in test_kinds.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo.grading import equivalent, extract_answer, gsm8k_gold, is_correct, last_boxed, normalise


@pytest.mark.parametrize(("answer", "gold"), [(None, "18"), ("", "18"), ("", ""), (" \n", " ")])
def test_no_answer_is_wrong(answer: str | None, gold: str) -> None:
    assert not is_correct(answer, gold)


@settings(max_examples=150)
@given(st.text(max_size=60), st.text(alphabet="0123456789+-/^{}()[]\\,.=% xyfracsqtpi", max_size=25))
def test_any_text_gets_a_symmetric_verdict(a: str, b: str) -> None:
    for first, second in ((a, b), (a, "18"), (b, "18"), (f"<answer>{b}</answer>", b)):
        assert equivalent(first, second) == equivalent(second, first)
    assert equivalent(a, a) == bool(normalise(a))
    extract_answer(a)
    last_boxed(a)
    gsm8k_gold(a)
