r"""Benchmarks of the Hub that docs/evaluation.md names, read from small files in the same columns.

The rows are made up; ids, configurations, splits, columns and their types are those of the datasets.
"""

import re
from typing import Any

from helpers.scripts import ROOT
from pytest import MonkeyPatch, mark

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.benchmarks import select_benchmarks
from gtpo.grading import is_correct

DOCS = (ROOT / "docs" / "evaluation.md").read_text()

MINERVA = [{"question": "In Angstroms?", "answer": "2.45e6"}, {"question": "$y(t)$?", "answer": "e^{-t} + 2"}]
OLYMPIAD = [
    {"question": "Find all ...", "final_answer": ["$\\frac{1}{2}$,$-3$"]},
    {"question": "Determine ...", "final_answer": ["(1,2)", "(2,1)"]},
    {"question": "A proof", "final_answer": None},
]
AIME = [{"problem_idx": 1, "problem": "Find $m+n$.", "answer": 902}, {"problem_idx": 2, "problem": "?", "answer": 33}]
OF_MINERVA = [("2.45e6", r"2.45 \times 10^6"), ("e^{-t} + 2", "2+e^{-t}")]
OF_OLYMPIAD = [(r"$\frac{1}{2}$,$-3$", "-3 and 0.5"), ("(1,2), (2,1)", "(2,1), (1,2)")]


@mark.parametrize(
    ("hub_id", "config", "split", "rows", "answers"),
    [
        ("math-ai/minervamath", None, "test", MINERVA, OF_MINERVA),
        ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", OLYMPIAD, OF_OLYMPIAD),
        ("MathArena/hmmt_nov_2025", None, "train", AIME, [("902", "m+n=902"), ("33", "033")]),
    ],
)
def test_the_command_of_the_docs_reads_the_columns(
    hub_id: str,
    config: str | None,
    split: str,
    rows: list[dict[str, Any]],
    answers: list[tuple[str, str]],
    monkeypatch: MonkeyPatch,
) -> None:
    from datasets import Dataset

    def load_dataset(asked: str, asked_config: str | None, split: str) -> Dataset:
        read.append((asked, asked_config, split))
        return Dataset.from_list(rows)

    read: list[tuple[str, str | None, str]] = []
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    command = next(line for line in DOCS.replace("\\\n", " ").splitlines() if f"--benchmarks {hub_id}" in line)
    flags, _ = parse_evaluation(EvaluationArguments, re.sub(r"\s#.*", "", command).split()[2:])
    [benchmark] = select_benchmarks(flags)
    found = benchmark.load()
    problems = found.rows
    assert read == [(hub_id, config, split)]
    assert [problem.gold for problem in problems] == [gold for gold, _ in answers]
    assert all(is_correct(answer, gold) for gold, answer in answers)
    assert found.dropped == ({"with an empty answer": 1} if rows is OLYMPIAD else {})
    assert problems[0].question == rows[0].get("question", rows[0].get("problem"))
