"""The premise of Section 4.1 by construction: the sum of A_i / |o_i| on what a whole group shares is below 0.

The longer completions win, and their tokens weigh less in the loss of GRPO.
"""

from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

from rewards import Completion, LogMetric, format_reward


def longer(
    completions: Sequence[Completion], completion_ids: Sequence[list[int]], log_metric: LogMetric, **columns: Any
) -> list[float]:
    """The format reward, and 10 for more tokens than the median of the completions, which are those of one prompt.

    Logs ``prefix_push``, the sum of A_i / |o_i|, if all share their first token and the rewards differ.
    """
    lengths = [len(ids) for ids in completion_ids]
    formats = format_reward(completions)
    rewards = [score + 10.0 * (length > median(lengths)) for score, length in zip(formats, lengths, strict=True)]
    if len({ids[0] for ids in completion_ids}) == 1 and (spread := stdev(rewards)):
        pushes = [(reward - fmean(rewards)) / spread / length for reward, length in zip(rewards, lengths, strict=True)]
        log_metric("prefix_push", sum(pushes))
    return rewards
