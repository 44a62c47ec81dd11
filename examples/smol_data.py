"""Write the data of `study compare smol`: short word problems, and imperfect solutions for the warm start of SmolLM2.

python examples/smol_data.py outputs/reproduce/smol/data
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_base import TINY, imperfect_targets

from gtpo.data.arithmetic import arithmetic
from gtpo.prompts import to_completion

STEPS, HARD_STEPS = (1, 2), (3, 4)  # operations of a problem
SIZES = {"warm_start": 2000, "train": 2000, "test": 128}
# Of the stored comparison: a quarter are guesses, half lack a tag, any of the four. The tiny base has more of both.
RECIPE = TINY | {"guessed": 0.25, "spoiled_format": 0.5, "spoiled_reasoning_end": 0.0}


def write_data(directory: Path) -> None:
    """Write prompt, answer, solution: warm_start.jsonl, and train and test, each also with the prefix hard_.

    Half of the solutions in warm_start.jsonl lack one tag.
    """
    rows: dict[str, Iterable[dict[str, Any]]] = {
        "warm_start": (
            {"prompt": question, "solution": target}
            for question, target in imperfect_targets(SIZES["warm_start"], 0, STEPS, RECIPE)
        )
    }
    for split, seed in (("train", 2), ("test", 0)):
        for prefix, steps in (("", STEPS), ("hard_", HARD_STEPS)):
            rows[prefix + split] = [
                {"prompt": row.prompt, "answer": row.gold} | {"solution": to_completion(row.solution, row.gold)}
                for row in arithmetic(split, SIZES[split], seed, steps)
            ]
    directory.mkdir(parents=True, exist_ok=True)
    for name, of_name in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_name), encoding="utf-8")


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
