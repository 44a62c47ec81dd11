"""Reproduce a figure or table of the paper: train and evaluate the runs it needs, then draw it.

    python reproduce.py fig3 --scale tiny                 # five runs with ten seeds each, on a CPU; all: every figure
    python reproduce.py all --scale paper --list          # finished, running and missing runs, with GPU hours
    python reproduce.py table1 --scale paper --only qwen-gsm8k --gpus 0 1 2 3            # one run per GPU
    python reproduce.py all --scale paper --slurm partition=gpu time=24:00:00 parallel=16
    python reproduce.py all --scale paper --commands      # a shell command per run, for any scheduler

configs/experiments.yaml lists the runs of each figure. Finished runs are skipped and interrupted ones resume: the same
command continues where it stopped. Several may run at the same time. A failed run does not stop the others.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

from gtpo.runs.script import run_script
from paper.figures import draw_all
from paper.matrix import evaluations_of, experiments_of, load_matrix, select_figures
from paper.slurm import run_missing
from paper.states import commands, table


def main() -> None:
    parser = ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("figures", nargs="+", metavar="FIGURE", help="fig1 ... fig6, table1, ..., or all")
    add("--scale", choices=("tiny", "paper"), default="tiny", help="tiny: on a CPU [tiny]; paper: on a GPU")
    add("--seeds", nargs="+", type=int, metavar="N", help="default: those in configs/experiments.yaml")
    add("--only", nargs="+", default=[""], metavar="PART", help="only runs with one of these parts in their name")
    add("--list", action="store_true", help="print states and costs of runs and figures, and exit")
    add("--commands", action="store_true", help="print a shell command per run, and exit")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, metavar="N", help="runs at the same time (default: tiny: cores; paper: 1)")
    where.add_argument("--gpus", nargs="+", metavar="ID", help="one run at a time on each of these GPUs, as in 0 1 2 3")
    where.add_argument("--slurm", nargs="+", metavar="KEY=VALUE", help="as Slurm jobs: docs/scaling.md, Many runs")
    flags, matrix = parser.parse_args(), load_matrix()
    figures = select_figures(matrix, flags.figures, flags.scale)
    experiments = experiments_of(matrix, figures, flags.scale, flags.seeds, flags.only)
    works = (flags.scale, experiments, evaluations_of(matrix, figures, flags.scale, experiments))
    if flags.list or flags.commands:
        return print(table(matrix, figures, *works) if flags.list else commands(*works))
    results, failures = run_missing(*works, flags.jobs, flags.gpus, flags.slurm)
    written, missing = draw_all(matrix, figures, flags.scale, results)
    print(*written, *(text for text in missing if any(part in text for part in flags.only)), *failures, sep="\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
