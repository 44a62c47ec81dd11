"""Verdicts of the grader: forms of answers with wrong ones that look alike.

verdicts.py groups them by rule, kinds.txt by kind, as docs/evaluation.md shows them.
held_out.py is older than the rules; field.txt has forms that occur in the tests and issues of other graders.
"""

import re
from pathlib import Path

import pytest
from held_out import HELD_OUT, MISSES
from verdicts import CASES as VERDICTS
from verdicts import read_table

from gtpo.grading import is_correct

HERE = Path(__file__).parent
TABLE = (HERE / "kinds.txt").read_text(encoding="utf-8")
CASES = read_table(TABLE)
FIELD = read_table((HERE / "field.txt").read_text(encoding="utf-8"))
OPERATOR = re.compile(r"(?<=[a-zA-Z\d)}])\s*([-+=])\s*(?=[a-zA-Z\d({\\])")
ALL = CASES + FIELD + VERDICTS + HELD_OUT


@pytest.mark.parametrize(("gold", "answer", "expected", "kind"), ALL, ids=[f"{c[0]} <- {c[1]}" for c in ALL])
def test_verdict(gold: str, answer: str, expected: bool, kind: str) -> None:
    expected &= (gold, answer) not in MISSES
    gold = gold.replace(r"\n####", "\n####")
    assert is_correct(answer, gold) is expected, kind
    if not kind.startswith("one way"):
        assert is_correct(gold, answer) is expected, f"{kind} (arguments swapped)"


@pytest.mark.parametrize("blanks", ["", " "], ids=["none", "some"])
def test_blanks_around_operators_do_not_matter(blanks: str) -> None:
    """In all tables, where an answer is no word, date or Markdown."""
    changed = []
    for gold, answer, expected, _ in CASES + FIELD + VERDICTS:
        spaced = OPERATOR.sub(rf"{blanks}\1{blanks}", answer)
        is_formula = not re.search(r"[a-zA-Z]{3}-|<[a-z]", answer)
        if is_formula and is_correct(spaced, gold.replace(r"\n####", "\n####")) is not expected:
            changed.append((gold, answer, spaced))
    assert changed == []
