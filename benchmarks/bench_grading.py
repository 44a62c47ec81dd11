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
sys.path[:0] = [sys.argv[2] if sys.argv[1:2] == ["--in"] else str(ROOT), str(TABLES)]  # whose grader

from held_out import HELD_OUT  # noqa: E402
from verdicts import CASES, read_table  # noqa: E402

from gtpo.grading import is_correct, math_verify_accepts, shared_worker  # noqa: E402

ANSWERS = 20_000
ROUNDS = 3
GRADERS: dict[str, Callable[[str, str], bool]] = {"gtpo": is_correct, "math-verify": math_verify_accepts}


def tables() -> dict[str, list[tuple[str, str, bool, str]]]:
    """The rows of each table: gold answer, answer, verdict, kind."""
    found: dict[str, list[tuple[str, str, bool, str]]] = {"held_out.py": HELD_OUT, "verdicts.py": CASES}
    for name in ("kinds.txt", "field.txt", "beside.txt"):
        found[name] = read_table((TABLES / name).read_text(encoding="utf-8"))
    return found


def verdicts() -> dict[str, dict[str, int]]:
    """Wrong verdicts of each grader, by table."""
    results: dict[str, dict[str, int]] = {}
    for table, rows in tables().items():
        results[table] = {"rows": len(rows), "right": sum(expected for _, _, expected, _ in rows)}
        for name, accepts in GRADERS.items():
            given = []
            for gold, answer, expected, _ in rows:
                given.append((accepts(answer, gold.replace(r"\n####", "\n####")), expected))
            results[table][f"{name}: wrongly accepted"] = given.count((True, False))
            results[table][f"{name}: wrongly refused"] = given.count((False, True))
    return results


def grade(pairs: list[tuple[str, str]]) -> float:
    """Seconds of processor time, of this process and of the grading process, to compare answers with gold answers."""
    is_correct("x+1", "1+x")  # starts the grading process
    before = _processor_time()
    for gold, answer in pairs:
        is_correct(answer, gold)
    return _processor_time() - before


def _processor_time() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    assert shared_worker.process is not None
    fields = Path(f"/proc/{shared_worker.process.pid}/stat").read_text().rpartition(")")[2].split()
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
            command = [sys.executable, __file__, "--in", str(place)]
            done = subprocess.run(command, input=pairs, capture_output=True, text=True, check=True)
            taken.append(float(done.stdout))
    return min(seconds[ROOT]) / min(seconds[clone])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--than", type=Path, metavar="CLONE", help="a clone at another revision")
    parser.add_argument("--in", dest="place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.place:
        print(grade(json.load(sys.stdin)))
    elif given.than:
        print(f"{ANSWERS:,} answers take {ratio(given.than):.2f} times as long as in {given.than}")
    else:
        print(json.dumps(verdicts(), indent=1))
