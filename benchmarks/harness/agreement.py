"""Compare the grader with lm-evaluation-harness on the same completions: agreement in numbers, every disagreement.

    python benchmarks/harness/agreement.py --disagreements   # from the stored verdicts of the harness

A constructed completion counts by the strict rule, since its answer block has the answer that the harness finds in its
own form; a sampled one by the lenient rule. benchmarks/harness/README.md explains the disagreements.
"""

import argparse
import json
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gtpo.grading import grade_text

DECIMAL = r"a number with .0, or \dfrac"
DATA = Path(__file__).resolve().parents[2] / "tests" / "stored" / "harness"


class Verdict(NamedTuple):
    """One completion by both: whether it is right."""

    row: dict[str, Any]
    scorer: str
    ours: bool
    theirs: bool


def compare() -> list[Verdict]:
    """Every completion by every scorer of its benchmark."""
    rows = [json.loads(line) for line in (DATA / "completions.jsonl").read_text().splitlines()]
    stored = json.loads((DATA / "verdicts.json").read_text())["verdicts"]
    verdicts = []
    for row in rows:
        graded = grade_text(row["completion"], row["gold"])
        ours = graded.correct_leniently if row["kind"] == "sampled" else graded.correct
        verdicts += [Verdict(row, scorer, ours, bool(theirs)) for scorer, theirs in stored[str(row["id"])].items()]
    return verdicts


def is_sampled(verdict: Verdict) -> bool:
    return bool(verdict.row["kind"] == "sampled")


def reason(verdict: Verdict) -> str:  # noqa: C901, PLR0912
    """Why the two disagree; empty if no rule below says it."""
    kind = verdict.row["kind"]
    gold = verdict.row["gold"]
    scorer = verdict.scorer
    if verdict.ours and kind == "a/b for a fraction" and "137 1/2" in verdict.row["completion"]:
        return "it does not know mixed numbers with a slash: 137 1/2"
    if verdict.ours and "math_verify" in scorer and r"\left\left" in verdict.row["completion"]:
        return r"it cannot read \left twice"
    if scorer == "minerva_math, math_verify" and not is_sampled(verdict):
        if verdict.ours and not gold.isdigit():
            return "it passes the gold answer to math-verify without dollar signs, so LaTeX in it is not read"
        if verdict.theirs and kind == "two answers":
            return "math-verify takes one of two answers"
    if (
        scorer == "strict-match"
        and verdict.ours
        and kind in ("a dollar", "a name in front", "a number with .0, or \\dfrac")
    ):
        return "it needs a bare number after #### and compares it as text: no sign of dollars, no name, 18.0 is not 18"
    if scorer == "strict-match" and verdict.theirs and kind in ("two answers", "plus one"):
        return "it takes the first number after ####: 30 or 5 and 30+1 are 30"
    if scorer == "flexible-extract" and verdict.ours and kind == DECIMAL:
        return "it compares numbers as text: 18.0 is not 18"
    if scorer == "minerva_math" and verdict.ours and re.search(r"matrix|^(?:\\left)?\s*[(\[].*[)\]]$|\\frac\d", gold):
        return "sympy cannot read the gold answer (a matrix, tuple, interval, \\frac9{19}): it does not equal itself"
    if scorer == "hendrycks_math" and verdict.theirs and kind == "two answers":
        return "it cuts the answer at \\text, as a unit: 120 \\text{ or } 1600 is 120"
    if scorer == "hendrycks_math" and verdict.ours and kind in (DECIMAL, "a dollar"):
        return "it compares text: 6.0 is not 6, and the dollar of \\$6 ends the mathematics"
    if scorer == "strict-match" and verdict.ours and is_sampled(verdict):
        return "it needs ####, and the lenient answer is the last number"
    if scorer == "minerva_math, math_verify" and verdict.theirs and is_sampled(verdict):
        return r"without dollar signs it reads 3\sqrt{13} as 3, which is what the model wrote"
    return ""


def table(verdicts: list[Verdict]) -> list[str]:
    """A line per scorer, with the numbers of benchmarks/harness/README.md."""
    lines = []
    for key, group in groupby(sorted(verdicts, key=_group), _group):
        benchmark, sampled, scorer = key
        counts = Counter((v.ours, v.theirs) for v in group)
        equal = counts[True, True] + counts[False, False]
        total = sum(counts.values())
        lines.append(
            f"| {benchmark}, {'sampled' if sampled else 'constructed'} | {scorer} | {equal} of {total} | "
            f"{counts[True, False]} | {counts[False, True]} |"
        )
    return lines


def _group(verdict: Verdict) -> tuple[str, bool, str]:
    return verdict.row["benchmark"], is_sampled(verdict), verdict.scorer


def reasons(verdicts: list[Verdict]) -> list[str]:
    """A line per reason of a disagreement."""
    counts = Counter((v.scorer, v.ours, reason(v)) for v in verdicts if v.ours != v.theirs)
    return [
        f"| {scorer} | {count} | {'ours' if ours else 'theirs'} | {text} |"
        for (scorer, ours, text), count in sorted(counts.items())
    ]


def main(show: bool) -> None:
    verdicts = compare()
    print("| completions | scorer | agree | only ours right | only theirs right |", "|---|---|---|---|---|", sep="\n")
    print(
        *table(verdicts),
        "",
        "| scorer | disagreements | accepted by | |",
        "|---|---|---|---|",
        *reasons(verdicts),
        sep="\n",
    )
    for v in verdicts:
        if show and v.ours != v.theirs:
            text = v.row["completion"]
            answer = text.partition("<answer>\n")[2].partition("\n</answer>")[0] or text[-200:]
            print(f"{v.row['id']} {v.scorer}, {v.row['kind']}: ours {v.ours:d} {v.row['gold']!r} <- {answer!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disagreements", action="store_true", help="print each of them")
    main(parser.parse_args().disagreements)
