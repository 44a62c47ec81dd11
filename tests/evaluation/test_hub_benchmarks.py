r"""Benchmarks of the Hub that docs/evaluation.md names, read from small files in the same columns.

The rows are made up; ids, configurations, splits, columns and their types are those of the datasets.
"""

import re
from typing import Any

import pytest
from helpers.scripts import ROOT

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.jobs import load_problems, select_benchmarks
from gtpo.grading import is_correct

DOCS = (ROOT / "docs" / "evaluation.md").read_text()

MINERVA = [
    {"question": "Each of the two sources ... in Angstroms.", "answer": "2.45e6"},
    {"question": "Find $y(t)$ ...", "answer": "e^{-t} + 2"},
    {"question": "What is $z$ ... to four decimal places?", "answer": 0.6321},
]
OLYMPIAD = [
    {
        "id": 1606,
        "question": "Let $T$ be ...",
        "solution": ["By symmetry ..."],
        "final_answer": ["2"],
        "context": None,
        "image_1": None,
        "modality": "Text-only",
        "is_multiple_answer": False,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
    },
    {"question": "Find all ...", "final_answer": ["$\\frac{1}{2}$,$-3$"], "is_multiple_answer": True},
    {"question": "Determine ...", "final_answer": ["(1,2)", "(2,1)"], "is_multiple_answer": True},
    {"question": "A proof", "final_answer": None},
]
OLYMPIAD = [{key: row.get(key) for key in OLYMPIAD[0]} for row in OLYMPIAD]
AIME = [{"problem_idx": 1, "problem": "Find $m+n$.", "answer": 902}, {"problem_idx": 2, "problem": "?", "answer": 33}]


@pytest.mark.parametrize(
    ("hub_id", "config", "split", "rows", "answers"),
    [
        (
            "math-ai/minervamath",
            None,
            "test",
            MINERVA[:2],
            [("2.45e6", r"2.45 \times 10^6"), ("e^{-t} + 2", "2+e^{-t}")],
        ),
        ("math-ai/minervamath", None, "test", MINERVA[2:], [("0.6321", "0.6321")]),
        (
            "Hothan/OlympiadBench",
            "OE_TO_maths_en_COMP",
            "train",
            OLYMPIAD,
            [("2", "2.0"), (r"$\frac{1}{2}$,$-3$", "-3 and 0.5"), ("(1,2), (2,1)", "(2,1), (1,2)")],
        ),
        ("MathArena/aime_2026", None, "train", AIME, [("902", "m+n=902"), ("33", "033")]),
    ],
)
def test_the_command_of_the_docs_reads_the_columns(
    hub_id: str,
    config: str | None,
    split: str,
    rows: list[dict[str, Any]],
    answers: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datasets import Dataset

    def load_dataset(asked: str, asked_config: str | None, split: str) -> Dataset:
        read.append((asked, asked_config, split))
        return Dataset.from_list(rows)

    read: list[tuple[str, str | None, str]] = []
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    command = next(line for line in DOCS.splitlines() if f"--benchmarks {hub_id}" in line)
    flags, _ = parse_evaluation(EvaluationArguments, re.sub(r"\s#.*", "", command).split()[2:])
    [(name, source)] = select_benchmarks(flags).items()
    found = load_problems(name, source, flags)
    problems = found.rows
    assert read == [(hub_id, config, split)]
    assert [problem.gold for problem in problems] == [gold for gold, _ in answers]
    assert all(is_correct(answer, gold) for gold, answer in answers)
    assert found.dropped == ({"with an empty answer": 1} if rows is OLYMPIAD else {})
    assert problems[0].question == rows[0].get("question", rows[0].get("problem"))
