"""The grader on the real data files: every gold answer is read, equals itself, and differs from the others."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from test_kinds import CASES as KINDS

from gtpo.grading import gsm8k_gold, is_correct, last_boxed, normalise
from gtpo.grading.worker import shared_worker


@pytest.fixture(scope="module")
def golds(data_dir: Path) -> dict[str, list[str | None]]:
    """The gold answer of every row of every data file, by file name."""
    read = {
        "gsm8k_train.jsonl": lambda row: gsm8k_gold(row["answer"]),
        "gsm8k_test.jsonl": lambda row: gsm8k_gold(row["answer"]),
        "math_train.jsonl": lambda row: last_boxed(row["solution"]),
        "math_test.jsonl": lambda row: last_boxed(row["solution"]),
        "math500_test.jsonl": lambda row: row["answer"],
        "aime2024.jsonl": lambda row: row["answer"],
        "aime2025.jsonl": lambda row: str(row["answer"]),
        "amc2023.jsonl": lambda row: row["answer"],
    }
    found = {}
    for name, gold_of in read.items():
        path = data_dir / name
        with path.open() as lines:
            found[name] = [gold_of(json.loads(line)) for line in lines]
    return found


def test_every_gold_is_read(golds: dict[str, list[str | None]]) -> None:
    missing = {name: sum(gold is None for gold in values) for name, values in golds.items()}
    assert missing == dict.fromkeys(missing, 0) | {"math_train.jsonl": 2}  # two empty boxes
    assert [len(values) for values in golds.values()] == [7473, 1319, 7500, 5000, 500, 30, 30, 40]


def test_every_gold_equals_itself_without_sympy(golds: dict[str, list[str | None]]) -> None:
    before = shared_worker.calls
    for values in golds.values():
        assert [gold for gold in values if gold and not is_correct(gold, gold)] == []
        assert [gold for gold in values if gold and not is_correct(rf"The answer is $\boxed{{{gold}}}$.", gold)] == []
    assert shared_worker.calls == before


def test_other_golds_are_wrong_and_rarely_reach_sympy(golds: dict[str, list[str | None]]) -> None:
    rng = random.Random(0)
    values = [gold for gold in golds["math_train.jsonl"] + golds["math_test.jsonl"] if gold]
    pairs = [(rng.choice(values), rng.choice(values)) for _ in range(1500)]
    before = shared_worker.calls
    for a, b in pairs:
        if is_correct(a, b):  # the same number, or two spellings of the same answer
            digits = ["".join(filter(str.isalnum, normalise(text).split("=")[-1])) for text in (a, b)]
            assert digits[0].startswith(digits[1]) or digits[1].startswith(digits[0]), (a, b)
    assert shared_worker.calls - before <= len(pairs) // 5


DRESSES = ("{}", r"\boxed{{{}}}", "${}$", "**{}**", "{}.", "The answer is {}.", "The answer is ${}$.")
SAME = [("5", "x=5")]  # neighbours that mathematics calls equal


@pytest.mark.slow
def test_a_gold_equals_itself_in_every_dress(golds: dict[str, list[str | None]]) -> None:
    rng = random.Random(0)
    chosen = [gold for gold, _, is_right, kind in KINDS if is_right and not kind.startswith("one way")]
    same = []
    for values in golds.values():
        pairs = [(gold, following) for gold, following in pairwise(values) if gold and following]
        for gold, following in rng.sample(pairs, min(300, len(pairs))):
            chosen.append(gold)
            if normalise(gold) != normalise(following) and is_correct(following, gold):
                same.append((gold, following))
    dressed = [(dress.format(gold), gold) for gold in chosen for dress in DRESSES]
    assert [pair for pair in dressed if not is_correct(*pair)] == []
    assert same == SAME
