"""Forms of answers by kind, with wrong ones that look alike: kinds.txt, shown in docs/evaluation.md."""

from pathlib import Path

import pytest
from verdicts import read_table

from gtpo.grading import is_correct

CASES = read_table(Path(__file__).with_name("kinds.txt").read_text(encoding="utf-8"))
KINDS = sorted({kind for *_, kind in CASES})


@pytest.mark.parametrize(("gold", "answer", "expected", "kind"), CASES, ids=[f"{c[0]} <- {c[1]}" for c in CASES])
def test_verdict(gold: str, answer: str, expected: bool, kind: str) -> None:
    gold = gold.replace(r"\n####", "\n####")
    assert is_correct(answer, gold) is expected, kind
    if not kind.startswith("one way"):
        assert is_correct(gold, answer) is expected, f"{kind} (arguments swapped)"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_answers_that_look_alike_and_are_wrong(kind: str) -> None:
    assert {case[2] for case in CASES if case[3] == kind} == {True, False}
