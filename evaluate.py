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

from config import MODEL_ALIASES, UsageError, gpu_is_available, nearest, run_script

if TYPE_CHECKING:
    from sampling import Sampler, Sampling

# From the repository root this file shadows the Hugging Face package `evaluate`: heavy imports stay in the functions.

OUTPUTS = Path("outputs")
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
PASS_COLUMNS, MAJ_COLUMNS = (1, 8, 16, 32, 64), (4, 8, 16, 32, 64)  # Table 1
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

Entry = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """One row of the table: an adapter, or the base model where ``adapter`` is None."""

    label: str
    adapter: Path | None = None
    checkpoint: str | None = None


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

    from models import resolve_model
    from sampling import Sampling, check_settings, choose_backend, complete, fingerprint
    from tracking import environment

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
    from sampling import read_completions

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


def find_targets(adapters: Sequence[str] | None, model: str | None, checkpoint: str) -> list[Target]:
    """The rows of the table, in the order of the flags; without any, the newest finished run under outputs/.

    Raises:
        UsageError: If a run or adapter is not there, or two of them have one name.
    """
    if not adapters and model:
        return [Target("")]
    if not adapters:
        finished = sorted(OUTPUTS.rglob("adapter/adapter_config.json"), key=lambda path: path.stat().st_mtime)
        if not finished:
            raise UsageError(
                f"no finished run under {OUTPUTS}/: train one (`python train_gtpo.py --model tiny --dataset "
                "arithmetic` on a CPU), name a run with --adapter RUN, or evaluate a base model with --model tiny."
            )
        newest = str(finished[-1].parent.parent)
        print(
            f"Evaluating {newest}, the newest finished run under {OUTPUTS}/ (--adapter RUN names another).", flush=True
        )
        adapters = [newest]
    if not model and set(adapters) == {"base"}:
        raise UsageError("--adapter base alone names no base model: add a run to it, or --model tiny|llama|qwen.")
    targets = []
    for name in adapters:
        try:
            targets.append(Target("") if name == "base" else adapter_target(name, checkpoint))
        except UsageError as error:
            if not Path(name).is_dir() or set(adapters) <= {name, "base"}:
                raise
            print(f"Left out: {error}", flush=True)
    if not any(target.adapter for target in targets) and set(adapters) != {"base"}:
        raise UsageError(f"none of --adapter {' '.join(adapters)} is finished: name a run that is.")
    labels = [target.label for target in targets]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(
            f"two of --adapter are called {twice or 'base'!r}: name each once, or evaluate them into two --output_dir."
        )
    return targets


def adapter_target(name: str, checkpoint: str) -> Target:
    """The adapter of a run at a checkpoint, or an adapter folder itself.

    Raises:
        UsageError: If there is no such adapter.
    """
    folder = Path(name)
    if not folder.is_dir():
        runs = [str(path.parent.parent) for path in OUTPUTS.rglob("adapter/adapter_config.json")]
        raise UsageError(f"--adapter {name} is no folder{nearest(name, runs)}: expected a run directory or an adapter.")
    if (folder / "adapter_config.json").is_file():
        if checkpoint != DEFAULTS["checkpoint"]:
            raise UsageError(
                f"--checkpoint {checkpoint} is part of a run, and {name} is an adapter itself: name the run."
            )
        return Target(label_of(folder), folder)
    adapter = folder / {"last": "adapter", "best": "best"}.get(checkpoint, f"checkpoint-{checkpoint}")
    if not (adapter / "adapter_config.json").is_file():
        there = sorted(
            path.parent.name.removeprefix("checkpoint-").replace("adapter", "last")
            for path in folder.glob("*/adapter_config.json")
            if path.parent.name in ("adapter", "best") or path.parent.name.startswith("checkpoint-")
        )
        way_out = f"--checkpoint takes {', '.join(there)} here" if there else "its training has not finished"
        raise UsageError(f"{name} has no {adapter.name}/adapter_config.json: {way_out}.")
    at = "" if checkpoint == DEFAULTS["checkpoint"] else f"@{checkpoint}"
    return Target(label_of(folder) + at, adapter, checkpoint)


def label_of(folder: Path) -> str:
    """A run's name in tables and paths: its path under outputs/, joined with dashes; elsewhere the folder's name."""
    folder, root = folder.resolve(), OUTPUTS.resolve()
    if folder.name == "adapter":
        folder = folder.parent
    return "-".join(folder.relative_to(root).parts) if folder.is_relative_to(root) else folder.name


