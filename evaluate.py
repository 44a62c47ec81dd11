"""Evaluate models on GSM8K, MATH, AIME, AMC, arithmetic or your problems: k completions each, pass@k and maj@k.

    python evaluate.py --benchmarks aime24 aime25 amc23 --k 64               # the newest finished run under outputs/
    python evaluate.py --benchmarks gsm8k --k 32 --runs base outputs/RUN  # a run, and the model it was trained from
    python evaluate.py --benchmarks math500 --model qwen --k 8               # a base model
    python evaluate.py --benchmarks my_test.csv --k 8                        # your problems: columns prompt and answer
    python evaluate.py --regrade                                             # grade the stored completions again
    python evaluate.py --compare outputs/RUN outputs/OTHER                   # paired difference of stored scores

Completions are stored while they are sampled: the same command resumes an interrupted evaluation.
"""

from pathlib import Path

from gtpo.cli.parse import parse_evaluation
from gtpo.errors import printable
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.runs.script import run_script

# From the repository root this file shadows the Hugging Face package `evaluate`: heavy imports stay in the function.


def main() -> None:
    flags, given = parse_evaluation(EvaluationArguments)
    from gtpo.evaluation import jobs, paired, scores, table
    from gtpo.evaluation.benchmarks import select_benchmarks

    flags.check_given(given)
    if flags.compare:
        names = [each.name for each in select_benchmarks(flags)] if flags.benchmarks else []
        sides = paired.find_sides(flags.compare, flags.output_dir, names)
        return print(paired.format_comparisons(paired.compare_sides(sides)))
    found = jobs.read_stored(flags, given) if flags.regrade else jobs.plan_evaluation(flags).run()
    entries = [scores.grade(job, completions) for job, completions in found]
    results = scores.write_results(Path(flags.output_dir), entries)
    print(f"\n{table.format_table(entries)}\n")
    if len({entry.label for entry in entries}) > 1 and not flags.regrade:
        print(f"{paired.format_comparisons(paired.compare_sides(paired.group_seeds(entries)))}\n")
    print(f"Scores, settings and per-problem results: {printable(str(results))}")


if __name__ == "__main__":
    run_script(main)
