"""Paired comparisons, by hand and against slow references."""

from math import comb

import pytest

from study.pairs import add_holm, difference_row, made_differently, mcnemar_p, sign_flip_p


def test_the_interval_and_p_by_hand() -> None:
    """Of the eight choices of signs +++ and --- are as far from 0 as 1 + 2 + 3; t(2) = 4.303, half width 4.303 / √3."""
    found = difference_row([1.0, 2.0, 3.0])
    assert (found["seeds"], found["mean"], found["p"]) == (3, 2.0, 2 / 8)
    assert found["half_width"] == pytest.approx(4.303 / 3**0.5)
    assert sign_flip_p([3.0, 3.0, -1.0]) == 4 / 8 and sign_flip_p([1.0]) is None
    assert difference_row([])["mean"] is None and difference_row([1.0, 2.0])["half_width"] is None


def test_p_of_many_seeds_is_always_the_same() -> None:
    """21 differences of 1: their sum is that of 15 to 21 equal signs, or more extreme; exact by the binomial."""
    differences = [1.0] * 15 + [-1.0] * 6
    exact = 2 * sum(comb(21, k) for k in range(7)) / 2**21
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.005) == sign_flip_p(differences)
    assert sign_flip_p([1.0] * 40) == pytest.approx(1 / (2**16 + 1))  # the observed one alone


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"), [(5, 0, 2 / 32), (4, 1, 12 / 32), (2, 2, 1.0), (0, 0, 1.0)]
)
def test_mcnemar(only_first: int, only_second: int, p: float) -> None:
    first = [True] * only_first + [False] * only_second + [True, False]
    second = [False] * only_first + [True] * only_second + [True, False]
    assert mcnemar_p(first, second) == p == mcnemar_p(second, first)


def test_holm_by_hand() -> None:
    """0.01 · 3, 0.03 · 2, and 0.04, which is not below the one before; never above 1."""
    for ps, expected in (([0.04, 0.01, 0.03], [0.06, 0.03, 0.06]), ([0.6, 0.7], [1.0, 1.0]), ([0.2, None], None)):
        rows = [{"p": p} for p in ps]
        add_holm(rows)
        assert [row.get("holm") for row in rows] == (expected or [None, None])


def test_what_two_runs_were_made_from_another_one_of() -> None:
    """Condensed runs have no hashes: nothing is known to differ."""
    stored = {"rows": "1", "held_out": "2", "mine.py": "3", "beside.py": "4"}
    for other, own, expected in (
        (stored, (), []),
        (stored | {"mine.py": "5", "beside.py": "5"}, (), ["beside.py", "mine.py"]),
        (stored | {"rows": "5", "held_out": "5"}, (), ["set of held-out rows", "set of training rows"]),
        (stored | {"arm.py": "5", "arm.yaml": "5"}, (), ["arm.py", "arm.yaml"]),
        (stored | {"arm.py": "5", "arm.yaml": "5"}, ("arm.py",), ["arm.yaml"]),
        ({}, (), []),
    ):
        assert made_differently(stored, other, own) == expected == made_differently(other, stored, own)
