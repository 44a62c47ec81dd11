"""Jobs, each one model on one benchmark: planned from the flags or found in the output directory, and run."""

import asyncio
import inspect
import logging
import math
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES, PromptArguments, fields_of, stored_prompt
from gtpo.data.load import load_benchmark, load_user_benchmark
from gtpo.data.preview import check_first_rows
from gtpo.data.tables import check_source, short_name_of
from gtpo.errors import RunError, UsageError, printable
from gtpo.evaluation import sampling, storage, targets
from gtpo.evaluation.arguments import DATA_FLAGS, MATH_VERIFY, EvaluationArguments
from gtpo.evaluation.records import Head, Origin, Problem, Problems, UserGrader
from gtpo.evaluation.sampling import Sampler, Sampling
from gtpo.files import fingerprint
from gtpo.grading.user_functions import load_rewards
from gtpo.runs.bars import CompletionBar
from gtpo.runs.provenance import provenance

logger = logging.getLogger(__name__)

STORED_FLAGS = (  # --regrade reads them from the completion files
    *("checkpoint", "backend", "gpu_memory_utilization", "limit"),
    *fields_of([Sampling, PromptArguments]),
)


@dataclass(frozen=True)
class Job:
    """One model on one benchmark; a completion file, ``LABEL/BENCHMARK.jsonl``, with other settings is refused."""

    path: Path
    problems: Problems
    head: Head

    @property
    def adapter(self) -> Path | None:
        return Path(self.head.origin.adapter) if self.head.origin.adapter else None

    @property
    def prompt(self) -> PromptArguments:
        return PromptArguments(**stored_prompt(self.head.settings))

    @property
    def title(self) -> str:
        """Label and benchmark, for the progress bar."""
        name = self.head.settings["benchmark"]
        return printable(f"{self.path.parent.name}, {BENCHMARK_TITLES.get(name, name)}")


def select_benchmarks(flags: EvaluationArguments) -> dict[str, str]:
    """``--benchmarks`` without duplicates: name in tables and files -> name, path or Hub id on the command line.

    Your benchmark is named after its file or directory without the extension; ``gsm8k.csv`` keeps it.
    """
    if not flags.benchmarks:
        raise UsageError(f"--benchmarks is missing: name one or more of {', '.join(BENCHMARK_TITLES)}, or your file.")
    selected: dict[str, str] = {}
    for source in flags.benchmarks:
        check_source("benchmarks", source, BENCHMARK_TITLES)
        name = source if source in BENCHMARK_TITLES else short_name_of(source, BENCHMARK_TITLES)
        if selected.setdefault(name, source) != source:
            raise UsageError(f"{selected[name]} and {source} are both called {name} in tables and files: rename one.")
    for flag in (*DATA_FLAGS[1:], "grader"):
        works_for_all = getattr(flags, flag) in (getattr(EvaluationArguments, flag), MATH_VERIFY)
        if not works_for_all and not selected.keys() - BENCHMARK_TITLES:
            raise UsageError(f"--{flag} is for your own benchmarks, and --benchmarks has none: remove it.")
    return selected


def load_problems(name: str, source: str, flags: EvaluationArguments, limit: int | None = None) -> Problems:
    """The first ``limit`` problems of a benchmark, by name and source as :func:`select_benchmarks` gives them."""
    if name in BENCHMARK_TITLES:
        graded_by = None if flags.user_grader else flags.grader
        return Problems(load_benchmark(name, flags.data_dir)[:limit], graded_by=graded_by)
    rows, dropped = load_user_benchmark(name, source, flags.data, flags.user_grader is not None, flags.limit)
    grader = load_user_grader(flags.user_grader, ["prompt", *rows[0].columns]) if flags.user_grader else None
    return Problems(rows[:limit], dropped, grader, flags.grader)


def load_user_grader(name: str, columns: Collection[str]) -> UserGrader:
    """The function of ``--grader``, ``file.py:function`` or ``module:function``; ``columns``: those of the benchmark.

    It is called as TRL calls a reward function; a completion is correct above 0.
    """
    [reward] = load_rewards([name], {}, columns, noun="grader")

    def grade(problem: Problem, prompt: list[dict[str, Any]], texts: Sequence[str]) -> list[bool]:
        called = reward(
            prompts=[prompt for _ in texts],
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            **{column: [value for _ in texts] for column, value in problem.columns.items()},
        )
        if inspect.iscoroutine(called):
            asyncio.run(called)
        correct = []
        for value in reward.returned:
            if value is None or math.isnan(value):
                raise RunError(f"the grader {name} returned {value} for {problem.id}: expected a number.")
            correct.append(value > 0)
        return correct

    return grade


