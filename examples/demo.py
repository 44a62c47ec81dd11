"""Watch a small model learn with GTPO on a CPU: tiny base -> GTPO -> evaluation before and after -> curves.

    make demo
    python demo.py --seed 1

Runs the scripts a user would run, each command shown, and writes outputs/demo/: the run, its evaluation, curves.png and
summary.json (accuracy and formatting before and after in percent, wall seconds).
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gtpo.cli import run_script
from gtpo.errors import UsageError
from gtpo.runs import write_atomically

SEED = 3407  # Listing 1


def run(*words: str) -> None:
    """Show a command of this repository and run it.

    Raises:
        UsageError: If it fails; its own message stands above.
    """
    print(f"\n$ python {shlex.join(words)}", flush=True)
    if code := subprocess.run([sys.executable, *words]).returncode:
        raise UsageError(f"the demo stopped: `python {words[0]}` ended with exit code {code}, see its message above.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=SEED, help="Seed of the GTPO run; another than 3407 goes to outputs/demo-sN/."
    )
    parser.add_argument("--small", action="store_true", help="A tenth of the steps: checks that everything runs.")
    arguments = parser.parse_args()
    started = time.time()
    folder = Path("outputs") / ("demo" if arguments.seed == SEED else f"demo-s{arguments.seed}")
    shutil.rmtree(folder, ignore_errors=True)

    training = ["--model", "tiny", "--dataset", "arithmetic", "--G", "12", "--seed", str(arguments.seed)]
    small = ["--max_steps", "12"] if arguments.small else []
    run("train_gtpo.py", *training, "--output_dir", str(folder / "gtpo"), *small)
    problems = "40" if arguments.small else "200"
    evaluation = ["--benchmarks", "arithmetic", "--k", "1", "--limit", problems]
    run(
        "evaluate.py",
        *evaluation,
        "--adapter",
        "base",
        str(folder / "gtpo"),
        "--output_dir",
        str(folder / "evaluation"),
    )
    run("figures.py", "--runs", str(folder / "gtpo"), "--labels", "GTPO", "--output", str(folder / "curves.png"))

    results = json.loads((folder / "evaluation" / "results.json").read_text())["results"]
    before = next(entry for entry in results if entry["adapter"] is None)
    after = next(entry for entry in results if entry["adapter"] is not None)
    summary = {
        "accuracy_before": before["scores"]["pass"]["1"],
        "accuracy_after": after["scores"]["pass"]["1"],
        "formatting_before": before["scores"]["format"],
        "formatting_after": after["scores"]["format"],
        "seconds": round(time.time() - started, 1),
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
    print(f"""
On {problems} held-out problems, one sample each at temperature 1:

                      before    after GTPO
  accuracy   (%)      {summary["accuracy_before"]:6.1f}        {summary["accuracy_after"]:6.1f}
  formatting (%)      {summary["formatting_before"]:6.1f}        {summary["formatting_after"]:6.1f}

It took {summary["seconds"]:.0f} s. Everything is in {folder}/:
  curves.png       accuracy, formatting, entropy and conflict tokens over the training steps
  gtpo/            the run: report.html, metrics.jsonl, sampled completions, checkpoints, the trained adapter
  evaluation/      every completion of the evaluation, and its scores
  summary.json     the numbers above

Next: python train_grpo.py --model tiny --dataset arithmetic (the baseline), or the notebook in notebooks/.
""")


if __name__ == "__main__":
    run_script(main)
