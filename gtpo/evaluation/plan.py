"""The plan of an evaluation: from the flags to its jobs, and how the model is loaded where one has something to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from gtpo.arguments import EvaluationArguments
from gtpo.evaluation import sampling
from gtpo.evaluation.jobs import Job, load_benchmarks, plan_jobs
from gtpo.evaluation.sampling import Sampler, Sampling
from gtpo.evaluation.targets import choose_4bit, choose_model, choose_prompts, find_targets, is_tiny, max_lora_rank


@dataclass(frozen=True)
class Plan:
    """Every target on every benchmark.

    Attributes:
        jobs: The jobs, in the order of the flags.
        sampling: How completions are sampled.
        load: Loads the model, once.
    """

    jobs: list[Job]
    sampling: Sampling
    load: Callable[[], Sampler]


def plan_evaluation(flags: EvaluationArguments, runs: Sequence[str]) -> Plan:
    """The plan of an evaluation; no model is loaded.

    Args:
        flags: The flags.
        runs: ``--runs``, or the run that is evaluated without it; none for a base model.

    Raises:
        UsageError: If a flag, a benchmark, a run or stored completions do not fit.
    """
    targets = find_targets(runs, flags.model, flags.checkpoint)
    problems = load_benchmarks(flags)
    model = choose_model(targets, flags.model, slow=flags.backend != "auto")
    backend = sampling.choose_sampler(flags.backend, is_tiny(model))
    how = Sampling(
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
    return Plan(jobs, how, cache(lambda: sampling.load_sampler(model, backend, how, rank, memory, prompts[0])))
