"""Agreement with lm-evaluation-harness, from its stored verdicts: the numbers of the docs, and the reasons."""

import sys

import pytest
from helpers.scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "harness"))

import agreement

DOCS = (ROOT / "benchmarks" / "harness" / "README.md").read_text().splitlines()


@pytest.fixture(scope="module")
def verdicts() -> list[agreement.Verdict]:
    return agreement.compare()


def test_every_disagreement_has_a_reason(verdicts: list[agreement.Verdict]) -> None:
    assert not [v for v in verdicts if v.ours != v.theirs and not agreement.reason(v)]


def test_the_docs_have_these_numbers(verdicts: list[agreement.Verdict]) -> None:
    assert not [line for line in agreement.table(verdicts) if line not in DOCS]


def test_there_are_completions_of_every_kind(verdicts: list[agreement.Verdict]) -> None:
    rows = {v.row["id"]: v.row for v in verdicts}.values()
    assert len(rows) >= 450
    assert {row["benchmark"] for row in rows} == {"gsm8k", "math500"}
    assert sum(row["kind"] == "sampled" for row in rows) >= 50
    right = sum(agreement.grade_text(row["completion"], row["gold"]).correct for row in rows)
    assert 150 < right < len(rows) - 150
