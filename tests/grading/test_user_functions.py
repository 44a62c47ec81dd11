"""What a user's reward may return, and that it cannot end a run without a word."""

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from gtpo.errors import RunError, UsageError
from gtpo.grading.user_functions import checked_reward, load_rewards

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
    """In a fork, which the exit would end instead of the tests."""
    file = tmp_path / f"{kind}.py"
    file.write_text(EXITS[kind])
    child = os.fork()
    if not child:
        try:
            [reward] = load_rewards([f"{file}:mine"], {}, [])
            called = reward(completions=["a"])
            asyncio.run(called)
        except (RunError, UsageError) as error:
            named = re.search(rf"{kind}\.py:mine .*SystemExit: os\._exit\([03]\)", str(error))
            os._exit(20 if named else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20


def exit_code_of_a_fork(code: int) -> int:
    child = os.fork()
    if not child:
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_a_function_forks_may_exit() -> None:
    reward = checked_reward(lambda completions: [exit_code_of_a_fork(len(text)) for text in completions])
    assert reward(completions=["a", "abc"]) == [1.0, 3.0]
