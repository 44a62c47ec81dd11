"""What the benchmarks share: their timer, peaks of memory, where a result comes from, and its table."""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from timeit import timeit
from typing import Any

import jinja2
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gtpo.models.backend import installed_version  # noqa: E402
from gtpo.runs.provenance import git_revision  # noqa: E402


def clock_of(device: str) -> Callable[[], float]:
    """CPU seconds of one thread, the wall time of several, or that of a GPU which has finished."""
    if device == "cuda":
        return synchronized
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def medians(steps: Mapping[Any, Callable[[], object]], rounds: int, device: str) -> dict[Any, float]:
    """Median seconds by step, over interleaved rounds."""
    for step in steps.values():
        step()  # warm-up: libraries are loaded, kernels compiled
    seconds: dict[Any, list[float]] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds.setdefault(name, []).append(timeit(step, timer=clock_of(device), number=1))
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_in_own_process(script: str, name: str, flags: Mapping[str, Any]) -> float:
    """MiB that a step of a benchmark adds, measured in a fresh process."""
    command = [sys.executable, script, "--peak", name]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def added_mib(step: Callable[[], object], device: str) -> float:
    """MiB that a step adds at its peak, in this process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the high-water mark
    before = status_kib("VmRSS")
    step()
    return (status_kib("VmHWM") - before) / 2**10


def status_kib(key: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (kib,) = re.findall(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    return int(kib)


def provenance(packages: tuple[str, ...], device: str = "cpu") -> dict[str, Any]:
    """Command, date, revision, machine and versions of a run."""
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        (machine, *_) = re.findall(r"^model name\s*: (.*)", cpu, re.MULTILINE)
        if torch.cpu._is_amx_tile_supported():
            machine += ", AMX"
    revision = git_revision() or ""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "revision": revision[:7] + revision[40:],
        "machine": machine,
        "threads": torch.get_num_threads(),
        "versions": {name: installed_version(name) for name in packages},
    }


def table(template: str, values: Mapping[str, Any]) -> str:
    """A text of ``benchmarks/tables/``."""
    tables = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "benchmarks" / "tables"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return tables.get_template(template).render(values, result=values).rstrip()


def run_benchmark(
    parser: argparse.ArgumentParser,
    template: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    peak: Callable[[argparse.Namespace], float],
) -> None:
    """Measure, then print the table and store the result; or print the table of a stored one, or one peak."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the tables of a results file and exit")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.markdown:
        print(table(template, json.loads(args.markdown.read_text())))
        return
    torch.set_num_threads(args.threads)
    if args.peak:
        print(peak(args))
        return
    result = measure(args)
    print(table(template, result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + os.linesep)
