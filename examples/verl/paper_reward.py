"""The rewards of the paper (Section 8.2) for verl, as ``reward.custom_reward_function.path``.

``rewards.py`` of this repository grades; it needs the repository's root on PYTHONPATH, sympy and math-verify.
"""

from typing import Any

from rewards import ACCURACY_MAX, FORMAT_MAX, accuracy_reward, format_reward


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, float]:
    """``score``: the sum of both rewards, 0 to 20; ``acc`` and ``format``: their shares of the maximum, 0 to 1."""
    (formatting,) = format_reward([solution_str])
    (accuracy,) = accuracy_reward([solution_str], [ground_truth])
    return {"score": formatting + accuracy, "acc": accuracy / ACCURACY_MAX, "format": formatting / FORMAT_MAX}
