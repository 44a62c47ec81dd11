"""What a user's reward may return."""

import asyncio
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from gtpo.errors import RunError
from gtpo.grading.user_functions import checked_reward

# What a reward returns for the completions a, b, c: refused, though iterating it gives three numbers.
NO_LISTS = {
    "mapping": {0: 10.0, 1: 10.0, 2: 10.0},
    "set": {3.0, 1.0, 2.0},
    "frozenset": frozenset([3.0, 1.0, 2.0]),
    "keys": {3.0: "a", 1.0: "b", 2.0: "c"}.keys(),
    "bytes": b"\x01\x02\x03",
    "bytearray": bytearray(3),
    "table": pd.DataFrame({0: [1.0], 1: [1.0], 2: [1.0]}),
}
LISTS = {
    "tuple": (3.0, 1.0, 2.0),
    "generator": iter([3.0, 1.0, 2.0]),
    "values of a mapping": {"a": 3.0, "b": 1.0, "c": 2.0}.values(),
    "series": pd.Series([3.0, 1.0, 2.0], index=[2, 1, 0]),
    "array": np.array([3, 1, 2]),
    "tensor": torch.tensor([[3.0], [1.0], [2.0]]),
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_of_rewards_is_refused(kind: str) -> None:
    reward = checked_reward(lambda completions: NO_LISTS[kind], "own.py:mine")
    with pytest.raises(
        RunError, match=r"own\.py:mine returned .*: expected a list with a number or None for each of 3"
    ):
        reward(completions=["a", "b", "c"])


@pytest.mark.parametrize("kind", LISTS)
def test_ordered_values_are_rewards(kind: str) -> None:
    assert checked_reward(lambda completions: LISTS[kind])(completions=["a", "b", "c"]) == [3.0, 1.0, 2.0]


def test_a_reward_may_be_none() -> None:
    assert checked_reward(lambda completions: [3.0, None])(completions=["a", "b"]) == [3.0, None]


def test_trl_gets_infinity_for_nan_and_none_for_none() -> None:
    """TRL takes NaN for None: a reward that is not a number would be one that does not apply."""

    def mine(completions: Any, **_: Any) -> list[Any]:
        return [1, float("nan"), None]

    async def awaited(completions: Any, **_: Any) -> list[Any]:
        return mine(completions)

    for function in (mine, awaited):
        reward = checked_reward(function, function.__name__)
        given = reward(completions=["a", "b", "c"])
        assert (asyncio.run(given) if function is awaited else given) == [1.0, math.inf, None]
        assert repr(reward.returned) == "[1.0, nan, None]"
