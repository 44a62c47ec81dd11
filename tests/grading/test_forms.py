"""The steps of the exact rules, one by one; what they decide together is in verdicts.py."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_settings

from gtpo.grading import is_correct, last_boxed, normalise
from gtpo.grading.normal_form import MAX_LENGTH
from gtpo.grading.numerals import parse_number, rounding_tolerance
from gtpo.grading.structure import parse_structure
from gtpo.grading.units import LABEL, PERCENT, Unit, split_unit

UNITS: dict[str | None, Unit | None] = {
    None: None,
    "label": LABEL,
    "percent": PERCENT,
    "cm": Unit(Fraction("0.01"), frozenset({("m", 1)})),
    "cm^2": Unit(Fraction("0.0001"), frozenset({("m", 2)})),
    "s": Unit(Fraction(1), frozenset({("s", 1)})),
    "mph": Unit(Fraction("0.44704"), frozenset({("m", 1), ("s", -1)})),
}
TABLE = read_settings(Path(__file__).with_name("forms.yaml"))
FORMS: dict[Callable[[str], Any], dict[str, Any]] = {
    last_boxed: TABLE["last_boxed"],
    normalise: TABLE["normalise"],
    parse_structure: {text: (kind, tuple(items)) for text, (kind, items) in TABLE["parse_structure"].items()},
    parse_number: {text: found and (Fraction(found[0]), found[1]) for text, found in TABLE["parse_number"].items()},
    split_unit: {text: (rest, UNITS[unit], bare) for text, (rest, unit, bare) in TABLE["split_unit"].items()},
}


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("1:2:3:4", "2:4:6:8", True),
        ("1:2:3:4", "2:4:6:9", False),
        ("1:2:3", "2 : 4 : 6", True),
        ("3", "x==3", True),
        ("3", "x==4", False),
        ("(2,3)", "x==2, y==3", True),
        ("x=1,y=2", r"\left. \begin{aligned} x=1\\ y=2 \end{aligned} \right\}", True),
        ("x=1,y=2", r"\left. x=2, y=1 \right\}", False),
    ],
)
def test_ratios_of_four_python_and_right_braces(gold: str, answer: str, expected: bool) -> None:
    assert is_correct(answer, gold) is expected


@pytest.mark.parametrize("step", FORMS, ids=lambda step: step.__name__)
def test_forms(step: Callable[[str], Any]) -> None:
    assert {text: step(text) for text in FORMS[step]} == FORMS[step]


def test_an_answer_longer_than_the_maximum_is_wrong() -> None:
    assert is_correct(" " * 2000 + "18" + "\n" * 2000, "18")
    assert not is_correct("0" * MAX_LENGTH + "18", "18")
    assert normalise("9" * (MAX_LENGTH + 1)) == ""


def test_nine_digits_have_no_tolerance() -> None:
    assert rounding_tolerance("0.6666666667", r"\frac{2}{3}") == Fraction(1, 10**10)
    assert rounding_tolerance("0.666666667", r"\frac{2}{3}") is None
