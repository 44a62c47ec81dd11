"""Verdicts of the grader: the table of verdicts.py, and properties over random answers."""

import pytest
from held_out import HELD_OUT, MISSES
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import CASES

from gtpo.grading import equivalent, extract_answer, gsm8k_gold, is_correct, last_boxed, normalise


@pytest.mark.parametrize(("gold", "answer", "expected", "reason"), CASES, ids=[f"{c[0]} <- {c[1]}" for c in CASES])
def test_verdict(gold: str, answer: str, expected: bool, reason: str) -> None:
    assert is_correct(answer, gold) is expected, reason
    assert is_correct(gold, answer) is expected, f"{reason} (arguments swapped)"


@pytest.mark.parametrize(
    ("gold", "answer", "expected", "reason"), HELD_OUT, ids=[f"{c[0]} <- {c[1]}" for c in HELD_OUT]
)
def test_held_out_verdict(gold: str, answer: str, expected: bool, reason: str) -> None:
    expected = expected and (gold, answer) not in MISSES
    assert is_correct(answer, gold) is expected, reason
    assert is_correct(gold, answer) is expected, f"{reason} (arguments swapped)"


def test_no_answer_is_wrong() -> None:
    assert not is_correct(None, "18")
    assert not is_correct("", "18")
    assert not is_correct("", "")
    assert not is_correct(" \n", " ")


@settings(max_examples=150)
@given(st.text(max_size=60), st.text(alphabet="0123456789+-/^{}()[]\\,.=% xyfracsqtpi", max_size=25))
def test_any_text_gets_a_symmetric_verdict(a: str, b: str) -> None:
    for first, second in ((a, b), (a, "18"), (b, "18"), (f"<answer>{b}</answer>", b)):
        assert equivalent(first, second) == equivalent(second, first)
    assert equivalent(a, a) == bool(normalise(a))
    extract_answer(a)
    last_boxed(a)
    gsm8k_gold(a)
