"""Canonical forms, the classes of maj@k: which answers count together, and which apart."""

import pytest

from gtpo.grading.canonical import canonical_form

SAME = r"""
18 | 18.0 | $18$ | x=18 | The answer is 18. | 36/2 | eighteen
5 cm | 5\text{ cm} | 5 centimeters
10% | 10\% | 10 percent
1,2 | 2,1 | \{1,2\} | x=1 or x=2 | 1.0, 2
(1,2) | \left(1, 2\right) | \langle 1,2 \rangle | (x,y)=(1,2)
(0,1)\cup(2,3) | (2,3)\cup(0,1)
even | \text{Even} | Even.
x^2+1 | x^{2} + 1 | f(x)=x^2+1
8 | 8 (for all k) | 8, for all integers k
"""
APART = r"""
10 | 10% | 1/10
5 | 5 cm | 5 m | 5 cm^2
1,2 | (1,2) | (2,1) | [1,2] | 1,3 | 1,2,3
even | odd | evens
a, then b | no | on
x^2+1 | x^2-1 | X^2+1
first, second | second, first
x^2 | x^2, x > 0 | x^2, x < 0
2n | \{2n \mid n\in\mathbb{N}\}
"""


@pytest.mark.parametrize("line", SAME.strip().split("\n"))
def test_spellings_of_one_answer_have_one_form(line: str) -> None:
    assert len(set(map(canonical_form, line.split(" | ")))) == 1


@pytest.mark.parametrize("line", APART.strip().split("\n"))
def test_different_answers_have_different_forms(line: str) -> None:
    answers = line.split(" | ")
    assert len(set(map(canonical_form, answers))) == len(answers)


def test_unreadable_answers_have_an_empty_form() -> None:
    assert [canonical_form(text) for text in ("", " ", "(1", "9" * 2000)] == [""] * 4
