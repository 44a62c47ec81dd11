"""pass@k against exact fractions, maj@k against a naive vote, and the bootstrap."""

import itertools
import math
from fractions import Fraction

import numpy as np
from helpers.files import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx, mark

from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k
from gtpo.grading import is_correct

TABLES = tables_of(__file__)

ATOL = 1e-12  # observed error 2e-15 for all n up to 200


@given(st.integers(1, 200), st.data())
def test_pass_at_k_of_any_problem(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == approx(float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))), abs=ATOL)


def test_first_k_pass() -> None:
    correct = [False, False, True, False]
    assert [first_k_pass(correct, k) for k in (1, 2, 3, 4)] == [0.0, 0.0, 1.0, 1.0]


# answers of the samples, in order; the gold is 1/2
@mark.parametrize(
    ("samples", "k", "score", "reason"),
    TABLES["majority"],
)
def test_majority(samples: list[str | None], k: int, score: float, reason: str) -> None:
    correct = [is_correct(sample, "1/2") for sample in samples]
    assert majority_at_k(samples, correct, k) == score, reason


def reference_majority(samples: list[str | None], correct: list[bool], k: int) -> float:
    """One class per answer by pairwise comparison; the first of the largest."""
    classes: list[list[int]] = []
    for i in range(k):
        if samples[i] is None:
            continue
        home = [c for c in classes if Fraction(str(samples[c[0]])) == Fraction(str(samples[i]))]
        home[0].append(i) if home else classes.append([i])
    if not classes:
        return 0.0
    largest = max(len(c) for c in classes)
    return float(correct[next(c for c in classes if len(c) == largest)[0]])


@settings(max_examples=200)
@given(st.lists(st.sampled_from([None, "1", "1.0", "2", "4/2", "0.5", "1/2", "3"]), min_size=1, max_size=16), st.data())
def test_the_majority_of_any_problem(samples: list[str | None], data: st.DataObject) -> None:
    correct = [sample is not None and Fraction(sample) == 2 for sample in samples]
    k = data.draw(st.integers(1, len(samples)))
    assert majority_at_k(samples, correct, k) == reference_majority(samples, correct, k)


@mark.parametrize(
    ("answers", "gold"),
    TABLES["the_order_of_the_samples_decides_ties_alone"],
)
def test_the_order_of_the_samples_decides_ties_alone(answers: list[str], gold: str) -> None:
    scores = set()
    for shuffled in set(itertools.permutations(answers)):
        correct = [is_correct(answer, gold) for answer in shuffled]
        scores.add(majority_at_k(shuffled, correct, len(answers)))
    assert len(scores) == 1


# Clopper and Pearson's upper limit of 0 in n.
@mark.parametrize(("n", "limit"), [(1, 0.975), (3, 0.70760), (30, 0.11570), (1319, 0.0027928)])
def test_the_interval_of_equal_scores_is_exact(n: int, limit: float) -> None:
    assert bootstrap_interval([0.0] * n) == approx((0, limit), rel=1e-4)
    assert bootstrap_interval([1.0] * n) == approx((1 - limit, 1), rel=1e-4)
    assert bootstrap_interval([0.25] * n) == approx((0.25 - 0.25 * limit, 0.25 + 0.75 * limit), rel=1e-4)
    assert bootstrap_interval([0.0] * n, bounds=(-1, 1)) == approx((-limit, limit), rel=1e-4)


def test_the_interval_matches_every_resample_of_few_problems() -> None:
    """Against all 4^4 resamples of four scores, each equally likely."""
    means = [sum(chosen) / 4 for chosen in itertools.product([0.0, 0.25, 0.25, 1.0], repeat=4)]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert bootstrap_interval([0.0, 0.25, 0.25, 1.0]) == approx(tuple(expected), abs=1e-12)
