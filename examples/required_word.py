"""A custom task without mathematics: data and a reward function. The answer must contain a required word.

    python examples/required_word.py          # writes examples/required_word.jsonl
    python train_gtpo.py --model tiny --dataset examples/required_word.jsonl \\
        --reward format examples/required_word.py:word_reward

The tiny model only writes small sums, so the words are digits. "1" is required if the story is about apples, books,
cards or coins, "2" if it is about eggs, pens, shells or stamps. The result of the sum does not matter.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script

from gtpo.data.arithmetic import arithmetic
from gtpo.grading import extract_answer

WORDS = {
    "apples": "1",
    "books": "1",
    "cards": "1",
    "coins": "1",
    "eggs": "2",
    "pens": "2",
    "shells": "2",
    "stamps": "2",
}
WORD_MAX = 10.0


def word_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """10 for each completion whose answer block contains its required word, else 0; TRL's signature."""
    return [
        WORD_MAX if word in (extract_answer(completion[0]["content"]) or "") else 0.0
        for completion, word in zip(completions, answer, strict=True)
    ]


def rows(size: int = 400) -> Iterator[dict[str, str]]:
    """Training rows: ``prompt``, a story, and ``answer``, its required word."""
    for row in arithmetic("train", size, seed=0):
        yield {
            "prompt": row.prompt,
            "answer": next(word for thing, word in WORDS.items() if f" {thing}." in row.prompt),
        }


if __name__ == "__main__":
    lines = [json.dumps(row) + "\n" for row in rows()]
    Path(__file__).with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
