"""Jobs, each one model on one benchmark: planned from the flags or found in the output directory, and run."""

import asyncio
import inspect
import logging
import math
import shlex
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.data.load import load_benchmark, load_user_benchmark
from gtpo.data.preview import check_first_rows
from gtpo.data.tables import check_source, refuse_flags, short_name_of
from gtpo.errors import RunError, UsageError, command_again, printable
from gtpo.evaluation import sampling, storage, targets
from gtpo.evaluation.arguments import DATA_FLAGS, MATH_VERIFY, EvaluationArguments
from gtpo.evaluation.records import Head, Origin, Problem, Problems, UserGrader
from gtpo.evaluation.sampling import Sampler, Sampling
from gtpo.files import fingerprint
from gtpo.grading.user_functions import load_rewards
from gtpo.models.backend import backend_of, check_backend, gpu_is_available
from gtpo.runs.bars import CompletionBar
from gtpo.runs.provenance import provenance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One model on one benchmark; a completion file, ``LABEL/BENCHMARK.jsonl``, with other settings is refused."""

    path: Path
    problems: Problems
    head: Head

    @property
    def adapter(self) -> Path | None:
        adapter = self.head.origin.adapter
        return Path(adapter) if adapter else None

    @property
    def title(self) -> str:
        """Label and benchmark, for the progress bar."""
        name = self.path.stem
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
        name = short_name_of(source, BENCHMARK_TITLES)
        if selected.setdefault(name, source) != source:
            raise UsageError(f"{selected[name]} and {source} are both called {name} in tables and files: rename one.")
    if not selected.keys() - BENCHMARK_TITLES:
        for_yours = [*DATA_FLAGS[1:], *(["grader"] if flags.user_grader else [])]  # all but data_dir
        refuse_flags(flags, for_yours, "these benchmarks")
    return selected


def load_problems(name: str, source: str, flags: EvaluationArguments) -> Problems:
    """The problems of a benchmark, by name and source as :func:`select_benchmarks` gives them."""
    if name in BENCHMARK_TITLES:
        rows = load_benchmark(name, flags.data_dir)[: flags.limit]
        return Problems(rows, graded_by=None if flags.user_grader else flags.grader)
    rows, dropped = load_user_benchmark(name, source, flags, flags.user_grader is not None, flags.limit)
    grader = None
    if flags.user_grader:
        grader = load_user_grader(flags.user_grader, ["prompt", *rows[0].columns])
    return Problems(rows, dropped, grader, flags.grader)


def load_user_grader(name: str, columns: Collection[str]) -> UserGrader:
    """The function of ``--grader``, ``file.py:function`` or ``module:function``; ``columns``: those of the benchmark.

    It is called as TRL calls a reward function; a completion is correct above 0.
    """
    [reward] = load_rewards([name], {}, columns, noun="grader")

    def grade(problem: Problem, prompt: Any, texts: Sequence[str]) -> list[bool]:
        count = len(texts)
        called = reward(
            prompts=[prompt] * count,
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            **{column: [value] * count for column, value in problem.columns.items()},
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


@dataclass(frozen=True)
class EvaluationPlan:
    """Every target on every benchmark, and what samples their completions."""

    jobs: list[Job]
    sampling: Sampling
    load: Callable[[], Sampler]  # the model, once for all jobs
    overwrite: bool = False  # discards stored completions and scores first

    def run(self) -> None:
        """Sample what is missing; SIGTERM and SIGHUP then end the process as Ctrl-C does."""
        stop_on_signals()
        for job in self.jobs:
            self.run_job(job)

    def run_job(self, job: Job) -> None:
        """Sample the completions that are not in the file yet, and append them as they finish.

        The sampler is loaded only if something is missing.
        """
        problems = job.problems.rows
        prompt = job.head.prompt
        keys = storage.keys_of(problems, self.sampling.k)
        with storage.open_completions(job.path, job.head, problems, self.overwrite) as file:
            if self.overwrite:
                storage.scores_path(job.path).unlink(missing_ok=True)
            done = set(file.done)
            if done >= keys:
                file.write_settings()
                return
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


def plan_evaluation(flags: EvaluationArguments) -> EvaluationPlan:
    """The plan of a command line; UsageError if its completion files are of something else."""
    sources = select_benchmarks(flags)
    evaluated = targets.find_targets(flags.runs, flags.model, flags.checkpoint, slow=flags.backend != "auto")
    problems = {name: load_problems(name, source, flags) for name, source in sources.items()}
    model = replace(evaluated[0], adapter=None)
    backend = backend_of(flags.backend, model.is_tiny, gpu_is_available(), "vllm")  # tiny needs no engine
    check_backend(backend)
    how = Sampling(
        flags.k,
        flags.temperature,
        flags.top_p,
        flags.seed,
        flags.max_new_tokens,
        batch_size=None if backend == "vllm" else flags.batch_size,
        load_in_4bit=targets.choose_4bit(flags.load_in_4bit, evaluated),
    )
    targets.warn_of_sampling(evaluated, {"temperature": how.temperature, "top_p": how.top_p})
    prompts = targets.choose_prompts(flags.prompt, evaluated)
    base = targets.check_base(evaluated)
    read_with = {flag: getattr(flags, flag) for flag in DATA_FLAGS}
    made_with = provenance()
    jobs: list[Job] = []
    for target, prompt in zip(evaluated, prompts, strict=True):
        adapter = str(target.adapter) if target.adapter else None
        weights = {"model": base, "backend": backend, **asdict(how), "adapter": adapter and fingerprint(adapter)}
        directory = Path(flags.output_dir) / targets.label_among(target, evaluated)
        if any(job.path.parent == directory for job in jobs):
            raise UsageError(f"two of --runs are called {directory.name}: name each once, or rename a run.")
        for name, asked in problems.items():
            settings = {
                **weights,
                **asdict(prompt),
                "benchmark": name,
                "problems": len(asked.rows),
                "problems_hash": storage.problems_hash(asked.rows),
            }
            data = {"source": sources[name], **read_with, "grader": asked.graded_by}
            head = Head(settings, Origin(model.base, adapter, target.checkpoint, made_with, data))
            job = Job(directory / f"{name}.jsonl", asked, head)
            if not flags.overwrite:
                storage.check_settings(job.path, settings, asked.rows)
            jobs.append(job)
    load: Callable[[], Sampler] = partial(sampling.TransformersSampler, model, how)
    if backend == "vllm":
        rank = targets.max_lora_rank(evaluated)
        load = partial(sampling.VLLMSampler, model, how, rank, flags.gpu_memory_utilization)
    return EvaluationPlan(jobs, how, cache(load), flags.overwrite)


def find_stored_jobs(flags: EvaluationArguments, given: Collection[str] = ()) -> list[Job]:
    """The jobs whose completions are stored in the output directory: all, or those of ``--benchmarks``.

    ``given`` are the names of the flags that the user has set.
    """
    sources = select_benchmarks(flags) if flags.benchmarks else {}
    jobs = []
    for path in storage.find_completion_files(Path(flags.output_dir), sources):
        head = storage.read_head(path)
        stored = head.origin.data
        source = sources.get(path.stem) or stored["source"]
        grader = stored.get("grader")
        if grader not in (None, MATH_VERIFY) and not flags.user_grader:
            raise UsageError(f"{path} was graded by {grader}: if you trust it, add --grader {shlex.quote(grader)}.")
        known = {flag: value for flag, value in stored.items() if flag in DATA_FLAGS and flag not in given}
        problems = load_problems(path.stem, source, replace(flags, limit=head.settings.get("problems"), **known))
        if storage.problems_hash(problems.rows) != head.settings.get("problems_hash"):
            raise UsageError(f"{path} is of different problems than {source} has now: restore them, or set --data_dir.")
        if storage.weights_have_changed(vars(head.origin) | vars(head)):
            logger.warning("%s: the weights have changed since these completions: evaluate them again", path)
        jobs.append(Job(path, problems, head))
    if not jobs:
        raise UsageError(f"no stored completions in {flags.output_dir}: run an evaluation first, or set --output_dir.")
    return jobs


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP end an evaluation as Ctrl-C does; SIGHUP stays ignored where it is, as under nohup."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: Any) -> None:
    logger.warning("\nstopped by %s; continue with: %s", signal.Signals(number).name, command_again())
    raise SystemExit(128 + number)
