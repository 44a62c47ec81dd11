"""Score models on GSM8K, MATH, AIME, AMC or arithmetic: k completions per problem, pass@k and maj@k as in Table 1.

    python evaluate.py --benchmarks aime24 aime25 amc23 --k 64                  # the newest finished run under outputs/
    python evaluate.py --benchmarks gsm8k --k 32 --adapter base outputs/RUN     # a run beside the model it started from
    python evaluate.py --benchmarks math500 --model qwen --k 8                  # a base model alone
    python evaluate.py --regrade                                                # grade the stored completions again

Completions are stored as they come: the same command continues an evaluation that was stopped.
"""

import argparse
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gtpo.arguments import MODEL_ALIASES
from gtpo.cli import run_script
from gtpo.data import load_benchmark
from gtpo.errors import UsageError, nearest
from gtpo.evaluation.sampling import Sampler, Sampling, TransformersSampler, VLLMSampler, choose_backend, complete
from gtpo.evaluation.scores import Entry, grade, write_results
from gtpo.evaluation.storage import check_settings, fingerprint, read_completions
from gtpo.evaluation.table import table
from gtpo.evaluation.targets import (
    OUTPUTS,
    Target,
    adapter_config,
    base_model,
    find_targets,
    is_tiny,
    refuse_large_model_without_gpu,
    same_model,
    short_name,
)
from gtpo.models import resolve_model
from gtpo.prompts import to_messages
from gtpo.runs import environment

if TYPE_CHECKING:
    pass

# From the repository root this file shadows the Hugging Face package `evaluate`: heavy imports stay in the functions.

TITLES = {
    "gsm8k": "GSM8K",
    "math": "MATH",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "amc23": "AMC 2023",
    "arithmetic": "Arithmetic",
    "arithmetic_hard": "Arithmetic, 4 to 5 steps",
}
DEFAULTS = {
    "checkpoint": "last",
    "k": 64,
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 0,
    "max_new_tokens": 1500,
    "backend": "auto",
    "batch_size": 64,
    "gpu_memory_utilization": 0.9,
}


@dataclass(frozen=True)
class Job:
    """One target on one benchmark: the problems, and the file that keeps the completions."""

    target: Target
    problems: list[dict[str, Any]]
    path: Path
    settings: dict[str, Any]


def main() -> None:
    flags = parse()
    try:
        entries = regrade(flags) if flags.regrade and not flags.targets else evaluate(flags)
    except KeyboardInterrupt:
        print("\nevaluate.py: interrupted; the same command continues where it stopped.", file=sys.stderr)
        sys.exit(130)
    path = write_results(Path(flags.output_dir), entries)
    print(f"\n{table(entries)}\n\nScores, settings and counts of each problem: {path}")


def evaluate(flags: argparse.Namespace) -> list[Entry]:
    """Draw the completions that are missing, then grade: an entry for each target and benchmark.

    Raises:
        UsageError: For bad input, before a model is loaded.
    """
    targets = find_targets(flags.adapter, flags.model, flags.checkpoint)
    base = base_model(targets, flags.model)
    if flags.backend == "auto":
        refuse_large_model_without_gpu(base if not flags.model else MODEL_ALIASES.get(flags.model, flags.model))
    problems = {name: load_problems(name, flags.data_dir, flags.limit) for name in flags.benchmarks}

    pass
    pass
    pass

    model = resolve_model(flags.model or base)
    if any(target.adapter for target in targets) and not same_model(model, base):
        raise UsageError(
            f"--model {flags.model} is not the model that the adapter was trained on, {base}: leave --model out, the "
            "adapter names its own."
        )
    backend = choose_backend(flags.backend, is_tiny(model))
    sampling = Sampling(
        flags.k,
        flags.temperature,
        flags.top_p,
        flags.seed,
        flags.max_new_tokens,
        flags.batch_size if backend == "transformers" else None,
    )
    jobs = []
    for target in targets:
        for name, rows in problems.items():
            path = Path(flags.output_dir) / (target.label or f"base-{short_name(model)}") / f"{name}.jsonl"
            settings = {
                "benchmark": name,
                "problems": len(rows),
                "problems_hash": problems_hash(rows),
                "model": fingerprint(model) or model,
                "adapter": fingerprint(target.adapter) if target.adapter else None,
                "backend": backend,
                **asdict(sampling),
            }
            if not flags.overwrite:
                check_settings(path, settings)
            jobs.append(Job(target, rows, path, settings))

    load = functools.cache(lambda: load_sampler(model, backend, sampling, targets, flags.gpu_memory_utilization))
    for job in jobs if not flags.regrade else ():
        about = {
            "model": model,
            "adapter": str(job.target.adapter) if job.target.adapter else None,
            "checkpoint": job.target.checkpoint,
            "environment": environment(),
        }
        if flags.overwrite:
            job.path.with_suffix(".json").unlink(missing_ok=True)
        title = f"{job.path.parent.name}, {TITLES[job.path.stem]}"
        complete(
            job.path, job.settings, about, job.problems, sampling, job.target.adapter, load, title, flags.overwrite
        )
    return [grade(job.path, job.problems) for job in jobs]


