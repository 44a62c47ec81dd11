"""The steps of the exact rules, one by one; what they decide together is in verdicts.py."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_settings

from gtpo.grading import is_correct, last_boxed, normalise
from gtpo.grading.latex import bracket_balance, closing_index, nesting_depth, split_top_level
from gtpo.grading.normal_form import MAX_LENGTH
from gtpo.grading.numerals import parse_number, rounding_tolerance, same_number
from gtpo.grading.structure import parse_structure
from gtpo.grading.units import LABEL, PERCENT, Unit, split_unit, strip_units


def length(size: str, power: int = 1) -> Unit:
    return Unit(Fraction(size), frozenset({("m", power)}))


CM2 = length("0.0001", 2)
SECOND = Unit(Fraction(1), frozenset({("s", 1)}))
SPEED = Unit(Fraction("0.44704"), frozenset({("m", 1), ("s", -1)}))

TABLE = read_settings(Path(__file__).with_name("forms.yaml"))
FORMS: dict[Callable[[str], Any], dict[str, Any]] = {
    last_boxed: TABLE["last_boxed"],
    normalise: TABLE["normalise"],
    parse_structure: {text: (kind, tuple(items)) for text, (kind, items) in TABLE["parse_structure"].items()},
    parse_number: {
        **{"18": (18, False), "-.5": (Fraction(-1, 2), False), "10%": (10, True), "1.2e5": (120_000, False)},
        **{r"-\frac{-1}{2}": (Fraction(1, 2), False), r"-1\frac{1}{2}": (Fraction(-3, 2), False)},
        **{"(3/4)": (Fraction(3, 4), False), "1.2*10^{-3}": (Fraction(12, 10_000), False)},
        **dict.fromkeys([r"3\frac{-1}{2}", r"\frac{1}{0}", "(18", "1_8", "١٨", "1e9999", "x"]),
    },
    split_unit: {
        **{"18": ("18", None, False), r"5\text{ cm}^{2}": ("5", CM2, False), "5 square cm": ("5", CM2, False)},
        **{"5 centimeters": ("5", length("0.01"), False), "5 mph": ("5", SPEED, False)},
        **{"5 miles per hour": ("5", SPEED, False), "5 million": ("5*10^{6}", None, False)},
        **{r"5\frac{\text{mi}}{\text{h}}": ("5", SPEED, False), r"5\mathrm{mi h^{-1}}": ("5", SPEED, False)},
        **{"18 ducks": ("18", LABEL, False), r"18\text{ ways}": ("18", LABEL, False)},
        **{"18 plus": ("18 plus", None, False), "18%": ("18%", PERCENT, False)},
        **{"2s": ("2", SECOND, True), "2 s": ("2", SECOND, False), "x+2 s": ("x+2", SECOND, True)},
        r"18\text{ maybe 19}": (r"18\text{ maybe 19}", None, False),
    },
}


@pytest.mark.parametrize("step", FORMS, ids=lambda step: step.__name__)
def test_forms(step: Callable[[str], Any]) -> None:
    assert {text: step(text) for text in FORMS[step]} == FORMS[step]


def test_brackets() -> None:
    assert (bracket_balance("([{"), bracket_balance("()]")) == (3, -1)
    assert (nesting_depth("(a)[(b)]"), nesting_depth("")) == (2, 0)
    assert (closing_index("a(b(c)d)e", 1), closing_index("(a", 0)) == (7, 0)
    assert split_top_level("1, (2, 3), 4", ",") == ["1", "(2, 3)", "4"]


def test_an_answer_longer_than_the_maximum_is_wrong() -> None:
    assert is_correct(" " * 2000 + "18" + "\n" * 2000, "18")
    assert not is_correct("0" * MAX_LENGTH + "18", "18")
    assert normalise("9" * (MAX_LENGTH + 1)) == ""


def test_pairs_of_numbers() -> None:
    """Only a decimal of ten digits has a tolerance: the unit of its last place."""
    assert same_number("10%", "0.1") and same_number("10%", "10")
    assert same_number("0.1", "0.10000000001") is False
    assert same_number("x", "1") is None
    assert rounding_tolerance("0.6666666667", r"\frac{2}{3}") == Fraction(1, 10**10)
    pairs = [("0.666666667", r"\frac{2}{3}"), ("0.6666666667", "0.6666666666"), ("6666666667", r"\frac{2}{3}")]
    assert [rounding_tolerance(*pair) for pair in pairs] == [None, None, None]


def test_a_bare_letter_is_a_unit_only_if_the_other_answer_has_that_unit() -> None:
    assert strip_units("17m", r"17\text{ meters}") == ("17", "17")
    assert strip_units("2s", "2") == ("2s", "2")
    assert strip_units("2s", "3s") == ("2s", "3s")
    assert strip_units("2s", r"2\text{ m}") is None
