"""Soak test: memory, child processes and open files of a long training run must not grow with its steps.

    python tests/soak.py                                            # 2,000 steps of GTPO on the tiny model
    python tests/soak.py --steps 300 --script train_grpo.py -- --beta 0.04      # flags of the script after --

It runs the script in a subprocess and samples it twice a second. From step 200 on, when caches are filled, resident
memory may grow by less than 1 MB per 100 steps, and the median numbers of children and open files must be the same in
the first and the last quarter of the samples. Exit code 1 otherwise.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
SETTLED = 200  # steps of warm-up
MAX_SLOPE = 1.0  # MB of resident memory per 100 steps
SMALL = ["--model", "tiny", "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1"]
SMALL += ["--max_completion_length", "24", "--initial_entropy", "0.5"]


class Sample(NamedTuple):
    """The process at one time of its run."""

    step: int
    megabytes: float  # resident
    children: int
    files: int


def main(script: str, steps: int, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory() as parent:
        samples = watch(script, [*SMALL, "--max_steps", str(steps), *flags], Path(parent) / "run")
    settled = [sample for sample in samples if SETTLED <= sample.step < steps]  # at the last step it saves and exits
    print(f"{'step':>8}{'MB':>10}{'children':>10}{'files':>8}")
    for sample in samples[:: max(1, len(samples) // 20)]:
        print(f"{sample.step:8}{sample.megabytes:10.1f}{sample.children:10}{sample.files:8}")
    if len({sample.step for sample in settled}) < 8:
        sys.exit(f"only {len(settled)} samples after step {SETTLED}: raise --steps.")
    slope = 100 * statistics.linear_regression(*zip(*[sample[:2] for sample in settled], strict=True)).slope
    print(f"\nresident memory after step {SETTLED}: {slope:+.3f} MB per 100 steps (expected: below {MAX_SLOPE:g})")
    quarter = len(settled) // 4
    constant = True
    for name in ("children", "files"):
        counts = [getattr(sample, name) for sample in settled]
        first, last = statistics.median(counts[:quarter]), statistics.median(counts[-quarter:])
        constant &= first == last
        print(f"{name}: {first:g} in the first quarter, {last:g} in the last, {max(counts)} at most")
    return 0 if slope < MAX_SLOPE and constant else 1


def watch(script: str, argv: list[str], run: Path) -> list[Sample]:
    """Run the script until it exits; the samples in order."""
    metrics = run / "metrics.jsonl"
    command = [sys.executable, script, *argv, "--output_dir", str(run)]
    samples = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as started:
        process = psutil.Process(started.pid)
        while started.poll() is None:
            time.sleep(0.5)
            try:
                step = metrics.read_text().count("\n")
                memory, children = process.memory_info().rss / 1e6, len(process.children(recursive=True))
                samples.append(Sample(step, memory, children, process.num_fds()))
            except (FileNotFoundError, psutil.NoSuchProcess, psutil.AccessDenied):  # not started yet, or finished
                continue
        if started.returncode:
            sys.exit(f"{script} failed with exit code {started.returncode}.")
    return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--script", default="train_gtpo.py")
    parser.add_argument("flags", nargs="*", help="Flags of the script, after --.")
    options = parser.parse_args()
    sys.exit(main(options.script, options.steps, options.flags))
