"""Score completions with lm-evaluation-harness: its tasks' own filters, metric and functions, without its models.

    .venv-harness/bin/python benchmarks/harness/score.py COMPLETIONS.jsonl > verdicts.json

Reads rows {id, benchmark, gold, completion}; prints {id: {scorer: 0 or 1}}. GSM8K: the filters of its task,
strict-match and flexible-extract, and exact_match with the options that it sets. MATH: minerva_math (exact_match, which
compares with sympy, and math_verify) and hendrycks_math.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters import build_filter_ensemble
from lm_eval.tasks.hendrycks_math import utils as hendrycks_math
from lm_eval.tasks.minerva_math import utils as minerva_math
from lm_eval.utils import load_yaml_config


def main(path: str) -> None:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    task = load_yaml_config(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml")
    verdicts = {row["id"]: gsm8k(row, task) if row["benchmark"] == "gsm8k" else math(row) for row in rows}
    versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "sympy", "math-verify")}
    json.dump({"versions": versions, "verdicts": verdicts}, sys.stdout)


def gsm8k(row: dict, task: dict) -> dict[str, int]:
    """The verdicts of gsm8k.yaml."""
    [metric] = task["metric_list"]
    options = {name: metric[name] for name in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    verdicts = {}
    for filters in task["filter_list"]:
        steps = [
            [step["function"], {key: value for key, value in step.items() if key != "function"} or None]
            for step in filters["filter"]
        ]
        instance = Instance(request_type="generate_until", doc={}, arguments=("", {}), idx=0)
        instance.resps = [row["completion"]]
        build_filter_ensemble(filters["name"], steps).apply([instance])
        answer = instance.filtered_resps[filters["name"]]
        match = exact_match_hf_evaluate([answer], [f"#### {row['gold']}"], **options)
        verdicts[filters["name"]] = int(match["exact_match"])
    return verdicts


def math(row: dict) -> dict[str, int]:
    """The verdicts of minerva_math and hendrycks_math."""
    solution = rf"\boxed{{{row['gold']}}}"
    gold = minerva_math.normalize_final_answer(row["gold"])
    minerva = minerva_math.process_results({"answer": gold}, [row["completion"]])
    hendrycks = hendrycks_math.process_results({"solution": solution}, [row["completion"]])
    return {
        "minerva_math": minerva["exact_match"],
        "minerva_math, math_verify": minerva["math_verify"],
        "hendrycks_math": hendrycks["exact_match"],
    }


if __name__ == "__main__":
    main(sys.argv[1])
