"""Wrong verdicts of this grader and of math-verify on the tables of tests/grading.

    python benchmarks/bench_grading.py > results/benchmarks/graders.json

held_out.py was written before the rules, kinds.txt and verdicts.py with them, field.txt has the forms of other graders'
tests, beside.txt what may stand beside a value. Both texts are given to math-verify as LaTeX.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "grading"
sys.path[:0] = [str(ROOT), str(TABLES)]

from held_out import HELD_OUT  # noqa: E402
from verdicts import CASES, read_table  # noqa: E402

from gtpo.grading import is_correct, math_verify_accepts  # noqa: E402

GRADERS: dict[str, Callable[[str, str], bool]] = {"gtpo": is_correct, "math-verify": math_verify_accepts}


def verdicts() -> dict[str, dict[str, int]]:
    """Wrong verdicts of each grader, by table."""
    tables: dict[str, list[tuple[str, str, bool, str]]] = {"held_out.py": HELD_OUT, "verdicts.py": CASES}
    for name in ("kinds.txt", "field.txt", "beside.txt"):
        tables[name] = read_table((TABLES / name).read_text(encoding="utf-8"))
    results: dict[str, dict[str, int]] = {}
    for table, rows in tables.items():
        results[table] = {"rows": len(rows), "right": sum(expected for _, _, expected, _ in rows)}
        for name, accepts in GRADERS.items():
            given = []
            for gold, answer, expected, _ in rows:
                given.append((accepts(answer, gold.replace(r"\n####", "\n####")), expected))
            results[table][f"{name}: wrongly accepted"] = given.count((True, False))
            results[table][f"{name}: wrongly refused"] = given.count((False, True))
    return results


if __name__ == "__main__":
    print(json.dumps(verdicts(), indent=1))