def regrade(flags: argparse.Namespace) -> list[Entry]:
    """Grade the stored completions again, all under the output folder or those of the named benchmarks.

    Raises:
        UsageError: If there are none, a file is unfinished, or its benchmark has other problems now.
    """
    found = sorted(Path(flags.output_dir).glob("*/*.jsonl"))
    paths = [path for path in found if path.stem in (flags.benchmarks or TITLES)]
    if not paths:
        raise UsageError(
            f"no stored completions under {flags.output_dir}: evaluate first, or name their folder with --output_dir."
        )
    pass

    entries = []
    for path in paths:
        settings = read_completions(path)[0]["settings"]
        rows = load_problems(path.stem, flags.data_dir, settings["problems"])
        if problems_hash(rows) != settings["problems_hash"]:
            raise UsageError(
                f"{path} was made from other problems than {path.stem} has now: name their folder with --data_dir."
            )
        entries.append(grade(path, rows))
    return entries


# What to evaluate


def load_problems(name: str, data_dir: str | None, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` problems of a benchmark, {id, question, gold}.

    Raises:
        UsageError: If they cannot be read.
    """
    pass

    return load_benchmark(name, data_dir)[:limit]


def problems_hash(rows: Sequence[dict[str, Any]]) -> str:
    """A hash of what the models are asked; a gold answer that is read differently leaves it alone."""
    pass

    asked = [[row["id"], to_messages(row["question"])] for row in rows]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def load_sampler(
    model: str, backend: str, sampling: "Sampling", targets: Sequence[Target], gpu_memory_utilization: float
) -> "Sampler":
    """The model on its backend, once for all benchmarks and adapters."""
    pass

    if backend == "transformers":
        return TransformersSampler(model, sampling)
    configs = [adapter_config(target.adapter) for target in targets if target.adapter]
    ranks = [max([config["r"], *config.get("rank_pattern", {}).values()]) for config in configs]
    return VLLMSampler(model, sampling, max(ranks, default=None), gpu_memory_utilization)


# Scores


# Flags


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors and name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            word = message.partition(": ")[2].split()[0].partition("=")[0]
            message = f"{word} is no flag{nearest(word, self._option_string_actions)}; --help lists them"
        raise UsageError(f"{message}.")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, checked.

    Raises:
        UsageError: If one is unknown or out of range.
    """
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Scores: results.json in the output folder (docs/evaluation.md). --debug shows an error's traceback.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is evaluated")
    what.add_argument("--benchmarks", nargs="+", metavar="NAME", help=f"From: {', '.join(TITLES)}.")
    what.add_argument(
        "--adapter",
        nargs="+",
        metavar="RUN",
        help="Run directories or adapter folders, side by side in one table; `base` among them is the model they "
        "started from. Default: the newest finished run under outputs/.",
    )
    what.add_argument(
        "--model",
        help="Without --adapter, the base model to evaluate: tiny, llama, qwen, a Hub id or a path.",
    )
    what.add_argument(
        "--checkpoint", metavar="last|best|N", help="Which adapter of a run: the final one, best/, or step N. [last]"
    )
    what.add_argument("--limit", type=int, metavar="N", help="Only the first N problems of each benchmark.")
    what.add_argument("--data_dir", metavar="DIR", help="Folder of JSONL files to read instead of the Hub.")
    how = parser.add_argument_group("how completions are drawn")
    how.add_argument("--k", type=int, help="Completions of each problem. [64]")
    how.add_argument("--temperature", metavar="X", type=float, help="0 is greedy. [1.0]")
    how.add_argument("--top_p", metavar="X", type=float, help="Nucleus sampling, up to 1: off. [1.0]")
    how.add_argument("--seed", type=int, help="The same seed gives the same completions. [0]")
    how.add_argument("--max_new_tokens", type=int, metavar="N", help="Tokens of a completion. [1500]")
    how.add_argument(
        "--backend",
        choices=("auto", "vllm", "transformers"),
        help="auto: vLLM on a GPU; Transformers without one, and for the tiny model. [auto]",
    )
    how.add_argument(
        "--batch_size", type=int, metavar="N", help=f"Completions at once, Transformers. [{DEFAULTS['batch_size']}]"
    )
    how.add_argument("--gpu_memory_utilization", type=float, metavar="X", help="Share of GPU memory for vLLM. [0.9]")
    where = parser.add_argument_group("what is kept")
    where.add_argument("--output_dir", metavar="DIR", default=str(OUTPUTS / "evaluation"), help="[%(default)s]")
    where.add_argument(
        "--regrade",
        action="store_true",
        help="Grade stored completions again, without a model: all in --output_dir, or those of --benchmarks.",
    )
    where.add_argument("--overwrite", action="store_true", help="Drop the stored completions and draw them anew.")
    flags = parser.parse_args(argv)
    flags.targets = bool(flags.adapter or flags.model)
    given = [name for name in DEFAULTS if getattr(flags, name) is not None]
    if flags.regrade and flags.overwrite:
        raise UsageError("--regrade keeps the stored completions and --overwrite drops them: give one of them.")
    if flags.regrade and not flags.targets and (given or flags.limit):
        raise UsageError(f"--regrade reads --{(given or ['limit'])[0]} from the stored completions: leave it out.")
    for name in given:
        check_range(name, getattr(flags, name))
    if flags.limit is not None:
        check_range("limit", flags.limit)
    for name, value in DEFAULTS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    if not flags.benchmarks and (flags.targets or not flags.regrade):
        raise UsageError(f"--benchmarks is missing: name one or more of {', '.join(TITLES)}.")
    flags.benchmarks = list(dict.fromkeys(flags.benchmarks or ())) or None
    for name in flags.benchmarks or ():
        if name not in TITLES:
            raise UsageError(f"benchmark {name!r} is unknown{nearest(name, TITLES)}: pick from {', '.join(TITLES)}.")
    if flags.temperature == 0 and flags.k > 1:
        raise UsageError(
            f"--temperature 0 draws one completion {flags.k} times: add --k 1, or sample at a temperature over 0."
        )
    return flags


def check_range(name: str, value: Any) -> None:
    """Refuse a number out of range.

    Raises:
        UsageError: With the range.
    """
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        "temperature": (lambda x: math.isfinite(x) and x >= 0, "a number >= 0 (0 is greedy)"),
        "top_p": (lambda x: 0 < x <= 1, "a number over 0, up to 1"),
        "gpu_memory_utilization": (lambda x: 0 < x <= 1, "a share over 0, up to 1"),
        "seed": (lambda x: x >= 0, "a whole number >= 0"),
        "checkpoint": (lambda x: x in ("last", "best") or x.isdecimal(), "last, best or the number of a step"),
        "backend": (lambda x: True, ""),
    }
    holds, expected = ranges.get(name, (lambda x: x >= 1, "at least 1"))
    if not holds(value):
        raise UsageError(f"--{name} is {value}: expected {expected}.")


if __name__ == "__main__":
    run_script(main)
