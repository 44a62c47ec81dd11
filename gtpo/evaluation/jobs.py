"""Jobs, each one model on one benchmark: planned from the flags or found in the output directory, and run."""

import logging
import shlex
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from gtpo.data.preview import check_first_rows
from gtpo.errors import UsageError, command_again
from gtpo.evaluation import sampling, storage
from gtpo.evaluation.arguments import DATA_FLAGS, MATH_VERIFY, EvaluationArguments
from gtpo.evaluation.benchmarks import Benchmark, select_benchmarks
from gtpo.evaluation.records import CompletionSettings, Head, Job, Origin, Problems, Sampling
from gtpo.evaluation.sampling import Sampler
from gtpo.evaluation.storage import Completions
from gtpo.evaluation.targets import Asked, choose_targets
from gtpo.files import fingerprint
from gtpo.models.backend import backend_of, check_backend, gpu_is_available
from gtpo.runs.bars import CompletionBar
from gtpo.runs.provenance import provenance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationPlan:
    """Every target on every benchmark, and what samples their completions."""

    jobs: list[Job]
    sampling: Sampling
    load: Callable[[], Sampler]  # the model, once for all jobs
    overwrite: bool = False  # discards stored completions and scores first

    def run(self) -> Iterator[tuple[Job, Completions]]:
        """Each job with its completions; SIGTERM and SIGHUP end the process as Ctrl-C does."""
        stop_on_signals()
        for job in self.jobs:
            yield job, self.run_job(job)

    def run_job(self, job: Job) -> Completions:
        """Sample the completions that are not in the file yet, and append them as they finish.

        The sampler is loaded only if something is missing.
        """
        problems = job.problems.rows
        prompt = job.head.settings.prompt
        keys = storage.keys_of(problems, self.sampling.k)
        with storage.open_completions(job.path, job.head, problems, self.overwrite) as file:
            if self.overwrite:
                storage.scores_path(job.path).unlink(missing_ok=True)
            done = {*file.completions}
            if done >= keys:
                file.write_settings()
                return file.completions
            sampler = self.load()
            tokenizer = sampling.load_prompt_tokenizer(sampler, job.adapter, prompt)
            requests = sampling.make_requests(sampler, problems, self.sampling, prompt, tokenizer)
            prompts = [prompt.format.to_messages(problem.question) for problem in problems]
            scored = ("format",) if job.problems.grader else ("format", "accuracy")
            check_first_rows(tokenizer, prompts, [problem.gold for problem in problems], prompt, scored)
            with CompletionBar(job.title, len(keys), len(done & keys), self.sampling.max_new_tokens) as bar:
                for rows in sampler.sample(requests, done, job.adapter, bar.count_tokens):
                    file.append(rows)
                    bar.count_completions(rows)
            return file.completions


def plan_evaluation(flags: EvaluationArguments) -> EvaluationPlan:
    """The plan of a command line; UsageError if its completion files are of something else."""
    asked = Asked(
        flags.runs, flags.model, flags.checkpoint, flags.load_in_4bit, flags.prompt, slow=flags.backend != "auto"
    )
    benchmarks = select_benchmarks(flags)
    chosen = choose_targets(asked)
    problems = {benchmark: benchmark.load() for benchmark in benchmarks}
    backend = backend_of(flags.backend, chosen.base.is_tiny, gpu_is_available(), "vllm")  # tiny needs no engine
    check_backend(backend)
    how = Sampling(
        flags.k,
        flags.temperature,
        flags.top_p,
        flags.seed,
        flags.max_new_tokens,
        batch_size=None if backend == "vllm" else flags.batch_size,
        load_in_4bit=chosen.load_in_4bit,
    )
    chosen.warn_of_sampling(how)
    made_with = provenance()
    jobs: dict[Path, Job] = {}
    for target in chosen.rows:
        head = Head(
            CompletionSettings(
                model=chosen.weights,
                backend=backend,
                sampling=how,
                adapter=target.adapter and fingerprint(target.adapter),
                prompt=target.prompt,
            ),
            Origin(chosen.base.base, target.adapter, target.model.checkpoint, made_with),
        )
        for benchmark, found in problems.items():
            job = _job(Path(flags.output_dir) / target.label, benchmark, found, head)
            if job.path in jobs:
                raise UsageError(f"two of --runs are called {target.label}: name each once, or rename a run.")
            jobs[job.path] = job
    if not flags.overwrite:
        for job in jobs.values():
            storage.check_settings(job.path, job.head.settings, job.problems.rows)
    load: Callable[[], Sampler] = partial(sampling.TransformersSampler, chosen.base, how)
    if backend == "vllm":
        load = partial(sampling.VLLMSampler, chosen.base, how, chosen.lora_rank, flags.gpu_memory_utilization)
    return EvaluationPlan([*jobs.values()], how, cache(load), flags.overwrite)


def _job(directory: Path, benchmark: Benchmark, problems: Problems, head: Head) -> Job:
    """The job of a target, whose ``head`` names no benchmark yet."""
    settings = replace(
        head.settings,
        benchmark=benchmark.name,
        problems=len(problems.rows),
        problems_hash=storage.problems_hash(problems.rows),
    )
    origin = replace(head.origin, data=benchmark.write())
    return Job(directory / f"{benchmark.name}.jsonl", problems, Head(settings, origin))


def find_stored_jobs(flags: EvaluationArguments, given: Collection[str] = ()) -> list[Job]:
    """The jobs whose completions are stored in the output directory: all, or those of ``--benchmarks``.

    ``given`` are the names of the flags that the user has set.
    """
    sources = {each.name: each.source for each in select_benchmarks(flags)} if flags.benchmarks else {}
    jobs = []
    for path in storage.find_completion_files(Path(flags.output_dir), sources):
        head = storage.read_head(path)
        stored = head.origin.data
        source = sources.get(path.stem) or stored["source"]
        grader = stored.get("grader")
        if grader not in (None, MATH_VERIFY) and not flags.user_grader:
            raise UsageError(f"{path} was graded by {grader}: if you trust it, add --grader {shlex.quote(grader)}.")
        known = {flag: value for flag, value in stored.items() if flag in DATA_FLAGS and flag not in given}
        reading = replace(flags.reading, limit=head.settings.problems, **known)
        problems = Benchmark(path.stem, source, reading, flags.grader).load()
        if storage.problems_hash(problems.rows) != head.settings.problems_hash:
            raise UsageError(f"{path} is of different problems than {source} has now: restore them, or set --data_dir.")
        if storage.weights_have_changed(head):
            logger.warning("%s: the weights have changed since these completions: evaluate them again", path)
        jobs.append(Job(path, problems, head))
    if not jobs:
        raise UsageError(f"no stored completions in {flags.output_dir}: run an evaluation first, or set --output_dir.")
    return jobs


def read_stored(flags: EvaluationArguments, given: Collection[str] = ()) -> Iterator[tuple[Job, Completions]]:
    """Each job of :func:`find_stored_jobs` with its completions."""
    for job in find_stored_jobs(flags, given):
        yield job, storage.completions_of(job)


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP end an evaluation as Ctrl-C does; SIGHUP stays ignored where it is, as under nohup."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: Any) -> None:
    logger.warning("\nstopped by %s; continue with: %s", signal.Signals(number).name, command_again())
    raise SystemExit(128 + number)
