"""Forms of answers by kind, with wrong ones that look alike: kinds.txt, shown in docs/evaluation.md."""

import re
from pathlib import Path

import pytest
from verdicts import read_table

from gtpo.grading import is_correct

TABLE = Path(__file__).with_name("kinds.txt").read_text(encoding="utf-8")
CASES = read_table(TABLE)
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


def test_the_page_shows_rows_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    shown = re.findall("`([^`\n]+ </?- [^`\n]+)`", page)
    assert len(shown) >= 14
    assert set(shown) <= set(TABLE.splitlines())
