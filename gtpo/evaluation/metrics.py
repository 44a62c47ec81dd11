"""Evaluation metrics: pass@k, maj@k, and bootstrap intervals over problems.

A problem has n samples, c of them correct, and k <= n of them are considered. Each function scores one problem; an
evaluation averages over problems. `pass_at_k` is the unbiased estimator, `first_k_pass` the estimator of Table 1 of the
paper: the same mean, 2 to 8 times the noise.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from gtpo.grading.canonical import canonical_form

GOLD = object()  # the class of the correct answers
TAIL = 0.025  # on each side of a 95 % interval


def sizes_up_to(k: int) -> list[int]:
    """The k' of the scores: every power of two up to k, and k itself."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of one problem: the probability that k of its n samples include a correct one.

        1 - C(n - c, k) / C(n, k)

    Chen et al. 2021 (arXiv 2107.03374), in exact integers, which neither overflow nor cancel. ``c`` of ``n`` samples
    are correct. ValueError if k is out of range; there is no unbiased estimate for k > n.
    """
    _check_k(k, n)
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def first_k_pass(correct: Sequence[bool], k: int) -> float:
    """1 if any of the first k samples of a problem is correct, else 0: pass@k as estimated in Table 1 of the paper."""
    _check_k(k, len(correct))
    return float(any(correct[:k]))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """maj@k of one problem: 1 if the most frequent answer of its first k samples is correct, else 0.

    All correct answers are one class, the gold's; the others are counted by their canonical form
    (:func:`gtpo.grading.canonical.canonical_form`), so the order of the samples decides ties alone: a tie goes to the
    class that occurs first. Missing answers (None, blank) have no vote, and no votes score 0: maj@1 is first-k pass@1.

    Args:
        answers: The extracted answer of each sample, in sampling order. Length n.
        correct: Whether each answer is correct. Length n.
        k: Samples considered, 1 to n.
    """
    _check_k(k, len(answers))
    votes: Counter[Hashable] = Counter()  # in the order of the first occurrence
    for answer, is_correct in list(zip(answers, correct, strict=True))[:k]:
        form = canonical_form(answer or "")
        if form:
            votes[GOLD if is_correct else form] += 1
    if not votes:
        return 0.0
    winner, _ = votes.most_common(1)[0]  # of equally frequent ones the first
    return float(winner is GOLD)


def bootstrap_interval(
    per_problem_scores: Sequence[float],
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean score: problems are resampled with replacement, their samples are not.

    If all n scores are equal, every resample is the same and the bootstrap interval has zero width. The interval is
    then the exact one (Clopper and Pearson) for a share observed 0 times in n: at most 1 - 0.025^(1/n) of all problems
    have another score, with any value within the bounds. All-zero scores of 30 problems give 0 to 0.116.

    Args:
        per_problem_scores: One score per problem, such as its pass@k.
        bounds: The lowest and highest possible score; -1 and 1 for a difference of two.

    Returns:
        (low, high), in the unit of the scores; the same for the same scores, because the resampling is seeded.
    """
    values, counts = np.unique(np.asarray(per_problem_scores, dtype=np.float64), return_counts=True)
    n = len(per_problem_scores)
    if len(values) == 1:
        unseen = 1 - TAIL ** (1 / n)
        low, high = (values[0] + unseen * (bound - values[0]) for bound in bounds)
        return float(low), float(high)
    # A resample is how often each value is drawn; 100 at a time, because the 5,000 of MATH would take 400 MB at once.
    rng = np.random.default_rng(0)
    means = [rng.multinomial(n, counts / n, size=100) @ values / n for _ in range(100)]
    low, high = np.quantile(means, [TAIL, 1 - TAIL])
    return float(low), float(high)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of n={n} samples: expected 1 <= k <= n; sample more completions or lower k")
