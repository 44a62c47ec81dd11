"""Exact numbers: parsing into fractions, and the tolerance of a rounded decimal."""

from fractions import Fraction

import pytest

from gtpo.grading.numerals import parse_number, rounding_tolerance, same_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18", (18, False)),
        ("-.5", (Fraction(-1, 2), False)),
        ("10%", (10, True)),
        (r"-\frac{-1}{2}", (Fraction(1, 2), False)),
        (r"-1\frac{1}{2}", (Fraction(-3, 2), False)),
        ("(3/4)", (Fraction(3, 4), False)),
        ("1.2*10^{-3}", (Fraction(12, 10_000), False)),
        ("1.2e5", (120_000, False)),
        (r"3\frac{-1}{2}", None),
        (r"\frac{1}{0}", None),
        ("(18", None),
        ("1_8", None),
        ("١٨", None),
        ("1e9999", None),
        ("x", None),
    ],
)
def test_parse_number(text: str, expected: tuple[Fraction, bool] | None) -> None:
    assert parse_number(text) == expected


def test_same_number() -> None:
    assert same_number("10%", "0.1") and same_number("10%", "10")
    assert same_number("0.1", "0.10000000001") is False
    assert same_number("x", "1") is None


def test_only_a_decimal_of_ten_digits_has_a_rounding_tolerance() -> None:
    assert rounding_tolerance("0.6666666667", r"\frac{2}{3}") == Fraction(1, 10**10)
    assert rounding_tolerance("0.666666667", r"\frac{2}{3}") is None
    assert rounding_tolerance("0.6666666667", "0.6666666666") is None
    assert rounding_tolerance("6666666667", r"\frac{2}{3}") is None
