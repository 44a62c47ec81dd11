r"""Write tests/stored/harness/completions.jsonl: completions of GSM8K and MATH problems that any scorer can read.

    python benchmarks/harness/make_completions.py --data_dir DIR --sampled outputs/evaluation/base-tiny ...

Two kinds, about 500 in all. Sampled: what small models wrote, in any form: the tiny model (`evaluate.py --model
tiny --limit 48 --k 1 --temperature 0.7 --max_new_tokens 64 --benchmarks gsm8k math500`), and a dozen of SmolLM2-135M
(`--model smol --system_prompt none --temperature 0 --max_new_tokens 160`). Constructed: answers in the forms that every
scorer looks for, an answer block, then ``#### 18`` for GSM8K or Minerva's last sentence for MATH. They are the gold
answer as it stands or in another spelling, or wrong: another gold answer, a changed digit, a sign, two answers.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gtpo.data.load import load_benchmark
from gtpo.evaluation.storage import read_completions

COMPLETIONS = Path(__file__).resolve().parents[2] / "tests" / "stored" / "harness" / "completions.jsonl"
PROBLEMS = 110  # of each benchmark, two constructed completions each


def main(data_dir: str | None, sampled: list[Path]) -> None:
    rng = random.Random(0)
    rows = []
    for name in ("gsm8k", "math500"):
        problems = load_benchmark(name, data_dir)
        golds = {problem.id: problem.gold for problem in problems}
        for directory in sampled:
            path = directory / f"{name}.jsonl"
            for sample in read_completions(path)[1] if path.is_file() else ():
                rows.append((name, "sampled", golds[sample["id"]], sample["completion"].strip()))
        for problem in rng.sample(problems, PROBLEMS):
            kind, answer = rng.choice(RIGHT)(problem.gold)
            rows.append((name, kind, problem.gold, write(name, answer)))
            kind, answer = rng.choice(WRONG)(problem.gold, rng.choice(problems).gold)
            rows.append((name, kind, problem.gold, write(name, answer)))
    keys = ("id", "benchmark", "kind", "gold", "completion")
    lines = []
    for number, row in enumerate(dict.fromkeys(rows)):
        values = dict(zip(keys, (number, *row), strict=True))
        lines.append(json.dumps(values))
    COMPLETIONS.parent.mkdir(parents=True, exist_ok=True)
    COMPLETIONS.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} completions in {COMPLETIONS}")


def write(benchmark: str, answer: str) -> str:
    block = f"<reasoning>\nStep by step.\n</reasoning>\n<answer>\n{answer}\n</answer>\n"
    if benchmark == "gsm8k":
        return f"{block}#### {answer}"
    return f"{block}Final Answer: The final answer is ${answer}$. I hope it is correct."


RIGHT = (
    *[lambda gold: ("the gold answer", gold)] * 2,
    lambda gold: ("spaces", re.sub(r"([,+=-])", r" \1 ", gold)),
    lambda gold: ("a number with .0, or \\dfrac", gold + ".0" if gold.isdigit() else gold.replace(r"\frac", r"\dfrac")),
    lambda gold: ("\\left and \\right", re.sub(r"\(([^()]*)\)", r"\\left(\1\\right)", gold)),
    lambda gold: ("thousands separators", re.sub(r"(?<=\d)(?=(\d{3})+$)", ",", gold)),
    lambda gold: ("a/b for a fraction", re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold)),
    lambda gold: ("a name in front", f"x = {gold}"),
    lambda gold: ("a unit", gold + r"\text{ cm}" if gold.isdigit() else gold),
    lambda gold: ("a dollar", rf"\${gold}" if gold.isdigit() else gold),
)
WRONG = (
    lambda gold, other: ("another gold answer", other),
    lambda gold, other: ("a changed digit", re.sub(r"\d", lambda m: str((int(m[0]) + 1) % 10), gold, count=1)),
    lambda gold, other: ("the sign", gold.removeprefix("-") if gold.startswith("-") else f"-{gold}"),
    lambda gold, other: ("two answers", rf"{gold} \text{{ or }} {other}"),
    lambda gold, other: ("plus one", f"{gold}+1"),
    lambda gold, other: ("no answer", ""),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir")
    parser.add_argument("--sampled", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    main(options.data_dir, options.sampled)
