"""What was studied with small models on a CPU; docs/reproduction.md has the results.

    python -m study compare --arms grpo gtpo my_objective.py:Mine --n_seeds 5     # objectives, paired by seed
    python -m study compare --base my_model --set dataset=my_train.csv --benchmark my_test.csv   # your model and data
    python -m study compare missing_tags --list                   # a comparison of study/experiments.yaml
    python -m study compare plain --arms my_objective.py:Mine     # your arm next to the stored runs of GRPO
    python -m study compare llama --gpus 0 1 --list               # a comparison on a GPU, with its hours
    python -m study compare missing_tags --store                  # finished runs to results/, with their page

Finished runs are skipped and interrupted ones resume: the same command continues where it stopped.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from gtpo.errors import UsageError, counted
from gtpo.files import write_atomically
from gtpo.runs.script import run_script
from paper.runner import slots_of
from study import Words
from study.comparison import Comparison, known_comparison, numbers_of, read_experiments, settings_of, stored_comparison
from study.page import PLAN, found_text, plan_text, state_text, write_page
from study.runs import refuse_dirty, run_comparison, works_of
from study.storage import store

Flags = argparse.Namespace


def parser() -> argparse.ArgumentParser:
    """The command `compare`; its flags are the keys of a comparison of study/experiments.yaml."""
    parser = argparse.ArgumentParser(
        prog="python -m study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    help = "objectives, paired by seed: runs, scores, one page"
    add = commands.add_parser("compare", help=help, allow_abbrev=False).add_argument
    planned = (
        "a comparison of study/experiments.yaml: missing_tags, entropy_parts, llama, published, plain, smol, ...; "
        "--arms with it adds your arms: only these run, if the stored runs of its first arm are of this machine and "
        "trainer"
    )
    arms = (
        "grpo, gtpo, dr_grpo, correction, ..., my_objective.py:Class, or a YAML of settings, GTPO's if its name begins "
        "so; the first is subtracted"
    )
    base = "wrong-mode, first, smol, llama, or another of that file; your model: a directory or a Hub id [wrong-mode]"
    rates = "of several, each arm gets its best one [0.3e-3; of your model: the preset's]"
    settings = "settings of every arm that has them: gamma=0.0 'reward=format mine.py:f'"
    output = "of runs and page; arms that share it share the runs of the first one [outputs/study/NAME]"
    store = "add the finished runs of a planned comparison to results/NAME, write its page there, and exit"
    add("name", nargs="?", default="", help=planned)
    add("--arms", nargs="+", metavar="ARM", help=arms)
    add("--base", nargs="+", metavar="BASE", help=base)
    add("--n_seeds", type=int, metavar="N", help="seeds 1 to N [6]")
    add("--steps", type=int, metavar="N", help="steps of a run [300]")
    add("--rates", nargs="+", metavar="RATE", help=rates)
    add("--rate_seeds", nargs="+", metavar="N", help="seeds that choose the rates [the three after --seeds]")
    add("--betas", nargs=2, metavar="B", help="of Adam [0.9 0.95]")
    add("--benchmark", metavar="FILE", help="held-out problems, as for evaluate.py [those of the base]")
    add("--problems", type=int, metavar="N", help="how many of them [500]")
    add("--set", nargs="+", metavar="KEY=VALUE", help=settings)
    add("--seeds", nargs="+", metavar="N", help="21 22 23, or 21-23; of a planned comparison, those to run now")
    add("--output_dir", metavar="DIR", help=output)
    add("--plan", action="store_true", help="write plan.md, to commit before the runs, and exit")
    add("--store", action="store_true", help=store)
    add("--dirty", action="store_true", help="run although files differ from the last commit; the page says so")
    add("--gpus", nargs="+", metavar="ID", help="one run at a time on each of these GPUs")
    add("--jobs", type=int, metavar="N", help="runs at the same time")
    add("--list", action="store_true", help="print states, costs and what difference these seeds can show, and exit")
    return parser


def run_command(flags: Flags) -> Words:
    """Plan, run and report a comparison; a message for each failure."""
    comparison = comparison_of(flags)
    if flags.store:
        print(*store_runs(comparison), sep="\n")
        return []
    is_planned = bool(comparison.name) and not comparison.is_own
    if not is_planned:
        bases = ", ".join(base.name for base in comparison.bases)
        arms = counted(len(comparison.arms), "arm")
        print(f"Checking {arms} from {bases}: data, rewards and settings (TRL loads first: seconds).", flush=True)
        from study.train import check

        comparison = replace(comparison, bases=check(comparison))
    if flags.plan:
        path = comparison.results / PLAN
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, plan_text(comparison))
        print(f"{path}: commit it before the runs: git add --force {path}")
        return []
    seeds = numbers_of(flags.seeds) if flags.seeds else comparison.seeds
    print(state_text(comparison, seeds), flush=True)
    if flags.list:
        return []
    refuse_dirty(flags.dirty)
    if is_planned and (left := works_of(comparison, seeds).runs):
        from study.train import check_runs

        check_runs(left)
    failures = run_comparison(comparison, seeds, slots_of("tiny", flags.gpus, flags.jobs))
    command = shlex.join(["python", "-m", "study", *sys.argv[1:]])
    print(found_text(comparison), *write_page(comparison, comparison.directory, command), sep="\n")
    return failures


def comparison_of(flags: Flags) -> Comparison:
    """A comparison by its name in study/experiments.yaml, or of the other flags."""
    directory = flags.output_dir and Path(flags.output_dir)
    keys = read_experiments()["defaults"]
    given = {key: value for key, value in vars(flags).items() if value and key in keys}
    if not flags.name:
        given |= {"set": settings_of(given.get("set", ())), "needs_p": True}
        return Comparison.of("", given, directory)
    for key in given.keys() - {"seeds", "arms"}:
        planned = f"{flags.name} is planned in study/experiments.yaml"
        raise UsageError(f"--{key}: {planned}; only --seeds and --arms may be given.")
    if flags.arms and flags.plan:
        raise UsageError(f"--plan: results/{flags.name}/{PLAN} has no arms of yours: remove --plan or --arms.")
    return known_comparison(flags.name, directory, flags.arms or ())


def store_runs(comparison: Comparison) -> list[Path]:
    """Add the finished runs of a planned comparison to the condensed ones in results/; its page is of these alone."""
    if comparison.is_own or comparison.name not in read_experiments()["comparisons"]:
        names = ", ".join(read_experiments()["comparisons"])
        raise UsageError(f"--store: results/ has a directory for each planned comparison: name one of {names}.")
    seeds = sorted({*comparison.seeds, *comparison.rate_seeds})
    for base in comparison.bases:
        runs = comparison.runs(base, comparison.arms, comparison.every_rate, seeds)
        store(comparison.stored(base), comparison.place(base), runs, read_experiments()["stored_metrics"])
    stored = stored_comparison(comparison.name)
    return write_page(stored, stored.results, f"python -m study compare {comparison.name}")


def main() -> None:
    flags = parser().parse_args()
    failures = run_command(flags)
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
