"""Train a small model with GTPO on a CPU: evaluation before and after, and the curves of the training.

    make demo
    python examples/demo.py --seed 1

Runs train_gtpo.py, evaluate.py, figures.py and the chat as a user would and prints each command. Writes outputs/demo/:
the run, its evaluation, curves.png, summary.json (accuracy and formatting before and after in percent, greedy and
sampled; completions before and after), and report.md, which shows all of them on one page.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 3407  # Listing 1
QUESTION, GOLD = "Tom has 6 eggs. Tom gives away 2. How many eggs does Tom have?", "4"  # README's, for the chat
ROWS = [(name, way) for way in ("greedy", "sampled") for name in ("accuracy", "formatting")]


class Stage(NamedTuple):
    """A command of the demo, and how long it took."""

    title: str
    command: str
    seconds: float


class Sample(NamedTuple):
    """A problem with the greedy completions of the base model and of the trained one."""

    question: str
    gold: str
    before: str
    after: str


def run(title: str, *argv: str) -> Stage:
    """Print a command and run it; exit with its exit code if it fails."""
    command = f"python {shlex.join(argv)}"
    print(f"\n$ {command}", flush=True)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # the tiny model is too small to share its work
    start = time.time()
    if code := subprocess.run([sys.executable, *argv], env=environment).returncode:
        print(f"demo.py: `python {argv[0]}` failed with exit code {code}; its message is above.", file=sys.stderr)
        sys.exit(code)
    return Stage(title, command, time.time() - start)


def ask(run: str, question: str, gold: str) -> Sample:
    """The greedy completions of the base and of a run; print the command and what it prints."""
    argv = ["-m", "gtpo.evaluation.chat", run, question]
    print(f"\n$ python {shlex.join(argv)}", flush=True)
    shown = subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    print(shown, flush=True)
    before, after = (" ".join(part.partition("\n")[2].split()) for part in shown.split("\n--- ")[1:])
    return Sample(question, gold, before, after)


def find_samples(evaluation: Path, count: int = 3) -> list[Sample]:
    """The first problems that the base model solves wrong and the trained one right."""
    from gtpo.data.load import load_benchmark

    before, after = (
        {
            row["id"]: " ".join(row["completion"].split())
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()[1:])
        }
        for path in sorted(evaluation.glob("*/arithmetic.jsonl"))  # base-tiny, then the run; the first line: settings
    )
    samples: list[Sample] = []
    for problem in load_benchmark("arithmetic")[: len(after)]:
        texts = before[problem.id], after[problem.id]
        if len(samples) < count and is_right(texts[1], problem.gold) and not is_right(texts[0], problem.gold):
            samples.append(Sample(problem.question, problem.gold, *texts))
    return samples


def is_right(completion: str, gold: str) -> bool:
    from gtpo.grading import extract_answer, is_correct

    return is_correct(extract_answer(completion), gold)


REPORT = """# The demo: a million parameters trained with GTPO on word problems

{{ day.strftime("%-d %B %Y") }}, git revision {{ origin.git_revision }}, seed {{ seed }}, {{ origin.gpus | join(", ") or
origin.cpu_count ~ " CPU cores" }}, torch {{ origin.packages.torch }}, trl {{ origin.packages.trl }}.

## Scores

Of {{ problems }} held-out problems, in percent. Accuracy needs the correct number in an answer block, formatting all
four tags in order. Greedy: one completion; sampled: eight at temperature 1.

| | | before | after GTPO |
|---|---|---|---|
{% for name, way, before, after in rows -%}
| {{ name }} | {{ way }} | {{ before | round(1) }} | {{ after | round(1) }} |
{% endfor %}
## Problems that it solves now
{% for sample in samples %}
{{ sample.question }} (right answer: {{ sample.gold }})

* before: `{{ sample.before }}`
* after: `{{ sample.after }}`
{% else %}
None: no problem was wrong before and right after.
{% endfor %}
## The question of README

{{ summary.asked.question }} (right answer: {{ summary.asked.gold }})

* before: `{{ summary.asked.before }}`
* after: `{{ summary.asked.after }}`

## Training

{{ steps }} steps in {{ "%.1f" | format(stages[0].seconds / 60) }} minutes. The mean token entropy before training,
⟨H⟩_ini, is {{ "%.3f" | format(entropy) }} nats. [report.html](gtpo/report.html) shows completions and the weight of
each token.

![Accuracy, formatting, entropy and conflict tokens](curves.png)

## Cost

