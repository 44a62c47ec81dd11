"""Reproduce a figure or table of the paper: train and evaluate the runs it needs, then draw it.

    python reproduce.py fig3 --scale tiny                 # five runs, three seeds each: minutes on a CPU
    python reproduce.py all --scale tiny --jobs 2         # every figure and Table 1
    python reproduce.py all --scale paper --list          # finished, running and missing runs, with GPU hours
    python reproduce.py --page                            # results/tiny/ and docs/reproduction.md from the tiny runs

configs/experiments.yaml lists the runs of each figure. Finished runs are skipped and interrupted runs resume, so the
same command continues where it stopped. A run that fails is reported at the end and does not stop the others. Several
processes of this script share the runs.
"""

import argparse
import sys

from gtpo.errors import UsageError
from gtpo.paper.claims import write_page
from gtpo.paper.figures import draw_all
from gtpo.paper.matrix import (
    RUNS,
    SCALES,
    evaluations_of,
    experiments_of,
    figure_names,
    load_matrix,
    select_figures,
    state_table,
)
from gtpo.paper.results import read_results
from gtpo.paper.runner import evaluate, train
from gtpo.script import run_script


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, ..., or all")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="tiny: on a CPU (default); paper: on a GPU")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: those in configs/experiments.yaml")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at the same time (default: tiny: cores; paper: 1)")
    parser.add_argument("--list", action="store_true", help="print the state and cost of each run, and exit")
    parser.add_argument("--page", action="store_true", help="write results/tiny/ and docs/reproduction.md, and exit")
    flags = parser.parse_args()

    matrix = load_matrix()
    if flags.page:
        print(*write_page(matrix), sep="\n")
        return
    if not flags.figures:
        raise UsageError(f"no figure given: pick from {', '.join(figure_names(matrix))}, or all.")
    if flags.jobs is not None and flags.jobs < 1:
        raise UsageError(f"--jobs is {flags.jobs}: expected at least 1.")
    figures = select_figures(matrix, flags.figures, flags.scale)
    experiments = experiments_of(matrix, figures, flags.scale, flags.seeds)
    if flags.list:
        print(state_table(experiments, flags.scale))
        return

    root = RUNS / flags.scale
    failures = train(experiments, flags.scale, flags.jobs)
    failures += evaluate(evaluations_of(matrix, figures, flags.scale, flags.seeds), root / "logs")
    written, missing = draw_all(matrix, figures, flags.scale, read_results([root]), root / "figures")
    print(*written, *missing, *failures, sep="\n")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
