"""Units: which words are units, and when a bare letter is one."""

import pytest

from gtpo.grading.units import split_unit, strip_units


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("18", "18", None),
        (r"5\text{ cm}", "5", "cm"),
        ("5 centimeters", "5", "cm"),
        (r"5\text{ cm}^{2}", "5", "2cm"),
        ("5 square cm", "5", "2cm"),
        ("5 mph", "5", "/hmi"),
        ("5 miles per hour", "5", "/hmi"),
        ("18 ducks", "18", ""),
        (r"18\text{ ways}", "18", ""),
        ("5 million", "5*10^{6}", None),
        ("18 plus", "18 plus", None),
        (r"18\text{ maybe 19}", r"18\text{ maybe 19}", None),
    ],
)
def test_split_unit(text: str, value: str, unit: str | None) -> None:
    assert split_unit(text) == (value, unit, False)


def test_a_bare_letter_is_a_unit_only_if_the_other_answer_has_that_unit() -> None:
    assert strip_units("17m", r"17\text{ meters}") == ("17", "17")
    assert strip_units("2s", "2") == ("2s", "2")
    assert strip_units("2s", "3s") == ("2s", "3s")
    assert strip_units("2s", r"2\text{ m}") is None
