"""The grader on the real data files: every gold answer is read, equals itself, and differs from the others."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_lines
from test_kinds import CASES as KINDS

from gtpo.grading import gsm8k_gold, is_correct, last_boxed, normalise
from gtpo.grading.worker import shared_worker

SIZES = {
    "gsm8k_train": 7473,
    "gsm8k_test": 1319,
    "math_train": 7500,
    "math_test": 5000,
    "math500_test": 500,
    "aime2024": 30,
    "aime2025": 30,
    "amc2023": 40,
}


def gold_of(row: dict[str, Any]) -> str | None:
    """Of GSM8K and MATH after or within the solution."""
    if "####" in str(row.get("answer")):
        return gsm8k_gold(row["answer"])
    return str(row["answer"]) if "answer" in row else last_boxed(row["solution"])


@pytest.fixture(scope="module")
def golds(data_dir: Path) -> dict[str, list[str | None]]:
    """The gold answer of every row of every data file, by its name."""
    return {name: [gold_of(row) for row in read_lines(data_dir / f"{name}.jsonl")] for name in SIZES}


@pytest.fixture(scope="module")
def read(golds: dict[str, list[str | None]]) -> list[str]:
    return [gold for values in golds.values() for gold in values if gold]


def test_every_gold_is_read(golds: dict[str, list[str | None]]) -> None:
    assert {name: len(values) for name, values in golds.items()} == SIZES
    assert {name: values.count(None) for name, values in golds.items() if None in values} == {"math_train": 2}  # empty


def test_every_gold_equals_itself_without_sympy(read: list[str]) -> None:
    before = shared_worker.calls
    assert [gold for gold in read if not is_correct(gold, gold)] == []
    assert [gold for gold in read if not is_correct(rf"The answer is $\boxed{{{gold}}}$.", gold)] == []
    assert shared_worker.calls == before


SAME = [(r"7\%", "7"), ("8", "K=8")]  # pairs that our rules call equal


def test_other_golds_are_wrong_and_rarely_reach_sympy(read: list[str]) -> None:
    pairs = random.Random(0).sample([*pairwise(read)], 3000)
    before = shared_worker.calls
    right = [pair for pair in pairs if is_correct(*pair) and normalise(pair[0]) != normalise(pair[1])]
    assert right == SAME
    assert shared_worker.calls - before <= len(pairs) // 5


DRESSES = ("{}", r"\boxed{{{}}}", "${}$", "**{}**", "{}.", "The answer is {}.", "The answer is ${}$.")


@pytest.mark.slow
def test_a_gold_equals_itself_in_every_dress(read: list[str]) -> None:
    chosen = [gold for gold, _, is_right, kind in KINDS if is_right and not kind.startswith("one way")]
    chosen += random.Random(0).sample(read, 1500)
    dressed = [(dress.format(gold), gold) for gold in chosen for dress in DRESSES]
    assert [pair for pair in dressed if not is_correct(*pair)] == []
