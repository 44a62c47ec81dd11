"""Train a small model with GTPO on a CPU: evaluation before and after, and the curves of the training.

    make demo
    python examples/demo.py --seed 1

Runs train_gtpo.py, evaluate.py and figures.py as a user would and prints each command. Writes outputs/demo/: the run,
its evaluation, curves.png and summary.json (accuracy and formatting before and after in percent, greedy and sampled).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 3407  # Listing 1


def run(*argv: str) -> None:
    """Print a command and run it; exit with its exit code if it fails."""
    print(f"\n$ python {shlex.join(argv)}", flush=True)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # the tiny model is too small to share its work
    if code := subprocess.run([sys.executable, *argv], env=environment).returncode:
        print(f"demo.py: `python {argv[0]}` failed with exit code {code}; its message is above.", file=sys.stderr)
        sys.exit(code)


def print_samples(evaluation: Path, count: int = 3) -> None:
    """The first problems that the base model solves wrong and the trained one right, with both greedy completions."""
    sys.path.insert(0, str(REPOSITORY))
    from gtpo.data.load import load_benchmark

    samples = {}
    for path in evaluation.glob("*/arithmetic.jsonl"):  # the first line has the settings
        rows = map(json.loads, reversed(path.read_text().splitlines()[1:]))  # of each problem the first sample stays
        samples[path.parent.name] = {row["id"]: " ".join(row["completion"].split()) for row in rows}
    base = next(name for name in samples if name.startswith("base"))
    after = next(name for name in samples if name != base)
    for problem in load_benchmark("arithmetic")[:count]:
        print(f"\n{problem.question}  (right answer: {problem.gold})")
        print(f"  before  {samples[base][problem.id]}\n  after   {samples[after][problem.id]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help="seed of the training [3407]; others write to outputs/demo-sN/"
    )
    parser.add_argument("--small", action="store_true", help="a tenth of the steps, to check that everything runs")
    flags = parser.parse_args()
    start = time.time()
    if Path.cwd() != REPOSITORY:
        print(f"Working directory: {REPOSITORY}")
        os.chdir(REPOSITORY)
    directory = Path("outputs") / ("demo" if flags.seed == SEED else f"demo-s{flags.seed}")
    shutil.rmtree(directory, ignore_errors=True)
    gtpo, grpo, evaluation = (str(directory / name) for name in ("gtpo", "grpo", "evaluation"))
    problems = "40" if flags.small else "200"

    training = ["--model", "tiny", "--dataset", "arithmetic", "--G", "12", "--seed", str(flags.seed)]
    training += ["--max_steps", "12"] if flags.small else []
    run("train_gtpo.py", *training, "--output_dir", gtpo)
    sampling = ["--benchmarks", "arithmetic", "--k", "8", "--limit", problems]
    run("evaluate.py", *sampling, "--runs", "base", gtpo, "--output_dir", evaluation)
    run("figures.py", "--runs", gtpo, "--labels", "GTPO", "--output", str(directory / "curves.png"))

    entries = json.loads((directory / "evaluation" / "results.json").read_text())["results"]
    before = next(entry["scores"] for entry in entries if entry["adapter"] is None)
    after = next(entry["scores"] for entry in entries if entry["adapter"] is not None)
    summary = {
        "accuracy_before": before["pass"]["1"],
        "accuracy_after": after["pass"]["1"],
        "formatting_before": before["format"],
        "formatting_after": after["format"],
        "seconds": round(time.time() - start, 1),
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=2))
    print_samples(directory / "evaluation")
    print(f"""
{problems} held-out problems, eight samples each at temperature 1:

                      before    after GTPO
  accuracy   (%)      {summary["accuracy_before"]:6.1f}        {summary["accuracy_after"]:6.1f}
  formatting (%)      {summary["formatting_before"]:6.1f}        {summary["formatting_after"]:6.1f}

Accuracy needs the correct number in an answer block, formatting all four tags in order.

Finished in {summary["seconds"]:.0f} s. {directory}/ contains:
  curves.png       accuracy, formatting, entropy and conflict tokens over the training steps
  gtpo/            the run: report.html, metrics.jsonl, sampled completions, checkpoints, the trained adapter
  evaluation/      every sampled completion, and the scores
  summary.json     the numbers above

Next, train the GRPO baseline with the same settings and compare the curves:
  python train_grpo.py {shlex.join(training)} --output_dir {grpo}
  python figures.py --runs {gtpo} {grpo} --labels GTPO GRPO --output {directory}/gtpo_grpo.png
""")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
