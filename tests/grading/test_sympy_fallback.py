"""The step before the worker: which texts are refused, how the rest is written, and the time limit of a comparison."""

from fractions import Fraction

import pytest

from gtpo.grading import compare, is_correct, worker_calls
from gtpo.grading.sympy_fallback import to_latex
from gtpo.grading.worker import shared_worker


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9}}", "x^{x^{x^{x}}}", "2^{100000}", "(2^{5000})^{5000}", "(x+y)^{300}"),
        *("((20!)!)!", "(10^8)!", "100000!", "\\binom{100000}{5}"),
        *("9" * 400 + "x", "x@y", "__x__", "|x|" * 9, "18 19", "204_5+x", "x+\\ldots", "[0,\\infty]"),
    ],
)
def test_refused_texts_never_reach_sympy(text: str) -> None:
    before = worker_calls()
    for gold in ("x+1", r"\sin x", r"[0,1)\cup[2,3]"):
        assert not is_correct(text, gold)
    assert worker_calls() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5x", r"\frac{5}{10}x"),
        ("10%", r"10*\frac{1}{100}"),
        (r"1\frac{2}{3}\pi", r"(1+\frac{2}{3})\pi"),
        ("(2)(3)", "(2)*(3)"),
        (r"2\binom{3}{1}", r"2*\binom{3}{1}"),
    ],
)
def test_to_latex(text: str, expected: str) -> None:
    assert to_latex(text) == expected


def test_the_time_limit_covers_all_elements_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def slow(a: str, b: str, tolerance: Fraction | None, limit: float) -> tuple[bool, float]:
        limits.append(limit)
        return True, 2.0

    monkeypatch.setattr(shared_worker, "compare", slow)
    compare.decide.cache_clear()
    assert is_correct("(1+x,2+x,3+x)", "(x+1,x+2,x+3)")
    assert limits == [5.0, 3.0, 1.0]
    compare.decide.cache_clear()