def base_model(targets: Sequence[Target], model: str | None) -> str:
    """The base model that all adapters were trained on; without an adapter, what --model names.

    Raises:
        UsageError: If an adapter names none, two name different ones, or it is a local folder that is gone.
    """
    bases: dict[str, Path] = {}
    for target in targets:
        if target.adapter:
            bases.setdefault(adapter_config(target.adapter)["base_model_name_or_path"], target.adapter)
    first, *others = bases or [MODEL_ALIASES.get(str(model), str(model))]
    for other in others:
        if not same_model(first, other):
            raise UsageError(
                f"{bases[first]} was trained on {first} and {bases[other]} on {other}: evaluate them in two calls, "
                "`--regrade` prints one table of all."
            )
    local = Path(first).is_absolute() or first.startswith(".") or first.count("/") > 1
    if bases and local and not model and not Path(first).exists():
        raise UsageError(
            f"{bases[first]} was trained on {first}, which is not here: name the base model with --model "
            "(--model tiny makes the tiny one)."
        )
    return first


def adapter_config(adapter: Path) -> dict[str, Any]:
    """The LoRA settings that PEFT stores with an adapter.

    Raises:
        UsageError: If they cannot be read or name no base model.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}.") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UsageError(f"{path} names no base_model_name_or_path: write the model's Hub id or folder there.")
    if not (adapter / "adapter_model.safetensors").is_file():
        raise UsageError(f"{adapter} has no adapter_model.safetensors; adapter_model.bin, a pickle, is not read.")
    return config


def same_model(a: str, b: str) -> bool:
    """Whether two names mean one model: equal, one folder, or of one last part where a Hub id has a copy.

    Copies are a local folder (downloaded, or moved since) and Unsloth's, of which an adapter trained in 4 bit names
    ``unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit`` or the like.
    """
    here = [Path(name).exists() for name in (a, b)]
    if a == b or all(here):
        return a == b or Path(a).samefile(b)
    plain = [
        Path(name).name.lower().removesuffix("-bnb-4bit").removesuffix("-unsloth").removeprefix("meta-")
        for name in (a, b)
    ]
    return plain[0] == plain[1] and (any(here) or "unsloth" in (a.partition("/")[0], b.partition("/")[0]))


def refuse_large_model_without_gpu(model: str) -> None:
    """Refuse the paper's models on a CPU, unless --backend transformers asks for it.

    Raises:
        UsageError: Without a GPU.
    """
    large = any(same_model(model, MODEL_ALIASES[alias]) for alias in ("llama", "qwen"))
    if (large or model.endswith("bnb-4bit")) and not gpu_is_available():
        raise UsageError(
            f"{model} needs a GPU and PyTorch sees none here: check torch.cuda.is_available() and the NVIDIA driver "
            "(R580 or newer), evaluate --model tiny --benchmarks arithmetic on a CPU, or insist with --backend "
            "transformers (hours)."
        )


def is_tiny(model: str) -> bool:
    """Whether a resolved model is the tiny base that is built here."""
    return (Path(model) / "tiny.json").is_file()


def short_name(model: str) -> str:
    """A model's name in tables and paths."""
    return "tiny" if is_tiny(model) else Path(model).name


