"""Verdicts of the grader: forms of answers with wrong ones that look alike.

verdicts.py groups them by rule, kinds.txt by kind, as docs/evaluation.md shows them.
held_out.py is older than the rules; field.txt has forms that occur in the tests and issues of other graders; beside.txt
has what may and may not stand beside a value.
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
BESIDE = read_table((HERE / "beside.txt").read_text(encoding="utf-8"))
OPERATOR = re.compile(r"(?<=[a-zA-Z\d)}])\s*([-+=])\s*(?=[a-zA-Z\d({\\])")
ALL = CASES + FIELD + BESIDE + VERDICTS + HELD_OUT


@pytest.mark.parametrize("kind", sorted({kind for *_, kind in ALL}))
def test_verdicts(kind: str) -> None:
    wrong = []
    for gold, answer, expected, _ in (case for case in ALL if case[3] == kind):
        expected &= (gold, answer) not in MISSES
        gold = gold.replace(r"\n####", "\n####")
        if is_correct(answer, gold) is not expected:
            wrong.append(f"{gold} <- {answer}")
        elif not kind.startswith("one way") and is_correct(gold, answer) is not expected:
            wrong.append(f"{gold} <- {answer}, swapped")
    assert wrong == []


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
