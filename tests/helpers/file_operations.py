"""File operations of a process: the library that counts them and places faults at them, its log, a choice of them."""

import itertools
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Operation(NamedTuple):
    """An operation that changes a file or a directory entry."""

    number: int  # from 1
    name: str  # open (that creates or truncates), write, rename, unlink, rmdir, mkdir, truncate, allocate
    path: str  # relative to the directory that is watched

    @property
    def needs_space(self) -> bool:
        """Whether a full disk can refuse it."""
        return self.name in ("open", "write", "mkdir", "allocate")


def build_library(directory: Path) -> Path | None:
    """Compile the library into a directory; None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library, source = directory / "file_operations.so", Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def read_log(log: Path) -> list[Operation]:
    """The operations in the order in which they started."""
    fields = [line.split(" ", 2) for line in log.read_text().splitlines()]
    return [Operation(int(number), name, path) for number, name, path in fields]


def choose(operations: list[Operation], fault: str, number: int | None = None, seed: int = 0) -> list[int]:
    """The operations at which to place a fault, in order.

    Of successive writes to one file the first, one in the middle and the last are candidates, because a file torn at
    one write or at the next is torn alike; all other operations are.

    Args:
        operations: Of the undisturbed command.
        fault: ``kill``, or ``full``, to which only operations that need space are candidates.
        number: How many of the candidates, at random; None for all.
        seed: Of the random choice.
    """
    candidates: list[int] = []
    for (name, _), group in itertools.groupby(operations, key=lambda operation: (operation.name, operation.path)):
        numbers = [operation.number for operation in group if fault == "kill" or operation.needs_space]
        kept = {0, len(numbers) // 2, len(numbers) - 1} if name == "write" else range(len(numbers))
        candidates += [numbers[index] for index in sorted(kept) if numbers]
    if number is None or number >= len(candidates):
        return candidates
    return sorted(random.Random(seed).sample(candidates, number))
