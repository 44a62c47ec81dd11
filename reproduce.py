"""Run what a figure or table of the paper needs, then draw it: at tiny scale on a CPU, at paper scale on a GPU.

    python reproduce.py fig3 --scale tiny                 # five runs, three seeds each: minutes
    python reproduce.py all --scale tiny --jobs 2         # every figure and Table 1
    python reproduce.py all --scale paper --list          # what is done, running and missing, and its GPU hours
    python reproduce.py --page                            # results/tiny/ and docs/reproduction.md from the tiny runs

The runs of each figure stand in configs/experiments.yaml. A complete run is skipped and a half-done one resumed, so the
same command goes on where it stopped; a run that fails is told at the end and does not stop the others. Two commands at
once share the work.
"""

import argparse
import sys

from gtpo.callbacks import train
from gtpo.cli import run_script
from gtpo.errors import UsageError
from gtpo.paper.claims import write_page
from gtpo.paper.figures import draw_all
from gtpo.paper.matrix import ROOT, SCALES, evaluations, experiments_of, figure_names, find_figure, load_matrix
from gtpo.paper.results import read_results
from gtpo.paper.runner import cores, evaluate, listing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, or all.")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="tiny: a CPU; paper: one GPU. [tiny]")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="Those of the matrix by default.")
    parser.add_argument("--jobs", type=int, metavar="N", help="Runs at once. [tiny: one for each core; paper: 1]")
    parser.add_argument("--list", action="store_true", help="Show the runs and their state, and stop.")
    parser.add_argument("--page", action="store_true", help="Write results/tiny/ and docs/reproduction.md, and stop.")
    flags = parser.parse_args()
    matrix = load_matrix()
    if flags.page:
        pass

        print(*write_page(matrix), sep="\n")
        return
    if not flags.figures:
        raise UsageError(f"no figure named: pick from {', '.join(figure_names(matrix))}, or all.")
    figures = figure_names(matrix) if "all" in flags.figures else list(dict.fromkeys(flags.figures))
    for name in figures:
        if not find_figure(matrix, name).get(flags.scale):
            if "all" not in flags.figures:
                raise UsageError(f"{name} has no runs at {flags.scale} scale.")
            figures = [other for other in figures if other != name]
    if flags.jobs is not None and flags.jobs < 1:
        raise UsageError(f"--jobs is {flags.jobs}: expected at least 1.")
    runs = experiments_of(matrix, figures, flags.scale, flags.seeds)
    if flags.list:
        print(listing(runs, flags.scale))
        return

    failed = train(runs, flags.scale, flags.jobs or (cores() if flags.scale == "tiny" else 1))
    failed += evaluate(evaluations(matrix, figures, flags.scale, flags.seeds), ROOT / flags.scale / "logs")

    pass

    drawn, missing = draw_all(
        matrix, figures, flags.scale, read_results([ROOT / flags.scale]), ROOT / flags.scale / "figures"
    )
    print(*drawn, *missing, *failed, sep="\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
