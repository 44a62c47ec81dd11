"""The plan of an evaluation: from the flags to its jobs, and how the model is loaded where one has something to do."""

from collections.abc import Callable
from functools import cache

from gtpo.arguments import EvaluationArguments
from gtpo.evaluation import sampling
from gtpo.evaluation.jobs import Job, load_problems, plan_jobs, select_benchmarks
from gtpo.evaluation.targets import (
    base_model,
    choose_4bit,
    choose_prompts,
    find_targets,
    is_tiny,
    max_lora_rank,
    refuse_large_model_without_gpu,
    resolve_base_model,
)


def plan(flags: EvaluationArguments) -> tuple[list[Job], sampling.Sampling, Callable[[], sampling.Sampler]]:
    """Every target on every benchmark: the jobs, how completions are sampled, and what loads the model, once.

    Raises:
        UsageError: If a flag, a benchmark, a run or stored completions do not fit.
    """
    benchmarks = select_benchmarks(flags)
    targets = find_targets(flags.runs, flags.model, flags.checkpoint)
    base = base_model(targets, flags.model)
    if flags.backend == "auto":
        refuse_large_model_without_gpu(flags.model or base)
    problems = {name: load_problems(name, source, flags, flags.limit) for name, source in benchmarks.items()}
    model = resolve_base_model(base, targets, flags.model)
    backend = sampling.choose_sampler(flags.backend, is_tiny(model))
    how = sampling.Sampling(
        k=flags.k,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
        max_new_tokens=flags.max_new_tokens,
        batch_size=flags.batch_size if backend == "transformers" else None,
        load_in_4bit=choose_4bit(flags.load_in_4bit, targets),
    )
    prompts = choose_prompts(flags.prompt, targets, model)
    jobs = plan_jobs(flags, targets, prompts, problems, model, backend, how)
    rank, memory = max_lora_rank(targets), flags.gpu_memory_utilization
    return jobs, how, cache(lambda: sampling.load_sampler(model, backend, how, rank, memory, prompts[0]))