def plan_evaluation(flags: EvaluationArguments) -> tuple[list[Job], Sampling, Callable[[], Sampler]]:
    """Every target on every benchmark, how completions are sampled, and what loads the model, once."""
    sources = select_benchmarks(flags)
    evaluated = targets.find_targets(flags.runs, flags.model, flags.checkpoint)
    problems = {name: load_problems(name, source, flags, flags.limit) for name, source in sources.items()}
    model = targets.choose_model(evaluated, flags.model, slow=flags.backend != "auto")
    backend = sampling.choose_sampler(flags.backend, targets.is_tiny(model))
    chosen = {
        "batch_size": flags.batch_size if backend == "transformers" else None,
        "load_in_4bit": targets.choose_4bit(flags.load_in_4bit, evaluated),
    }
    how = Sampling(**{name: getattr(flags, name) for name in fields_of([Sampling])} | chosen)
    prompts = targets.choose_prompts(flags.prompt, evaluated, model)
    base = targets.check_base(model, evaluated)
    made_with = provenance()
    jobs = []
    for target, prompt in zip(evaluated, prompts, strict=True):
        adapter = fingerprint(target.adapter) if target.adapter else None
        for name, asked in problems.items():
            settings = {
                "benchmark": name,
                "problems": len(asked.rows),
                "problems_hash": storage.problems_hash(asked.rows),
                "model": base,
                "adapter": adapter,
                "backend": backend,
                **asdict(how),
                **asdict(prompt),
            }
            data = {"source": sources[name], **{flag: getattr(flags, flag) for flag in DATA_FLAGS}}
            data["grader"] = asked.graded_by
            path = Path(flags.output_dir) / (target.label or targets.model_label(model, evaluated)) / f"{name}.jsonl"
            if not flags.overwrite:
                storage.check_settings(path, settings, asked.rows)
            origin = Origin(model, str(target.adapter) if target.adapter else None, target.checkpoint, made_with, data)
            jobs.append(Job(path, asked, Head(settings, origin)))

    @cache
    def load() -> Sampler:
        if backend == "transformers":
            return sampling.TransformersSampler(model, how, prompts[0])
        rank = targets.max_lora_rank(evaluated)
        return sampling.VLLMSampler(model, how, rank, flags.gpu_memory_utilization, prompts[0])

    return jobs, how, load


def find_stored_jobs(flags: EvaluationArguments, given: Collection[str] = ()) -> list[Job]:
    """The jobs whose completions are stored in the output directory: all, or those of ``--benchmarks``.

    ``given`` are the names of the flags that the user has set.
    """
    if stored_flags := [name for name in STORED_FLAGS if name in given]:
        raise UsageError(f"--regrade reads --{stored_flags[0]} from the stored completions: remove it.")
    sources = select_benchmarks(flags) if flags.benchmarks else None
    jobs = []
    for path in storage.find_completion_files(Path(flags.output_dir), sources):
        head = storage.read_head(path)
        stored = head.origin.data
        source = sources[path.stem] if sources else stored["source"]
        known = {flag: stored[flag] for flag in DATA_FLAGS if flag in stored and flag not in given}
        grader = stored.get("grader")
        if grader not in (None, MATH_VERIFY) and not flags.user_grader:
            raise UsageError(f"{path} was graded by {grader}: if you trust it, add --grader {shlex.quote(grader)}.")
        try:
            problems = load_problems(path.stem, source, replace(flags, **known), head.settings.get("problems"))
        except UsageError as error:  # it quotes the file, and the path may be a stranger's
            if sources or flags.user_grader:
                raise
            raise UsageError(f"{path}: its problems cannot be read from {source}: name --benchmarks.") from error
        if storage.problems_hash(problems.rows) != head.settings.get("problems_hash"):
            raise UsageError(f"{path} is of different problems than {source} has now: restore them, or set --data_dir.")
        if storage.weights_have_changed(vars(head.origin) | {"settings": head.settings}):
            logger.warning("%s: the weights have changed since these completions: evaluate them again", path)
        jobs.append(Job(path, problems, head))
    if not jobs:
        raise UsageError(f"no stored completions in {flags.output_dir}: run an evaluation first, or set --output_dir.")
    return jobs


def run_job(
    job: Job, how: Sampling, load: Callable[[], Sampler], overwrite: bool = False, shard: str | None = None
) -> None:
    """Sample the completions that are not in the file yet, and append them as they finish.

    The sampler is loaded only if something is missing; ``overwrite`` discards stored completions and scores first. A
    shard, ``N/M``, samples its part into a file of its own; without one, the shards are merged first.
    """
    problems = job.problems.rows
    keys = storage.keys_of(job.problems.rows, how.k)
    path = storage.shard_path(job.path, shard) if shard else job.path
    shards = storage.shard_paths(job.path)
    with storage.open_completions(path, job.head, problems, overwrite) as file:
        if overwrite:
            storage.scores_path(job.path).unlink(missing_ok=True)
        for other in [] if shard else shards:
            file.merge(other, overwrite)
        others = [job.path, *shards] if shard else []
        done = file.done.union(*(storage.stored_keys(other, job.head.settings, problems) for other in others))
        if done >= keys:
            return
        sampler = load()
        tokenizer = sampling.load_prompt_tokenizer(sampler, job.adapter, job.prompt)
        requests = sampling.make_requests(sampler, problems, how, job.prompt, tokenizer)
        prompts = [job.prompt.format.to_messages(problem.question) for problem in problems]
        scored = ("format",) if job.problems.grader else ("format", "accuracy")
        check_first_rows(tokenizer, prompts, [problem.gold for problem in problems], job.prompt, scored)
        mine = sampling.keys_of_shard(requests, how.batch_size, shard) if shard else keys
        if done >= mine:
            return
        with CompletionBar(job.title, len(mine), len(done & mine), how.max_new_tokens) as bar:
            for rows in sampler.sample(requests, done | (keys - mine), job.adapter, bar.count_tokens):
                file.append(rows)
                bar.count_completions(rows)
