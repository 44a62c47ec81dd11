"""Draw the paper's figures and Table 1 from run directories, wandb or condensed results.

    python figures.py                                       # every figure whose runs exist under outputs/
    python figures.py fig3 table1 --scale paper             # these figures
    python figures.py --search results/tiny                 # from the results stored in this repository
    python figures.py --wandb ENTITY/PROJECT                # from wandb
    python figures.py --runs outputs/A outputs/B --labels GTPO GRPO --output curves.png    # any runs, in one figure

Each figure is written as PNG and PDF with a caption. A run of configs/experiments.yaml is found by the name of its
directory, with or without the seed (gtpo-g8-s1).
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from gtpo.errors import printable
from gtpo.reports.curves import draw_runs
from gtpo.runs.script import run_script
from paper.figures import draw_found
from paper.matrix import SCALES


def main() -> None:
    parser = ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, ... (default: all)")
    add("--scale", choices=SCALES, help="default: all")
    add("--search", action="append", metavar="DIR", help="where to find runs [outputs]; repeatable")
    add("--wandb", metavar="ENTITY/PROJECT", help="read the runs from wandb instead")
    add("--runs", nargs="+", metavar="RUN", help="draw these run directories in one figure instead")
    add("--labels", nargs="+", metavar="NAME", help="legend labels of --runs (default: their names)")
    add("--output", metavar="PATH", help="directory [figures]; the file with --runs [curves.png]")
    add("--window", metavar="N", type=int, default=10, help="steps of the trailing mean of --runs [10]")
    flags = parser.parse_intermixed_args()
    if flags.output and not Path(flags.output).suffix and flags.runs:
        parser.error(f"--output {flags.output} is not a file name: add a name with a suffix, as in curves.png.")
    if flags.runs:
        written = [draw_runs(flags.runs, flags.labels, flags.output or "curves.png", flags.window)]
    else:
        written = draw_found(flags.figures, flags.scale, flags.search, flags.wandb, flags.output or "figures")
    print(*map(printable, map(str, written)), sep="\n")


if __name__ == "__main__":
    run_script(main)
