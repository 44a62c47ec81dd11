"""Wrong verdicts of this grader and of math-verify on the tables of tests/grading; its time next to another revision's.

    python benchmarks/bench_grading.py > results/benchmarks/graders.json
    python benchmarks/bench_grading.py --than ../clone-at-another-revision

held_out.py was written before the rules, kinds.txt and verdicts.py with them, field.txt has the forms of other graders'
tests, beside.txt what may stand beside a value. Both texts are given to math-verify as LaTeX.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "grading"
sys.path.insert(0, str(TABLES))

from held_out import HELD_OUT  # noqa: E402
from verdicts import CASES, read_table  # noqa: E402

ANSWERS = 20_000
ROUNDS = 3


def tables() -> dict[str, list[tuple[str, str, bool, str]]]:
    """The rows of each table: gold answer, answer, verdict, kind."""
    found: dict[str, list[tuple[str, str, bool, str]]] = {"held_out.py": HELD_OUT, "verdicts.py": CASES}
    for name in ("kinds.txt", "field.txt", "beside.txt"):
        found[name] = read_table((TABLES / name).read_text(encoding="utf-8"))
    return found


def verdicts() -> dict[str, dict[str, int]]:
    """Wrong verdicts of each grader, by table."""
    from gtpo.grading import is_correct, math_verify_accepts

    graders: dict[str, Callable[[str, str], bool]] = {"gtpo": is_correct, "math-verify": math_verify_accepts}
    results: dict[str, dict[str, int]] = {}
    for table, rows in tables().items():
        results[table] = {"rows": len(rows), "right": sum(expected for _, _, expected, _ in rows)}
        for name, accepts in graders.items():
            given = []
            for gold, answer, expected, _ in rows:
                given.append((accepts(answer, gold.replace(r"\n####", "\n####")), expected))
            results[table][f"{name}: wrongly accepted"] = given.count((True, False))
            results[table][f"{name}: wrongly refused"] = given.count((False, True))
    return results


def grade(pairs: list[tuple[str, str]]) -> float:
    """Seconds of processor time, of this process and of the grading process, to compare answers with gold answers."""
    from gtpo.grading import is_correct, shared_worker

    is_correct("x+1", "1+x")  # starts the grading process
    assert shared_worker.process is not None
    before = processor_time(shared_worker.process.pid)
    for gold, answer in pairs:
        is_correct(answer, gold)
    return processor_time(shared_worker.process.pid) - before


def processor_time(pid: int) -> float:
    """Seconds of this process and of another one; on Linux."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return own.ru_utime + own.ru_stime + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ratio(clone: Path) -> float:
    """Time of 20,000 answers here over that of the clone: the shortest of three rounds each, turn by turn."""
    forms = ("{}", "${}$", "The answer is {}.", "\\boxed{{{}}}")
    rows = [row for table in tables().values() for row in table]
    written = ((gold, form.format(answer)) for form in forms for gold, answer, *_ in rows)
    pairs = json.dumps([*islice(written, ANSWERS)])
    seconds: dict[Path, list[float]] = {ROOT: [], clone: []}
    for _ in range(ROUNDS):
        for place, taken in seconds.items():
            command = [sys.executable, __file__, "--grader_of", str(place)]
            done = subprocess.run(command, input=pairs, stdout=subprocess.PIPE, text=True, check=True)
            taken.append(float(done.stdout))
    return min(seconds[ROOT]) / min(seconds[clone])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--than", type=Path, metavar="CLONE", help="a clone at another revision")
    parser.add_argument("--grader_of", type=Path, help=argparse.SUPPRESS)  # seconds, of pairs from stdin
    given = parser.parse_args()
    for place in filter(None, (given.than, given.grader_of)):
        if not (place / "gtpo" / "grading").is_dir():
            parser.error(f"{place} is no clone of this repository.")
    sys.path.insert(0, str(given.grader_of or ROOT))
    if given.grader_of:
        print(grade(json.load(sys.stdin)))
    elif given.than:
        print(f"{ANSWERS:,} answers take {ratio(given.than):.2f} times as long as in {given.than}")
    else:
        print(json.dumps(verdicts(), indent=1))
