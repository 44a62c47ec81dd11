"""Wrong verdicts of this grader and of math-verify; time and sympy's share of grading.

    python benchmarks/bench_grading.py                        # benchmarks from the Hub
    python benchmarks/bench_grading.py --json results/benchmarks/graders.json   # the verdicts alone, stored
    python benchmarks/bench_grading.py --data_dir DIR         # from JSONL files (or set GTPO_DATA_DIR)
    python benchmarks/bench_grading.py --math_problems 500    # one tenth, a few seconds

The tables of verdicts are those of tests/grading: held_out.py was written before the rules, kinds.txt and verdicts.py
with them, field.txt has the forms of other graders' tests. Both texts are given to math-verify as LaTeX.

Times are of AIME and AMC with majority votes, and of 5,000 x 64 answers of MATH. Completions are synthetic and seeded:
64 per problem, some correct in one of several spellings, the others drawn from a few wrong answers with a skewed
distribution, as a model samples them (gold answers of other problems, changed digits, unreadable text). "seconds" is
the time of both verdicts and the votes, "no sympy" the share of completions graded without sympy, "late" the number of
comparisons that exceeded a limit.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "grading"))

from held_out import HELD_OUT
from verdicts import CASES, read_table

from gtpo import grading
from gtpo.data.load import load_benchmark
from gtpo.evaluation.metrics import majority_at_k
from gtpo.grading import worker

SAMPLES = 64
TABLES = Path(__file__).resolve().parents[1] / "tests" / "grading"
REASONING = f"<reasoning>{'One step after the other. ' * 40}</reasoning>"
WRAPPINGS = ("{}", "${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$", "{}.", "The answer is ${}$.", " {}\n", "**{}**")
GRADERS: dict[str, Callable[[str, str], bool]] = {
    "gtpo": grading.is_correct,
    "math-verify": grading.math_verify_accepts,
}


def verdicts() -> dict[str, dict[str, int]]:
    """Wrong verdicts of each grader, by table."""
    tables: dict[str, list[tuple[str, str, bool, str]]] = {"held_out.py": HELD_OUT, "verdicts.py": CASES}
    for name in ("kinds.txt", "field.txt"):
        tables[name] = read_table((TABLES / name).read_text(encoding="utf-8"))
    results: dict[str, dict[str, int]] = {}
    for table, rows in tables.items():
        results[table] = {"rows": len(rows), "right": sum(expected for _, _, expected, _ in rows)}
        for name, accepts in GRADERS.items():
            given = [
                (accepts(answer, gold.replace(r"\n####", "\n####")), expected) for gold, answer, expected, _ in rows
            ]
            results[table][f"{name}: wrongly accepted"] = given.count((True, False))
            results[table][f"{name}: wrongly refused"] = given.count((False, True))
    return results


def main(data_dir: str | None, math_problems: int) -> None:
    """Print the verdicts, then the times."""
    print(json.dumps(verdicts(), indent=1))
    rng = random.Random(0)
    contest = []
    for name in ("aime24", "aime25", "amc23"):
        contest += [problem.gold for problem in load_benchmark(name, data_dir)]
    math = [problem.gold for problem in load_benchmark("math", data_dir)][:math_problems]

    columns = f"{'seconds':>9}{'per second':>12}{'no sympy':>10}{'late':>6}"
    print(f"{'':14}{'completions':>12}{'correct':>9}{columns}")
    measure("AIME and AMC", contest, contest, rng, vote=True)
    measure("MATH", math, math, rng, vote=False)


def measure(name: str, golds: list[str], pool: list[str], rng: random.Random, *, vote: bool) -> None:
    """Grade 64 completions of each problem, vote over 4, 8, ... 64 of them if `vote`, and print one line."""
    completions = [sample(gold, pool, rng) for gold in golds]
    calls = worker.shared_worker.calls
    late = grading.timeouts()
    correct = total = 0
    seconds = 0.0
    for gold, completions_G in zip(golds, completions, strict=True):
        start = time.perf_counter()
        verdicts_G = [grading.grade_text(completion, gold) for completion in completions_G]
        extracted_G = [v.answer for v in verdicts_G]
        correct_G = [v.correct for v in verdicts_G]
        if vote:
            for k in (4, 8, 16, 32, 64):
                majority_at_k(extracted_G, correct_G, k)
        seconds += time.perf_counter() - start
        correct += sum(correct_G)
        total += len(correct_G)
    no_sympy = 1 - (worker.shared_worker.calls - calls) / total
    print(
        f"{name:14}{total:12,}{correct:9,}{seconds:9.1f}{total / seconds:12,.0f}{no_sympy:10.2%}"
        f"{grading.timeouts() - late:6}"
    )


def sample(gold: str, pool: list[str], rng: random.Random) -> list[str]:
    """64 completions of one problem: about 12 different answers, with a skewed distribution."""
    wrong = [rng.choice(pool) for _ in range(6)]
    wrong += [re.sub(r"\d", lambda digit: rng.choice("0123456789"), gold, count=1) for _ in range(6)]
    wrong += [
        f"{gold}+1",
        f"-{gold}",
        f"{gold} or {rng.choice(pool)}",
        "I am not sure",
        r"\frac{1}{" + gold,
    ]
    rng.shuffle(wrong)
    skill = rng.random()
    completions = []
    for _ in range(SAMPLES):
        if rng.random() < skill:
            answer = respell(gold, rng)
        else:
            place = int(rng.expovariate(0.3))
            answer = wrong[min(place, len(wrong) - 1)]
        if rng.random() < 0.95:
            wrapped = rng.choice(WRAPPINGS).format(answer)
            answer = f"<answer>{wrapped}</answer>"
        completions.append(f"{REASONING}\n{answer}")
    return completions


def respell(gold: str, rng: random.Random) -> str:
    """The gold answer in another spelling."""
    spellings = [
        gold,
        gold.replace(r"\frac", r"\dfrac"),
        gold.replace(" ", ""),
        f"x = {gold}",
        gold.replace(",", ", "),
    ]
    spellings.append(re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold))
    if re.fullmatch(r"[\w ^{}]+[+-][\w ^{}]+", gold):
        head, sign, tail = re.split("([+-])", gold, maxsplit=1)
        spellings.append(f"{tail}+{head}" if sign == "+" else f"-{tail}+{head}")
    return rng.choice(spellings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default=os.environ.get("GTPO_DATA_DIR"))
    parser.add_argument("--math_problems", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json:
        options.json.write_text(json.dumps(verdicts(), indent=1) + "\n")
    else:
        main(options.data_dir, options.math_problems)
