"""What a user's reward may return, and that it cannot end a run without a word."""

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from gtpo.errors import RunError, UsageError
from gtpo.grading.user_functions import checked_reward, load_rewards

# What a reward returns for the completions a, b, c: refused, though iterating it gives three numbers.
NO_LISTS: dict[str, Callable[[], Any]] = {
    "mapping": lambda: {0: 10.0, 1: 10.0, 2: 10.0},
    "mapping of numbers": lambda: dict.fromkeys([0.5, 1.5, 2.5]),
    "set": lambda: {3.0, 1.0, 2.0},
    "frozenset": lambda: frozenset([3.0, 1.0, 2.0]),
    "keys": lambda: {3.0: "a", 1.0: "b", 2.0: "c"}.keys(),
    "bytes": lambda: b"\x01\x02\x03",
    "bytearray": lambda: bytearray(3),
    "table": lambda: pd.DataFrame({0: [1.0], 1: [1.0], 2: [1.0]}),
}
LISTS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (3.0, 1.0, None),
    "generator": lambda: (value for value in (3.0, 1.0, None)),
    "values of a mapping": lambda: {"a": 3.0, "b": 1.0, "c": None}.values(),
    "series": lambda: pd.Series([3.0, 1.0, None], index=[2, 1, 0], dtype=object),
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_of_rewards_is_refused(kind: str) -> None:
    reward = checked_reward(lambda completions: NO_LISTS[kind](), "own.py:mine")
    with pytest.raises(
        RunError, match=r"own\.py:mine returned .*: expected a list with a number or None for each of 3"
    ):
        reward(completions=["a", "b", "c"])


@pytest.mark.parametrize("kind", LISTS)
def test_ordered_values_are_rewards(kind: str) -> None:
    assert checked_reward(lambda completions: LISTS[kind]())(completions=["a", "b", "c"]) == [3.0, 1.0, None]


@pytest.mark.parametrize("values", [np.array([3, 1, 2]), torch.tensor([3.0, 1.0, 2.0]), torch.tensor([[3], [1], [2]])])
def test_arrays_are_rewards(values: Any) -> None:
    assert checked_reward(lambda completions: values)(completions=["a", "b", "c"]) == [3.0, 1.0, 2.0]


# A file of a user's whose function `mine` ends the process in a way that no handler of Python sees.
EXITS = {
    "call": "import os\ndef mine(completions, **columns):\n    os._exit(0)\n",
    "name": "from os import _exit\ndef mine(completions, **columns):\n    _exit(3)\n",
    "coroutine": "import os\nasync def mine(completions, **columns):\n    os._exit(0)\n",
    "except": (
        "import os\ndef mine(completions, **columns):\n"
        "    try:\n        os._exit(0)\n    except Exception:\n        pass\n"
    ),
    "thread": (
        "import os\nfrom concurrent.futures import ThreadPoolExecutor\ndef mine(completions, **columns):\n"
        "    return list(ThreadPoolExecutor(1).map(os._exit, [0] * len(completions)))\n"
    ),
    "import": "import os\nos._exit(0)\n",
}


@pytest.mark.parametrize("kind", EXITS)
def test_a_function_that_exits_at_once_is_named(kind: str, tmp_path: Path) -> None:
    """In a fork, which the exit would end instead of the tests: 0 where the error was raised."""
    (tmp_path / f"{kind}.py").write_text(EXITS[kind])
    child = os.fork()
    if not child:
        seen = 9
        try:
            [reward] = load_rewards([f"{tmp_path}/{kind}.py:mine"], {}, [])
            called = reward(completions=["a"])
            if asyncio.iscoroutine(called):
                asyncio.run(called)
        except (RunError, UsageError) as error:
            seen = 0 if re.search(rf"{kind}\.py:mine .*SystemExit: os\._exit\([03]\)", str(error)) else 8
        finally:
            os._exit(20 + seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20


def test_a_process_that_a_function_forks_may_exit() -> None:
    def forks(completions: list[str]) -> list[float]:
        codes = []
        for text in completions:
            child = os.fork()
            if not child:
                os._exit(len(text))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return [float(code) for code in codes]

    assert checked_reward(forks)(completions=["a", "abc"]) == [1.0, 3.0]
