"""Numbers in English words."""

import pytest

from gtpo.grading.numerals import digits_for_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("twenty-five", "25"),
        ("Eighteen dollars", "18 dollars"),
        ("two hundred and fifteen", "215"),
        ("three thousand four hundred six", "3406"),
        ("five ninths", r"\frac{5}{9}"),
        ("a quarter", r"\frac{1}{4}"),
        ("3 and a half", r"3\frac{1}{2}"),
        (r"\text{two-thirds}", r"\frac{2}{3}"),
        (r"\text{two lines}", r"\text{2 lines}"),
        ("two and three", "2 and 3"),
        ("the twenty-fifth", "the twenty-fifth"),  # ordinals
        ("third", "third"),
        ("tens", "tens"),
        ("someone", "someone"),
    ],
)
def test_digits_for_words(text: str, expected: str) -> None:
    assert digits_for_words(text) == expected
