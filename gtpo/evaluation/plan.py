"""The plan of an evaluation: from the flags to its jobs, and how a model is loaded if a job needs it."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gtpo.arguments import fields_of
from gtpo.errors import UsageError
from gtpo.evaluation import sampling
from gtpo.evaluation.arguments import DATA_FLAGS, EvaluationArguments
from gtpo.evaluation.jobs import Job, load_problems, select_benchmarks
from gtpo.evaluation.records import Head, Origin
from gtpo.evaluation.sampling import Sampler, Sampling
from gtpo.evaluation.storage import check_settings, fingerprint, problems_hash
from gtpo.evaluation.targets import (
    choose_4bit,
    choose_model,
    choose_prompts,
    find_targets,
    is_tiny,
    max_lora_rank,
    short_name,
)
from gtpo.runs.provenance import provenance


class Plan(NamedTuple):
    """Every target on every benchmark, how completions are sampled, and what loads the model, once."""

    jobs: list[Job]
    sampling: Sampling
    load: Callable[[], Sampler]


def plan_evaluation(flags: EvaluationArguments) -> Plan:
    """The plan of an evaluation; no model is loaded.

    Raises:
        UsageError: If a flag, a benchmark, a run or stored completions do not fit.
    """
    sources = select_benchmarks(flags)
    targets = find_targets(flags.runs, flags.model, flags.checkpoint)
    problems, unreadable = {}, []
    for name, source in sources.items():
        try:
            problems[name] = load_problems(name, source, flags, flags.limit)
        except UsageError as error:
            unreadable.append(str(error))
    if unreadable:  # all of them, so that one repair is enough
        raise UsageError(" ".join(unreadable))
    model = choose_model(targets, flags.model, slow=flags.backend != "auto")
    backend = sampling.choose_sampler(flags.backend, is_tiny(model), flags.tensor_parallel_size)
    chosen = {
        "batch_size": flags.batch_size if backend == "transformers" else None,
        "load_in_4bit": choose_4bit(flags.load_in_4bit, targets),
    }
    how = Sampling(**{name: getattr(flags, name) for name in fields_of([Sampling])} | chosen)
    prompts = choose_prompts(flags.prompt, targets, model)
    made_with = provenance()
    jobs = []
    for target, prompt in zip(targets, prompts, strict=True):
        for name, asked in problems.items():
            settings = {
                "benchmark": name,
                "problems": len(asked.rows),
                "problems_hash": problems_hash(asked.rows),
                "model": fingerprint(model) or model,
                "adapter": fingerprint(target.adapter) if target.adapter else None,
                "backend": backend,
                **asdict(how),
                **asdict(prompt),
            }
            data = {
                "source": sources[name],
                **{flag: getattr(flags, flag) for flag in DATA_FLAGS},
                "judge": asked.graded_by,  # the name in results of the first revisions
            }
            adapter = str(target.adapter) if target.adapter else None
            path = Path(flags.output_dir) / (target.label or f"base-{short_name(model)}") / f"{name}.jsonl"
            if not flags.overwrite:
                check_settings(path, settings, asked.rows)
            jobs.append(Job(path, asked, Head(settings, Origin(model, adapter, target.checkpoint, made_with, data))))

    @cache
    def load() -> Sampler:
        if backend == "transformers":
            return sampling.TransformersSampler(model, how, prompts[0])
        memory, gpus = flags.gpu_memory_utilization, flags.tensor_parallel_size
        return sampling.VLLMSampler(model, how, max_lora_rank(targets), memory, prompts[0], gpus)

    return Plan(jobs, how, load)
