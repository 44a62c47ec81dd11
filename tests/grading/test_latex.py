"""Helpers for LaTeX text: brackets and boxes."""

import pytest

from gtpo.grading import last_boxed
from gtpo.grading.latex import bracket_balance, closing_index, nesting_depth, split_top_level


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,\sqrt{2}\right\}}$", r"\left\{1,\sqrt{2}\right\}"),
        (r"$\boxed 2$", "2"),
        (r"$\boxed {17}$", "17"),
        (r"\fbox{18}", "18"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{18", None),
        (r"\boxed", None),
        ("18", None),
    ],
)
def test_last_boxed(solution: str, gold: str | None) -> None:
    assert last_boxed(solution) == gold


def test_brackets() -> None:
    assert (bracket_balance("([{"), bracket_balance("()]")) == (3, -1)
    assert (nesting_depth("(a)[(b)]"), nesting_depth("")) == (2, 0)
    assert (closing_index("a(b(c)d)e", 1), closing_index("(a", 0)) == (7, 0)
    assert split_top_level("1, (2, 3), 4", ",") == ["1", "(2, 3)", "4"]
