"""Verdicts of this grader and of math-verify on the tables of tests/grading, wrong ones counted.

    python benchmarks/graders.py > results/benchmarks/graders.json

held_out.py was written before the rules, kinds.txt with them. Both texts are given to math-verify as LaTeX.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "grading"
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(TESTS))

from held_out import HELD_OUT  # noqa: E402
from verdicts import read_table  # noqa: E402

from gtpo.grading import is_correct, math_verify_accepts  # noqa: E402

GRADERS: dict[str, Any] = {"gtpo": is_correct, "math-verify": math_verify_accepts}
KINDS = (TESTS / "kinds.txt").read_text(encoding="utf-8")
TABLES = {"held_out.py": HELD_OUT, "kinds.txt": read_table(KINDS)}

results: dict[str, Any] = {}
for table, rows in TABLES.items():
    results[table] = {"rows": len(rows)}
    for name, accepts in GRADERS.items():
        verdicts = [(accepts(answer, gold), expected) for gold, answer, expected, _ in rows]
        results[table][name] = {
            "wrongly accepted": verdicts.count((True, False)),
            "wrongly refused": verdicts.count((False, True)),
        }
print(json.dumps(results, indent=1))
