"""Forms of answers by kind, with wrong ones that look alike: the tables of kinds.txt and of docs/evaluation.md."""

from pathlib import Path
from typing import NamedTuple

import pytest

from gtpo.grading import equivalent, is_correct

TABLE = Path(__file__).with_name("kinds.txt").read_text(encoding="utf-8")


class Row(NamedTuple):
    kind: str
    gold: str
    answer: str
    is_right: bool
    is_symmetric: bool  # not where the form of the gold answer decides


def read_rows(table: str) -> list[Row]:
    """``gold <- answer`` is right, ``gold </- answer`` wrong; with ``~`` for ``-`` in this direction only."""
    rows, kind = [], ""
    for line in table.splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        sign = next(sign for sign in (" </- ", " </~ ", " <~ ", " <- ") if sign in line)
        gold, answer = line.replace(r"\n#", "\n#").split(sign, 1)
        rows.append(Row(kind, gold, answer, "/" not in sign, "~" not in sign))
    return rows


ROWS = read_rows(TABLE)
KINDS = list(dict.fromkeys(row.kind for row in ROWS))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.gold} <- {row.answer}")
def test_verdict(row: Row) -> None:
    assert is_correct(row.answer, row.gold) is row.is_right, row.kind
    assert equivalent(row.answer, row.gold) is equivalent(row.gold, row.answer)
    if row.is_symmetric:
        assert is_correct(row.gold, row.answer) is row.is_right, f"{row.kind} (arguments swapped)"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_answers_that_look_alike_and_are_wrong(kind: str) -> None:
    verdicts = [row.is_right for row in ROWS if row.kind == kind]
    assert verdicts.count(True) >= 3 and verdicts.count(False) >= 1
