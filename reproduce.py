"""Reproduce a figure or table of the paper: train and evaluate the runs it needs, then draw it.

    python reproduce.py fig3 --scale tiny                 # five runs with ten seeds each, on a CPU; all: every figure
    python reproduce.py all --scale paper --list          # finished, running and missing runs, with GPU hours
    python reproduce.py table1 --scale paper --only qwen-gsm8k --gpus 0 1 2 3            # one run per GPU
    python reproduce.py all --scale paper --slurm partition=gpu time=24:00:00 parallel=16
    python reproduce.py all --scale paper --commands      # a shell command per run, for any scheduler
    python reproduce.py --page                            # results/ and the generated pages of docs/
    python reproduce.py smol                              # SmolLM2 on a CPU, hours (`make smol`); smol_long: 300 steps
    python reproduce.py gentle                            # the tiny model, 1,200 steps at rates that learn
    python reproduce.py mechanism --only tiny             # what one update of each objective does (docs/mechanism.md)
    python reproduce.py claim fig2_late_accuracy --seeds 21 22 23      # one claim; without a name: lists all

configs/experiments.yaml lists the runs of each figure. Finished runs are skipped and interrupted ones resume: the same
command continues where it stopped. Several may run at the same time. A failed run does not stop the others.
"""

import argparse
import sys
from pathlib import Path

from gtpo.errors import UsageError
from gtpo.files import CONFIGS
from gtpo.paper.figures import draw_all
from gtpo.paper.matrix import RUNS, SCALES, load_matrix
from gtpo.paper.results import read_results
from gtpo.paper.runner import run_all, run_policies, slots_of
from gtpo.paper.slurm import read_cluster, run_jobs
from gtpo.paper.states import commands, policy_list, table
from gtpo.runs.script import run_script
from rewards import rewards_in
from study.mechanism import measure, overview, policies_of
from study.one_claim import claim_list, report, select_work
from study.page import write_page


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, ..., or all; or: claim NAME ...")
    add("--scale", choices=SCALES, help="tiny (default), smol (SmolLM2), gentle (long): on a CPU; paper: on a GPU")
    add("--seeds", nargs="+", type=int, metavar="N", help="default: those in configs/experiments.yaml")
    add("--only", nargs="+", default=[""], metavar="PART", help="only runs with one of these parts in their name")
    add("--policy", metavar="NAME", help="with mechanism: measure only this policy, in this process")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, metavar="N", help="runs at the same time (default: tiny: cores; paper: 1)")
    where.add_argument("--gpus", nargs="+", metavar="ID", help="one run at a time on each of these GPUs, as in 0 1 2 3")
    where.add_argument("--slurm", nargs="+", metavar="KEY=VALUE", help="as Slurm jobs: docs/scaling.md, Many runs")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print states and costs of runs and figures, and exit")
    instead.add_argument("--commands", action="store_true", help="print a shell command per run, and exit")
    instead.add_argument("--page", action="store_true", help="write results/ and the generated pages, and exit")
    flags = parser.parse_args()
    matrix = load_matrix()
    scales = [name.partition("_")[0] for name in flags.figures]
    flags.scale = flags.scale or next((name for name in scales if name in SCALES), "tiny")
    if flags.page or flags.figures == ["claim"]:
        return print(*(write_page(matrix) if flags.page else [claim_list()]), sep="\n")
    if flags.policy:
        return measure(matrix, flags.policy, rewards_in)
    if flags.figures == ["mechanism"]:
        if flags.list:
            return print(*policy_list(policies_of(matrix, flags.only)), sep="\n")
        policies, failures = run_policies(matrix, flags.only, flags.jobs)
        print(*(policy.path for policy in policies if policy.is_finished), *overview(policies), *failures, sep="\n")
        sys.exit(1 if failures else 0)
    selected = select_work(matrix, flags.figures, flags.scale, flags.seeds, flags.only)
    figures, claims, seeds, experiments, evaluations = selected
    if flags.list or flags.commands:
        works = (flags.scale, experiments, evaluations)
        return print(table(matrix, figures, *works) if flags.list else commands(*works))
    if not Path("evaluate.py").is_file():
        raise UsageError(f"the working directory has no evaluate.py: first `cd {str(CONFIGS.parent)!r}`.")
    root = RUNS / flags.scale
    if flags.slurm:
        failures = run_jobs(experiments, evaluations, read_cluster(flags.slurm, flags.scale, root / "jobs"))
    else:
        failures = run_all(experiments, evaluations, slots_of(flags.scale, flags.gpus, flags.jobs))
    results = read_results([root])
    written, missing = draw_all(matrix, figures, flags.scale, results, root / "figures")
    missing = [text for text in missing if any(part in text for part in flags.only)]
    print(*report(matrix, claims, results, seeds) if claims else written, *missing, *failures, sep="\n")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
