"""Evaluate models on GSM8K, MATH, AIME, AMC, arithmetic or your problems: k completions each, pass@k and maj@k.

    python evaluate.py --benchmarks aime24 aime25 amc23 --k 64               # the newest finished run under outputs/
    python evaluate.py --benchmarks gsm8k --k 32 --adapter base outputs/RUN  # a run, and the model it was trained from
    python evaluate.py --benchmarks math500 --model qwen --k 8               # a base model
    python evaluate.py --benchmarks my_test.csv --k 8                        # your problems: columns prompt and answer
    python evaluate.py --regrade                                             # grade the stored completions again

Completions are stored while they are sampled: the same command resumes an interrupted evaluation.
"""

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo.arguments import EvaluationArguments
from gtpo.cli import parse_evaluation
from gtpo.script import run_script

if TYPE_CHECKING:
    from gtpo.evaluation.jobs import Job

# From the repository root this file shadows the Hugging Face package `evaluate`: heavy imports stay in the functions.


def main() -> None:
    flags = parse_evaluation()
    from gtpo.evaluation.jobs import find_stored_jobs
    from gtpo.evaluation.scores import grade, write_results
    from gtpo.evaluation.table import format_table

    try:
        jobs = sample(flags) if flags.adapter or flags.model or not flags.regrade else find_stored_jobs(flags)
        entries = [grade(job.path, job.problems, job.dropped) for job in jobs]
    except KeyboardInterrupt:
        print("\nevaluate.py: interrupted; run the same command again to resume.", file=sys.stderr)
        sys.exit(130)
    results = write_results(Path(flags.output_dir), entries)
    print(f"\n{format_table(entries)}\n\nScores, settings and per-problem results: {results}")


def sample(flags: EvaluationArguments) -> "list[Job]":
    """Sample the completions of every target on every benchmark that are not stored yet; with --regrade, none."""
    from gtpo.evaluation.jobs import load_problems, plan_jobs, run_job, select_benchmarks
    from gtpo.evaluation.sampling import Sampling, choose_backend, load_sampler
    from gtpo.evaluation.targets import (
        base_model,
        choose_4bit,
        choose_prompts,
        find_targets,
        is_tiny,
        max_lora_rank,
        newest_run,
        refuse_large_model_without_gpu,
        resolve_base_model,
    )

    benchmarks, adapters = select_benchmarks(flags), flags.adapter
    if not adapters and not flags.model:
        adapters = [newest_run()]
        print(f"Evaluating {adapters[0]}, the newest finished run (--adapter RUN selects another).", flush=True)
    targets = find_targets(adapters, flags.model, flags.checkpoint)
    base = base_model(targets, flags.model)
    if flags.backend == "auto":
        refuse_large_model_without_gpu(flags.model or base)
    problems = {name: load_problems(name, source, flags, flags.limit) for name, source in benchmarks.items()}
    model = resolve_base_model(base, targets, flags.model)
    backend = choose_backend(flags.backend, is_tiny(model))
    batch = flags.batch_size if backend == "transformers" else None
    four_bit = choose_4bit(flags.load_in_4bit, targets)
    sampling = Sampling(flags.k, flags.temperature, flags.top_p, flags.seed, flags.max_new_tokens, batch, four_bit)
    prompts = choose_prompts(flags.prompt, targets, model)
    jobs = plan_jobs(flags, targets, prompts, problems, model, backend, sampling)
    if not flags.regrade:
        rank, memory = max_lora_rank(targets), flags.gpu_memory_utilization
        load = cache(lambda: load_sampler(model, backend, sampling, rank, memory, prompts[0]))
        for job in jobs:
            run_job(job, sampling, load, flags.overwrite)
    return jobs


if __name__ == "__main__":
    run_script(main)
