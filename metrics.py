"""Scores of an evaluation: pass@k, maj@k and their bootstrap intervals (Section 6 of the paper)."""

from collections.abc import Sequence

import numpy as np

from answers import equivalent


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of one problem: c of n samples right (Chen et al. 2021, arXiv 2107.03374)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): expected 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def first_k_pass(correct: Sequence[bool], k: int) -> float:
    """1 if any of the first k samples is right, else 0."""
    if not 1 <= k <= len(correct):
        raise ValueError(f"k={k} of {len(correct)} samples: expected 1 <= k <= {len(correct)}")
    return float(any(correct[:k]))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """1 if the largest class of equivalent answers among the first k samples is right, else 0."""
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"k={k} of {len(answers)} answers and {len(correct)} marks: expected 1 <= k <= samples")
    classes: list[tuple[str, list[bool]]] = []
    for answer, right in zip(answers[:k], correct[:k], strict=True):
        if answer is None:
            continue
        for representative, members in classes:
            if equivalent(representative, answer):
                members.append(right)
                break
        else:
            classes.append((answer, [right]))
    return float(max(classes, key=lambda entry: len(entry[1]))[1][0]) if classes else 0.0


def bootstrap_interval(
    per_problem_scores: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean score, over problems."""
    scores = np.asarray(per_problem_scores, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.array([scores[rng.integers(len(scores), size=len(scores))].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
