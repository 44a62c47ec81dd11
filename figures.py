"""Draw the paper's figures and Table 1 from run directories, wandb or condensed results.

    python figures.py                                       # every figure whose runs exist under outputs/
    python figures.py fig3 table1 --scale paper             # these figures
    python figures.py --search results/tiny                 # from the results stored in this repository
    python figures.py --wandb ENTITY/PROJECT                # from wandb
    python figures.py --runs outputs/A outputs/B --labels GTPO GRPO --output curves.png    # any runs, in one figure

Each figure is written as PNG and PDF with a caption. A run of configs/experiments.yaml is found by the name of its
directory, with or without the seed (gtpo-g8-s1).
"""

import argparse
from pathlib import Path

from gtpo.cli.parse import refuse_unknown
from gtpo.errors import UsageError
from gtpo.paper.figures import draw_all
from gtpo.paper.matrix import SCALES, load_matrix, models_of_runs, select_figures
from gtpo.paper.results import read_results, read_wandb
from gtpo.reports.curves import draw_runs
from gtpo.runs.script import run_script


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="fig1 ... fig6, table1, ... (default: all)")
    add("--scale", choices=SCALES, help="default: all")
    add("--search", action="append", metavar="DIR", help="where to find runs [outputs]; repeatable")
    add("--wandb", metavar="ENTITY/PROJECT", help="read the runs from wandb instead")
    add("--runs", nargs="+", metavar="RUN", help="draw these run directories in one figure instead")
    add("--labels", nargs="+", metavar="NAME", help="legend labels of --runs (default: their names)")
    add("--output", metavar="PATH", help="directory [figures]; the file with --runs [curves.png]")
    add("--window", metavar="N", type=int, default=10, help="steps of the trailing mean of --runs [10]")
    flags, unknown = parser.parse_known_intermixed_args()
    refuse_unknown(unknown, vars(flags))

    if flags.output and not Path(flags.output).suffix and flags.runs:
        raise UsageError(f"--output {flags.output} is not a file name: add a name with a suffix, as in curves.png.")
    if flags.runs:
        print(draw_runs(flags.runs, flags.labels, flags.output or "curves.png", flags.window))
        return
    for place in flags.search or ():
        if not Path(place).is_dir():
            raise UsageError(f"--search: {place} is not a directory.")
    places = flags.search or ["outputs"]
    matrix = load_matrix()
    names = select_figures(matrix, flags.figures or ["all"])
    runs = [Path(place) for place in places]
    results = read_wandb(flags.wandb) if flags.wandb else read_results(runs, models_of_runs(matrix))
    any_written = False
    for scale in [flags.scale] if flags.scale else SCALES:
        written, missing = draw_all(matrix, names, scale, results, Path(flags.output or "figures") / scale)
        if not (written or flags.scale or flags.figures):
            missing = [f"No runs at {scale} scale: `python reproduce.py all --scale {scale}` makes them."]
        print(*written, *missing, sep="\n")
        any_written |= bool(written)
    if not any_written:
        where = f"no run of configs/experiments.yaml in {flags.wandb or ' '.join(places)}"
        raise UsageError(f"{where}: `python reproduce.py fig3 --scale tiny` makes some; --runs draws any other runs.")


if __name__ == "__main__":
    run_script(main)
