"""A function of the user as the judge of a benchmark whose answers are not strings: code, proofs, lists of checks."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gtpo.errors import RunError
from gtpo.evaluation.storage import Row
from gtpo.reward_functions import JUDGING, load_rewards

# (problem, its prompt as a conversation, completions) -> whether each is right
Judge = Callable[[Row, list[dict[str, Any]], Sequence[str]], list[bool]]


def load_judge(name: str, columns: Collection[str]) -> Judge:
    """The judge of ``--judge``: called as TRL calls a reward function, a completion is right above 0.

    Args:
        name: ``file.py:function`` or ``module:function``.
        columns: Columns of the benchmark, as :func:`gtpo.data.load_user_benchmark` names them.

    Raises:
        UsageError: As :func:`gtpo.reward_functions.load_rewards`.
    """
    [reward] = load_rewards([name], {}, columns, JUDGING)

    def judge(problem: Row, prompt: list[dict[str, Any]], texts: Sequence[str]) -> list[bool]:
        values = reward(
            prompts=[prompt for _ in texts],
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            **{column: [value for _ in texts] for column, value in problem["columns"].items()},
        )
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        if None in values:
            raise RunError(f"the judge {name} returned None for {problem['id']}: expected a number; {JUDGING.advice}.")
        return [value > 0 for value in values]

    return judge
