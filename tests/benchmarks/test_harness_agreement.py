"""Agreement with lm-evaluation-harness, from its stored verdicts: the table of benchmarks/harness/README.md."""

from collections import Counter, defaultdict

from helpers.files import read_json, read_lines
from helpers.scripts import ROOT

from gtpo.grading import grade_text

STORED = ROOT / "tests" / "stored" / "harness"


def test_the_table_is_what_the_stored_verdicts_give() -> None:
    """A constructed completion counts by the strict rule, a sampled one by the lenient rule."""
    verdicts = read_json(STORED / "verdicts.json")["verdicts"]
    counts: defaultdict[tuple[str, str, str], Counter[tuple[bool, bool]]] = defaultdict(Counter)
    for row in read_lines(STORED / "completions.jsonl"):
        graded = grade_text(row["completion"], row["gold"])
        is_sampled = row["kind"] == "sampled"
        ours = graded.correct_leniently if is_sampled else graded.correct
        kind = "sampled" if is_sampled else "constructed"
        for scorer, theirs in verdicts[str(row["id"])].items():
            counts[row["benchmark"], kind, scorer][ours, bool(theirs)] += 1
    lines = []
    for (benchmark, kind, scorer), found in sorted(counts.items()):
        agree = found[True, True] + found[False, False]
        only = f"{found[True, False]} | {found[False, True]}"
        lines.append(f"| {benchmark}, {kind} | {scorer} | {agree} of {found.total()} | {only} |")
    page = (ROOT / "benchmarks" / "harness" / "README.md").read_text().splitlines()
    assert [line for line in page if line.startswith(("| gsm8k", "| math500"))] == lines
