"""A user's function as the grader of a benchmark whose answers are not strings: code, proofs, lists of checks."""

import asyncio
import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any

from gtpo.errors import RunError
from gtpo.evaluation.records import Problem, UserGrader
from gtpo.grading.user_functions import load_rewards


def load_user_grader(name: str, columns: Collection[str]) -> UserGrader:
    """The function of ``--grader``, ``file.py:function`` or ``module:function``; ``columns``: those of the benchmark.

    It is called as TRL calls a reward function; a completion is correct above 0.
    """
    [reward] = load_rewards([name], {}, columns, noun="grader")

    def grade(problem: Problem, prompt: list[dict[str, Any]], texts: Sequence[str]) -> list[bool]:
        called = reward(
            prompts=[prompt for _ in texts],
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            **{column: [value for _ in texts] for column, value in problem.columns.items()},
        )
        if inspect.iscoroutine(called):
            asyncio.run(called)
        correct = []
        for value in reward.returned:
            if value is None or math.isnan(value):
                raise RunError(f"the grader {name} returned {value} for {problem.id}: expected a number.")
            correct.append(value > 0)
        return correct

    return grade
