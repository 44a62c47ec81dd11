"""Canonical forms, the classes of maj@k: which answers count together, and which apart."""

import pytest

from gtpo.grading.canonical import canonical_form


@pytest.mark.parametrize(
    "same",
    [
        ["18", "18.0", "$18$", "x=18", "The answer is 18.", "36/2", "eighteen"],
        ["5 cm", r"5\text{ cm}", "5 centimeters"],
        ["10%", r"10\%", "10 percent"],
        ["1,2", "2,1", r"\{1,2\}", "x=1 or x=2", "1.0, 2"],
        ["(1,2)", r"\left(1, 2\right)", r"\langle 1,2 \rangle", "(x,y)=(1,2)"],
        [r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"],
        ["even", r"\text{Even}", "Even."],
        ["x^2+1", "x^{2} + 1", "f(x)=x^2+1"],
    ],
    ids=lambda same: same[0],
)
def test_spellings_of_one_answer_have_one_form(same: list[str]) -> None:
    assert len(set(map(canonical_form, same))) == 1


@pytest.mark.parametrize(
    "apart",
    [
        ["10", "10%", "1/10"],
        ["5", "5 cm", "5 m", "5 cm^2"],
        ["1,2", "(1,2)", "(2,1)", "[1,2]", "1,3", "1,2,3"],
        ["even", "odd", "evens"],
        ["a, then b", "no", "on"],
        ["x^2+1", "x^2-1", "X^2+1"],
        ["first, second", "second, first"],
    ],
    ids=lambda apart: apart[0],
)
def test_different_answers_have_different_forms(apart: list[str]) -> None:
    assert len(set(map(canonical_form, apart))) == len(apart)


def test_unreadable_answers_have_an_empty_form() -> None:
    assert [canonical_form(text) for text in ("", " ", "(1", "9" * 2000)] == [""] * 4
    assert canonical_form("(" * 39 + "1" + ")" * 39) == canonical_form("1")
