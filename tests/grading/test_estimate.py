"""Floating-point check: equal expressions are never far apart, and unreliable values are not used."""

import math
import re

import pytest
from verdicts import CASES

from gtpo.grading import normalise
from gtpo.grading.estimate import estimate, is_far_apart
from gtpo.grading.exact import same_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\frac{1}{2}+\sqrt{2}", 0.5 + math.sqrt(2)),
        (r"1\frac{1}{2}\pi", 1.5 * math.pi),
        (r"\sqrt[3]{8}", 2),
        ("2^{-3}", 0.125),
        ("(1+i)(1-i)", 2),
        ("--2*3/4", 1.5),
    ],
)
def test_estimate(text: str, expected: float) -> None:
    assert estimate(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"\sin(x)",
            "x_{1}",
            "1/2x",
            "10^{9}",
            r"\frac{1}{0}",
            "(-2)^{0.5}",
            r"\sqrt{-1}",
            "2^{i}",
            "1+",
            "(1",
            "",
            "*",
        ),
    ],
)
def test_an_expression_that_cannot_be_computed_reliably_has_no_estimate(text: str) -> None:
    assert estimate(text) is None


def test_equal_expressions_are_never_far_apart() -> None:
    equal = [(normalise(gold), normalise(answer)) for gold, answer, expected, _ in CASES if expected]
    # Earlier rules decide numbers (1.2e5) and words (18 dollars).
    pairs = [
        (a, b) for a, b in equal if same_number(a, b) is None and not re.search(r"(?<![\\a-z])[a-z]{4}", a + " " + b)
    ]
    assert len([pair for pair in pairs if None not in map(estimate, pair)]) > 30
    assert [pair for pair in pairs if is_far_apart(*pair)] == []


def test_unequal_expressions_are_far_apart() -> None:
    assert is_far_apart("x+1", "x+2")
    assert is_far_apart(r"\sqrt{2}", r"\sqrt{3}")
    assert not is_far_apart("x+1", r"\sin(x)")
