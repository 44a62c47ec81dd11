"""Normal form: one spelling for the same answer, and an empty string for a text that is not an answer."""

import pytest

from gtpo.grading import is_correct, normalise
from gtpo.grading.normalise import MAX_LENGTH


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The answer is **$\boxed{18}$**.", "18"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac\sqrt32", r"\frac\sqrt{32}"),
        (r"\sqrt 12", r"\sqrt{12}"),
        ("1,234", "1234"),
        ("(1,234)", "(1,234)"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        ("5²", "5^{2}"),
        ("1½", r"1\frac{1}{2}"),
        ("90°", "90"),
        (r"\sin 30^\circ", r"\sin(\frac{30\pi}{180})"),
        ("18 or 20", "18,20"),
        ("", ""),
        (" \n", ""),
        ("(1", ""),
        ("(" * 41 + "1" + ")" * 41, ""),
    ],
)
def test_normal_form(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_an_answer_longer_than_the_maximum_is_wrong() -> None:
    assert is_correct(" " * 2000 + "18" + "\n" * 2000, "18")
    assert not is_correct("0" * MAX_LENGTH + "18", "18")
    assert normalise("9" * (MAX_LENGTH + 1)) == ""
