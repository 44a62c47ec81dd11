"""Arithmetic word problems with worked solutions, generated from a seed: what the tiny model is trained on.

Problems of one to three steps are for training and testing. Those of four and five steps are never trained on; they
replace AIME and AMC for the tiny model.
"""

import random
import zlib
from collections.abc import Iterator

from gtpo.data.tables import Row

_NAMES = ["Ann", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe"]
_THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
_EVENTS = {"+": "finds {} more", "-": "gives away {}", "*": "gets {} times as many"}


def arithmetic(split: str, size: int, seed: int, steps: tuple[int, ...] = (1, 2, 3)) -> Iterator[Row]:
    """``size`` distinct word problems of so many operations, of the split train or test.

    A solution has a line for each operation. No training problem is a test problem, for any seed.
    """
    generator = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    while len(seen) < size:
        row = _word_problem(generator, generator.choice(steps))
        in_test = zlib.crc32(row.prompt.encode()) % 5 == 0  # a fifth of all problems is for testing
        if row.prompt not in seen and in_test == (split == "test"):
            seen.add(row.prompt)
            yield row


def _word_problem(generator: random.Random, steps: int) -> Row:
    name = generator.choice(_NAMES)
    thing = generator.choice(_THINGS)
    total = generator.randint(2, 10)
    story = [f"{name} has {total} {thing}."]
    working = []
    for _ in range(steps):
        operation = generator.choice("+" * (total < 30) + "-" * (total > 2) + "*" * (total <= 10))
        bounds = {
            "+": (1, 9),
            "-": (1, min(total - 1, 9)),
            "*": (2, 3),
        }[operation]
        number = generator.randint(*bounds)
        result = {
            "+": total + number,
            "-": total - number,
            "*": total * number,
        }[operation]
        story.append(f"{name} {_EVENTS[operation].format(number)}.")
        working.append(f"{total} {operation} {number} = {result}")
        total = result
    story.append(f"How many {thing} does {name} have?")
    return Row(prompt=" ".join(story), gold=str(total), solution="\n".join(working))
