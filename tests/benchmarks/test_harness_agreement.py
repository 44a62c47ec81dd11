"""Agreement with lm-evaluation-harness, from its stored verdicts: the table of benchmarks/harness/README.md."""

from collections import Counter, defaultdict

from helpers.files import read_json, read_lines
from helpers.scripts import ROOT

from gtpo.grading import grade_text

STORED = ROOT / "tests" / "stored" / "harness"


def test_the_table_is_what_the_stored_verdicts_give() -> None:
    """A constructed completion counts by the strict rule, a sampled one by the lenient rule."""
    verdicts = read_json(STORED / "verdicts.json")["verdicts"]
    counts: defaultdict[str, Counter[tuple[bool, bool]]] = defaultdict(Counter)
    for row in read_lines(STORED / "completions.jsonl"):
        graded = grade_text(row["completion"], row["gold"])
        is_sampled = row["kind"] == "sampled"
        ours = graded.correct_leniently if is_sampled else graded.correct
        kind = "sampled" if is_sampled else "constructed"
        for scorer, theirs in verdicts[str(row["id"])].items():
            counts[f"| {row['benchmark']}, {kind} | {scorer} |"][ours, bool(theirs)] += 1
    lines = []
    for line, found in sorted(counts.items()):
        agree = found[True, True] + found[False, False]
        lines.append(f"{line} {agree} of {found.total()} | {found[True, False]} | {found[False, True]} |")
    page = (ROOT / "benchmarks" / "harness" / "README.md").read_text().splitlines()
    assert [line for line in page if line.startswith(("| gsm8k", "| math500"))] == lines
