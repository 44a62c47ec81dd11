"""pass@k against exact fractions, maj@k against a naive vote, identities between them, and the bootstrap."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo.evaluation import metrics
from gtpo.evaluation.metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k
from gtpo.grading import compare, is_correct

ATOL = 1e-12  # observed error 2e-15 for all n up to 200


def reference_pass_at_k(n: int, c: int, k: int) -> Fraction:
    """1 - C(n - c, k) / C(n, k) in exact integers."""
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def test_pass_at_k_matches_exact_fractions() -> None:
    for n in [*range(1, 25), 64, 128, 200]:
        for c in range(0, n + 1, 1 if n < 25 else 7):
            for k in range(1, n + 1, 1 if n < 25 else 5):
                expected = reference_pass_at_k(n, c, k)
                assert abs(pass_at_k(n, c, k) - expected) < ATOL, (n, c, k)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_of_any_problem(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    score = pass_at_k(n, c, k)
    assert score == pytest.approx(float(reference_pass_at_k(n, c, k)), abs=ATOL)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n, abs=ATOL)
    assert pass_at_k(n, c, n) == float(c > 0)
    assert k == n or score <= pass_at_k(n, c, k + 1) + ATOL
    assert c == n or score <= pass_at_k(n, c + 1, k) + ATOL


def test_pass_at_k_is_the_mean_of_first_k_pass_over_orders() -> None:
    correct = [True, True, False, False, False]
    rng = np.random.default_rng(0)
    means = [first_k_pass(list(rng.permutation(correct)), 2) for _ in range(20_000)]
    assert np.mean(means) == pytest.approx(pass_at_k(5, 2, 2), abs=0.015)  # 4 standard errors


@pytest.mark.parametrize(
    ("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, -1), (0, 0, 1), (-1, 0, 1)]
)
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"expected [01] <= [ck] <= n"):
        pass_at_k(n, c, k)


def test_first_k_pass() -> None:
    correct = [False, False, True, False]
    assert [first_k_pass(correct, k) for k in (1, 2, 3, 4)] == [0.0, 0.0, 1.0, 1.0]
    for k in (0, 5, -1):
        with pytest.raises(ValueError, match="expected 1 <= k <= n"):
            first_k_pass(correct, k)


# answers of the samples, in order; the gold is 1/2
@pytest.mark.parametrize(
    ("samples", "k", "score", "reason"),
    [
        (["1/2"], 1, 1, "one sample, correct"),
        (["2"], 1, 0, "one sample, wrong"),
        ([None], 1, 0, "one sample, no answer"),
        (["2", "1/2", "0.5"], 3, 1, "two spellings of one number are one class"),
        (["2", "2", "1/2", r"\frac12", "0.5"], 5, 1, "three"),
        (["2", "1/2", "0.5"], 2, 0, "a tie goes to the class that occurs first: wrong"),
        (["1/2", "2", "2.0", "0.5"], 4, 1, "a tie goes to the class that occurs first: correct"),
        ([None, None, None, "1/2"], 4, 1, "missing answers have no vote"),
        ([None, None, "1/2"], 2, 0, "none left"),
        (["1/2", "2", "2"], 3, 0, "the majority is wrong"),
        (["1/2", "2", "2"], 1, 1, "samples after the k-th do not count"),
        (["", " ", "1/2"], 3, 1, "nor do blank ones"),
        (["x+1", "1+x", "1/2"], 3, 0, "only the symbolic comparison sees that they are equal"),
    ],
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
def test_identities_of_any_problem(samples: list[str | None], data: st.DataObject) -> None:
    correct = [sample is not None and Fraction(sample) == 2 for sample in samples]
    k = data.draw(st.integers(1, len(samples)))
    assert majority_at_k(samples, correct, k) == reference_majority(samples, correct, k)
    assert majority_at_k(samples, correct, 1) == first_k_pass(correct, 1)
    assert majority_at_k(samples, correct, k) <= first_k_pass(correct, k)  # the winner is one of the k
    assert k == 1 or first_k_pass(correct, k - 1) <= first_k_pass(correct, k)
    assert first_k_pass(correct, len(samples)) == pass_at_k(len(samples), sum(correct), len(samples))


def test_majority_refuses() -> None:
    with pytest.raises(ValueError, match="2 answers but 1 entries in correct"):
        majority_at_k(["1", "2"], [True], 1)
    with pytest.raises(ValueError, match="k=3 of n=2"):
        majority_at_k(["1", "2"], [True, False], 3)


def test_a_repeated_answer_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(metrics, "equivalent", lambda a, b, budget: asked.append((a, b)))
    majority_at_k(["1", "2"] * 32, [True, False] * 32, 64)
    assert asked == [("1", "2")]


def test_bootstrap_interval_of_a_known_mean() -> None:
    scores = np.repeat([0.0, 1.0], 50)  # mean 1/2, standard error 0.05
    low, high = bootstrap_interval(scores.tolist())
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)
    assert bootstrap_interval(scores.tolist()) == (low, high)


def exact_limit(successes: int, n: int) -> float:
    """Clopper and Pearson's upper limit by bisection: at it, as few successes have the probability 0.025."""
    low, high = 0.0, 1.0
    for _ in range(100):
        p = (low + high) / 2
        at_most = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(successes + 1))
        low, high = (p, high) if at_most > 0.025 else (low, p)
    return low


@pytest.mark.parametrize("n", [1, 3, 30, 1319])
def test_the_interval_of_equal_scores_is_exact_and_no_point(n: int) -> None:
    limit = exact_limit(0, n)
    assert bootstrap_interval([0.0] * n) == pytest.approx((0, limit))
    assert bootstrap_interval([1.0] * n) == pytest.approx((1 - limit, 1))
    assert bootstrap_interval([0.25] * n) == pytest.approx((0.25 - 0.25 * limit, 0.25 + 0.75 * limit))
    assert bootstrap_interval([0.0] * n, bounds=(-1, 1)) == pytest.approx((-limit, limit))


def test_all_zero_of_30_problems_by_hand() -> None:
    assert bootstrap_interval([0.0] * 30)[1] == pytest.approx(0.1157, abs=1e-4)  # 1 - 0.025^(1/30)


def test_the_interval_matches_every_resample_of_few_problems() -> None:
    """Against all 4^4 resamples of four scores, each equally likely."""
    scores = [0.0, 0.25, 0.25, 1.0]
    means = [sum(chosen) / 4 for chosen in itertools.product(scores, repeat=4)]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert bootstrap_interval(scores) == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "options"),
    [
        *[([], {}), ([1.0, 1.1], {}), ([-0.1, 0], {}), ([-1.0, 1.5], {"bounds": (-1, 1)})],
    ],
)
def test_bootstrap_interval_refuses(scores: list, options: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        bootstrap_interval(scores, **options)


def test_the_comparisons_of_a_vote_share_the_time_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(compare, "decide", lambda a, b: (False, calls.append((a, b)) or 5.0))
    answers = [f"x+{i}y" for i in range(2, 7)]  # 10 pairs
    assert majority_at_k([*answers, answers[1]], [False, True, False, False, False, True], 6) == 1.0
    assert len(calls) == 6
