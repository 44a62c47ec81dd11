"""The step before the worker: which texts are refused, how the rest is written, and the time limits."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from gtpo.grading import TimeBudget, algebra, compare, extract_answer, is_correct, timeouts
from gtpo.grading.algebra import to_latex
from gtpo.grading.worker import shared_worker
from rewards import accuracy_reward


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9}}", "x^{x^{x^{x}}}", "2^{100000}", "(2^{5000})^{5000}", "(x+y)^{300}"),
        *("((20!)!)!", "(10^8)!", "100000!", "\\binom{100000}{5}"),
        *("9" * 400 + "x", "x@y", "__x", "|x|" * 9, "18 19", "204_5+x", "x+\\ldots", "[0,\\infty]"),
    ],
)
def test_refused_texts_never_reach_sympy(text: str) -> None:
    before = shared_worker.calls
    for gold in ("x+1", r"\sin x", r"[0,1)\cup[2,3]"):
        assert not is_correct(text, gold)
    assert shared_worker.calls == before


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


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """In place of sympy: every comparison takes two seconds and finds its pair equal."""
    compare.decide.cache_clear()
    monkeypatch.setattr(shared_worker, "compare", fake := MagicMock(return_value=(True, 2.0)))
    yield fake
    compare.decide.cache_clear()


def test_the_time_limit_covers_all_elements_of_an_answer(worker: MagicMock) -> None:
    assert is_correct("(1+x,2+x,3+x)", "(x+1,x+2,x+3)")
    assert [call.args[3] for call in worker.call_args_list] == [5.0, 3.0, 1.0]


def blocks(answers: list[str]) -> str:
    return "".join(f"<answer>{answer}</answer>" for answer in answers)


SPELLINGS = [f"x+{i}-{i}" for i in range(20)]  # only sympy sees that they are equal


def test_all_comparisons_of_a_completion_share_one_budget(worker: MagicMock) -> None:
    logged = {}
    for _ in ("compared", "from the cache"):
        assert accuracy_reward([blocks(SPELLINGS)], answer=["x"], log_metric=logged.__setitem__) == [0.0]
        assert worker.call_count == 3 and logged["grader_timeouts"] == 1.0  # 2 + 2 + 2 s exceed 5 s


def test_the_gold_answer_is_compared_within_the_same_budget(worker: MagicMock) -> None:
    three = blocks(SPELLINGS[:3])
    two = blocks(SPELLINGS[:2])
    before = timeouts()
    assert accuracy_reward([three, two], answer=["x", "x"]) == [0.0, 10.0]  # 6 s and 4 s
    assert timeouts() == before + 1
    assert is_correct(extract_answer(three), "x")  # each with its own budget


def test_a_spent_budget_compares_nothing(worker: MagicMock) -> None:
    budget = TimeBudget(2)
    assert budget.seconds_left == 10.0
    budget.seconds_left = 0.0
    before = timeouts()
    assert not is_correct("18", "18.0", budget)
    assert (worker.call_count, timeouts()) == (0, before + 1)


def test_every_completion_above_a_limit_is_counted(worker: MagicMock) -> None:
    worker.return_value = (None, 5.0)
    logged = {}
    completions = [blocks(SPELLINGS[:1]), blocks(SPELLINGS[:1]), blocks(SPELLINGS), blocks(["x"])]
    rewards = accuracy_reward(completions, answer=["x"] * 4, log_metric=logged.__setitem__)
    assert rewards == [0.0, 0.0, 0.0, 10.0]
    assert worker.call_count == 2 and logged["grader_timeouts"] == 3.0  # the second is known from the cache


def test_the_exact_rules_count(monkeypatch: pytest.MonkeyPatch, worker: MagicMock) -> None:
    clock = itertools.count(step=2.0)  # 2 s between the start and the end of a comparison
    monkeypatch.setattr(compare, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    before = timeouts()
    assert extract_answer(blocks(["18", "18.0"])) == "18.0"
    assert extract_answer(blocks(["18." + "0" * i for i in range(1, 20)])) is None
    assert (worker.call_count, timeouts()) == (0, before + 1)
    assert next(clock) == 16.0  # one comparison, then three of 18


def test_waiting_for_another_thread_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "TIME_LIMIT", 0.1)
    monkeypatch.setattr(shared_worker, "_request", lambda request, limit: (b"1", 0.0))
    compare.decide.cache_clear()
    shared_worker._lock.acquire()
    threading.Timer(0.3, shared_worker._lock.release).start()
    assert is_correct("x+2-2", "x")
    compare.decide.cache_clear()
