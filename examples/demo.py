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
ROWS = [(name, way) for way in ("greedy", "sampled") for name in ("accuracy", "formatting")]


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
    from gtpo.grading import extract_answer, is_correct

    before, after = (
        {
            row["id"]: " ".join(row["completion"].split())
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()[1:])
        }
        for path in sorted(evaluation.glob("*/arithmetic.jsonl"))  # base-tiny, then the run; the first line: settings
    )
    shown = 0
    for problem in load_benchmark("arithmetic")[: len(after)]:
        texts = before[problem.id], after[problem.id]
        wrong, right = (is_correct(extract_answer(text), problem.gold) for text in texts)
        if shown < count and right and not wrong:
            shown += 1
            print(f"\n{problem.question}  (right answer: {problem.gold})\n  before  {texts[0]}\n  after   {texts[1]}")


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
    scores = {}
    for way, sampling in (("greedy", ["--temperature", "0", "--k", "1"]), ("sampled", ["--k", "8"])):
        runs = ["--limit", problems, "--runs", "base", gtpo, "--output_dir", f"{evaluation}/{way}"]
        run("evaluate.py", "--benchmarks", "arithmetic", *sampling, *runs)
        entries = json.loads((Path(evaluation) / way / "results.json").read_text(encoding="utf-8"))["results"]
        for entry in entries:
            when = "before" if entry["adapter"] is None else "after"
            scores[f"accuracy_{when}_{way}"] = entry["scores"]["pass"]["1"]
            scores[f"formatting_{when}_{way}"] = entry["scores"]["format"]
    run("figures.py", "--runs", gtpo, "--labels", "GTPO", "--output", str(directory / "curves.png"))

    summary = scores | {"seconds": round(time.time() - start, 1)}
    (directory / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print_samples(directory / "evaluation" / "greedy")
    rows = [(name, way, *(summary[f"{name}_{when}_{way}"] for when in ("before", "after"))) for name, way in ROWS]
    table = "\n".join(f"  {name:10} (%)  {way:8} {before:10.1f} {after:13.1f}" for name, way, before, after in rows)
    print(f"""
{problems} held-out problems; sampled: eight completions each at temperature 1:

                                before    after GTPO
{table}

Accuracy needs the correct number in an answer block, formatting all four tags in order.

Finished in {summary["seconds"]:.0f} s. {directory}/ contains:
  curves.png       accuracy, formatting, entropy and conflict tokens over the training steps
  gtpo/            the run: report.html, metrics.jsonl, sampled completions, checkpoints, the trained adapter
  evaluation/      every completion, and the scores
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