| stage | minutes | command |
|---|---|---|
{% for stage in stages -%}
| {{ stage.title }} | {{ "%.1f" | format(stage.seconds / 60) }} | `{{ stage.command }}` |
{% endfor -%}
| together | {{ "%.1f" | format(summary.seconds / 60) }} | |
"""


def write_report(directory: Path, **values: Any) -> Path:
    """``report.md``: scores, problems before and after, curves, cost, revision and machine."""
    from jinja2 import Template

    run = directory / "gtpo"
    page = Template(REPORT, keep_trailing_newline=True).render(
        day=date.today(),
        origin=json.loads((run / "environment.json").read_text(encoding="utf-8")),
        entropy=json.loads((run / "initial_entropy.json").read_text(encoding="utf-8"))["initial_entropy"],
        steps=len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()),
        **values,
    )
    path = directory / "report.md"
    path.write_text(page, encoding="utf-8")
    return path


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help="seed of the training [3407]; others write to outputs/demo-sN/"
    )
    small = "a quarter of the steps, to check that everything runs and README's question gets the right answer"
    parser.add_argument("--small", action="store_true", help=small)
    return parser.parse_args()


def main() -> None:
    flags = read_flags()
    start = time.time()
    if Path.cwd() != REPOSITORY:
        print(f"Working directory: {REPOSITORY}")
        os.chdir(REPOSITORY)
    directory = Path("outputs") / ("demo" if flags.seed == SEED else f"demo-s{flags.seed}")
    shutil.rmtree(directory, ignore_errors=True)
    gtpo, grpo, evaluation = (str(directory / name) for name in ("gtpo", "grpo", "evaluation"))
    problems = "40" if flags.small else "200"

    training = ["--model", "tiny", "--dataset", "arithmetic", "--G", "12", "--seed", str(flags.seed)]
    training += ["--max_steps", "40"] if flags.small else []
    stages = [run("train", "train_gtpo.py", *training, "--output_dir", gtpo)]
    scores = {}
    for way, sampling in (("greedy", ["--temperature", "0", "--k", "1"]), ("sampled", ["--k", "8"])):
        runs = ["--limit", problems, "--runs", "base", gtpo, "--output_dir", f"{evaluation}/{way}"]
        stages.append(run(f"evaluate, {way}", "evaluate.py", "--benchmarks", "arithmetic", *sampling, *runs))
        entries = json.loads((Path(evaluation) / way / "results.json").read_text(encoding="utf-8"))["results"]
        for entry in entries:
            when = "before" if entry["adapter"] is None else "after"
            scores[f"accuracy_{when}_{way}"] = entry["scores"]["pass"]["1"]
            scores[f"formatting_{when}_{way}"] = entry["scores"]["format"]
    curves = str(directory / "curves.png")
    stages.append(run("draw", "figures.py", "--runs", gtpo, "--labels", "GTPO", "--output", curves))

    asked = ask(gtpo, QUESTION, GOLD)
    samples = find_samples(directory / "evaluation" / "greedy")
    texts = {"asked": asked._asdict(), "samples": [sample._asdict() for sample in samples]}
    summary = scores | {"seconds": round(time.time() - start, 1)} | texts
    (directory / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False), encoding="utf-8")
    rows = [(name, way, *(summary[f"{name}_{when}_{way}"] for when in ("before", "after"))) for name, way in ROWS]
    values = {"summary": summary, "samples": samples, "stages": stages, "problems": problems, "seed": flags.seed}
    report = write_report(directory, rows=rows, **values)
    for question, gold, before, after in samples:
        print(f"\n{question}  (right answer: {gold})\n  before  {before}\n  after   {after}")
    table = "\n".join(f"  {name:10} (%)  {way:8} {before:10.1f} {after:13.1f}" for name, way, before, after in rows)
    print(f"""
{problems} held-out problems; sampled: eight completions each at temperature 1:

                                before    after GTPO
{table}

Accuracy needs the correct number in an answer block, formatting all four tags in order.

Next, train the GRPO baseline with the same settings and compare the curves:
  python train_grpo.py {shlex.join(training)} --output_dir {grpo}
  python figures.py --runs {gtpo} {grpo} --labels GTPO GRPO --output {directory}/gtpo_grpo.png

Finished in {summary["seconds"]:.0f} s. {directory}/ contains:
  curves.png       accuracy, formatting, entropy and conflict tokens over the training steps
  gtpo/            the run: report.html, metrics.jsonl, completions, checkpoints, adapter
  evaluation/      every completion, and the scores
  summary.json     the numbers and completions above
The whole demo on one page, with its cost, revision and machine: {report}
""")
    if flags.small and not is_right(asked.after, GOLD):
        sys.exit(f"demo.py: the trained model answers {QUESTION!r} with {asked.after!r}: expected {GOLD}.")


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