def load_problems(name: str, data_dir: str | None, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` problems of a benchmark, {id, question, gold}.

    Raises:
        UsageError: If they cannot be read.
    """
    from data import load_benchmark

    return load_benchmark(name, data_dir)[:limit]


def problems_hash(rows: Sequence[dict[str, Any]]) -> str:
    """A hash of what the models are asked; a gold answer that is read differently leaves it alone."""
    from prompts import to_messages

    asked = [[row["id"], to_messages(row["question"])] for row in rows]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def load_sampler(
    model: str, backend: str, sampling: "Sampling", targets: Sequence[Target], gpu_memory_utilization: float
) -> "Sampler":
    """The model on its backend, once for all benchmarks and adapters."""
    from sampling import TransformersSampler, VLLMSampler

    if backend == "transformers":
        return TransformersSampler(model, sampling)
    configs = [adapter_config(target.adapter) for target in targets if target.adapter]
    ranks = [max([config["r"], *config.get("rank_pattern", {}).values()]) for config in configs]
    return VLLMSampler(model, sampling, max(ranks, default=None), gpu_memory_utilization)


# Scores


def grade(path: Path, rows: Sequence[dict[str, Any]]) -> Entry:
    """The entry of one file of completions: what ``results.json`` holds for it (docs/evaluation.md).

    Args:
        path: The completions.
        rows: The problems, {id, question, gold}.

    Raises:
        UsageError: If completions are missing.
    """
    from tqdm import tqdm

    from answers import timeouts
    from metrics import bootstrap_interval, first_k_pass, majority_at_k, pass_at_k
    from rewards import FORMAT_MAX, extract_answer, is_correct, score_format
    from sampling import read_completions

    head, completions = read_completions(path)
    k, expected = head["settings"]["k"], len(rows) * head["settings"]["k"]
    if len(completions) != expected:
        raise UsageError(
            f"{path} holds {len(completions)} of {expected} completions: run its evaluation again without --regrade, "
            "it continues where it stopped."
        )
    samples: dict[tuple[str, int], dict[str, Any]] = {(row["id"], row["sample"]): row for row in completions}
    problems, answers, correct = [], [], []
    timeouts_before = timeouts()
    for row in tqdm(rows, desc="  grading", unit=" problems", leave=False):
        texts = [samples[row["id"], sample]["completion"] for sample in range(k)]
        answers.append([extract_answer(text) for text in texts])
        correct.append([is_correct(answer, row["gold"]) for answer in answers[-1]])
        problems.append(
            {
                "id": row["id"],
                "gold": row["gold"],
                "n": k,
                "c": sum(correct[-1]),
                "formatted": sum(score_format(text) == FORMAT_MAX for text in texts),
                "correct": "".join("01"[right] for right in correct[-1]),
            }
        )

    sizes = sorted({2**power for power in range(k.bit_length())} | {k})
    of_each: dict[str, dict[int, list[float]]] = {  # the score of each problem
        "pass": {size: [pass_at_k(k, problem["c"], size) for problem in problems] for size in sizes},
        "pass_first_k": {size: [first_k_pass(marks, size) for marks in correct] for size in sizes},
        "maj": {size: [majority_at_k(*both, size) for both in zip(answers, correct, strict=True)] for size in sizes},
    }
    means = {
        name: {str(size): percent(sum(values) / len(values)) for size, values in by_size.items()}
        for name, by_size in of_each.items()
    }
    intervals = {
        name: {str(size): [percent(end) for end in bootstrap_interval(of_each[name][size])] for size in sizes}
        for name in ("pass", "maj")
    }
    return {
        "label": path.parent.name,
        "benchmark": path.stem,
        "problems": len(rows),
        "k": k,
        "scores": {
            **means,
            "format": percent(sum(problem["formatted"] for problem in problems) / expected),
            "finished": percent(sum(row["finished"] for row in completions) / expected),
            "tokens": sum(row["tokens"] for row in completions) / expected,
        },
        "intervals": intervals,
        "settings": head["settings"],
        **head["about"],
        "graded_by": {**grader(), "timeouts": timeouts() - timeouts_before},
        "per_problem": problems,
    }


def percent(fraction: float) -> float:
    """A share from 0 to 1 in percent, without the noise of its last digits."""
    return round(100 * fraction, 6)


@functools.cache
def grader() -> dict[str, Any]:
    """What decides the marks: this checkout and math-verify."""
    import importlib.metadata

    from tracking import git_revision

    return {"git_revision": git_revision(), "math-verify": importlib.metadata.version("math-verify")}


def write_results(folder: Path, entries: Sequence[Entry]) -> Path:
    """Write each entry beside its completions, and results.json with every entry in ``folder``; none of them half."""
    from faults import write_atomically

    for entry in entries:
        write_atomically(folder / entry["label"] / f"{entry['benchmark']}.json", json.dumps(entry, indent=1))
    paths = [path.with_suffix(".json") for path in sorted(folder.glob("*/*.jsonl")) if path.stem in TITLES]
    stored = [json.loads(path.read_text()) for path in paths if path.is_file()]
    write_atomically(folder / "results.json", json.dumps({"results": stored}, indent=1))
    return folder / "results.json"


def table(entries: Sequence[Entry]) -> str:
    """The entries as text: a block for each benchmark with the rows and columns of Table 1, all in percent."""
    blocks = []
    for benchmark in dict.fromkeys(entry["benchmark"] for entry in entries):
        rows = [entry for entry in entries if entry["benchmark"] == benchmark]
        pass_columns, maj_columns = (
            sorted({k for row in rows for k in columns_up_to(row["k"], columns)})
            for columns in (PASS_COLUMNS, MAJ_COLUMNS)
        )
        groups = [
            ("Pass@k (%), unbiased", "pass", pass_columns),
            ("Pass@k (%), first k", "pass_first_k", pass_columns),
            ("Maj@k (%)", "maj", maj_columns),
        ]
        cells = [["", "", *(title for title, _, _ in groups), "Format", "Pass@1"]]
        cells.append(
            ["Model", "Method", *(" ".join(f"{k:>5}" for k in ks) for _, _, ks in groups), "(%)", "95 % interval"]
        )
        for row in rows:
            numbers = [
                " ".join(
                    f"{row['scores'][name][str(k)]:5.1f}" if str(k) in row["scores"][name] else "    -" for k in ks
                )
                for _, name, ks in groups
            ]
            low, high = row["intervals"]["pass"]["1"]
            format_rate = f"{row['scores']['format']:.1f}"
            method = row["label"] if row["adapter"] else "base"
            cells.append([short_name(row["model"]), method, *numbers, format_rate, f"{low:.1f} to {high:.1f}"])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        rule = "-" * max(map(len, lines))
        sizes = " and ".join(str(k) for k in sorted({row["k"] for row in rows}))
        lines.insert(0, f"{TITLES[benchmark]}: {rows[0]['problems']} problems, k = {sizes}")
        blocks.append("\n".join([lines[0], rule, *lines[1:3], rule, *lines[3:], rule]))
    return "\n\n".join(blocks)


def columns_up_to(k: int, columns: Sequence[int]) -> list[int]:
    """The columns of Table 1 that k samples can fill, and k itself."""
    return sorted({column for column in columns if column <= k} | {k})


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
