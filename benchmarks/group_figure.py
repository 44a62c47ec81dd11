"""The figure of the README: completions of one question, with the weight that GTPO gives each token.

    python benchmarks/group_figure.py outputs/demo/gtpo --step 6 --rows 0 3 5 8 --output docs/images/group.png

Rows are completions of the first group of the step, by decreasing advantage.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtpo.reports.groups import Group, read_group
from gtpo.runs.directory import RunDirectory

SIZE, DPI = 8.5, 150
CHARACTER = round(0.602 * SIZE * DPI / 72) * 72 / DPI  # points; monospaced characters are whole pixels wide
COLORS = {2.0: "#a8d8b0", 0.0: "#c9c9c9"}
COLUMNS = {"advantage": 60, "format": 106, "accuracy": 158, "completion": 172}  # points from the left


def draw_group(group: Group, rows: Sequence[int], output: str) -> None:
    """One line per completion, by decreasing advantage; the colors are the weights 2 and 0."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    order = sorted(range(len(group.advantages)), key=lambda i: -group.advantages[i])
    chosen = [order[row] for row in rows]
    longest = max(sum(map(len, group.tokens[i])) for i in chosen)
    width, height = COLUMNS["completion"] + CHARACTER * longest + 14, 15.0 * (len(chosen) + 5)
    figure = Figure(figsize=(width / 72, height / 72))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    question = group.messages[-1]["content"] if group.messages else group.prompt
    axis.text(14, 16, f"{question}  (right answer: {group.gold_answer})", fontsize=SIZE + 0.5, style="italic")
    for name, x in COLUMNS.items():
        axis.text(x, 36, name, fontsize=SIZE, weight="bold", ha="left" if name == "completion" else "right")
    for line, i in enumerate(chosen):
        y = 52 + 15 * line
        rewards = [f"{group.rewards[f'{name}_reward'][i]:g}" for name in ("format", "accuracy")]
        for x, text in zip(COLUMNS.values(), [f"{group.advantages[i]:+.2f}", *rewards], strict=False):
            axis.text(x, y, text, fontsize=SIZE, ha="right")
        left = float(COLUMNS["completion"])
        for weight, run in itertools.groupby(zip(group.tokens[i], group.weights[i], strict=True), lambda pair: pair[1]):
            text = "".join(token for token, _ in run).replace("\n", "↵")
            long = CHARACTER * len(text)
            axis.add_patch(Rectangle((left, y - 9), long, 12, facecolor=COLORS.get(weight, "none")))
            axis.text(left, y, text, fontsize=SIZE, family="monospace")
            left += long
    legend = {2.0: "shared, rewarded: weight 2", 0.0: "shared, penalized: weight 0", 1.0: "not shared: weight 1"}
    left = 14.0
    for weight, text in legend.items():
        box = {"facecolor": COLORS.get(weight, "none"), "edgecolor": "none", "pad": 2.0}
        axis.text(left, 52 + 15 * len(chosen) + 10, text, fontsize=SIZE, bbox=box)
        left += 0.62 * SIZE * len(text)
    figure.savefig(output, dpi=DPI)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--output", default="group.png")
    flags = parser.parse_args()
    run = RunDirectory(flags.run)
    tables = {int(path.stem.partition("_")[2]): path for path in run.completion_tables()}
    settings = run.read_config()
    _, group = read_group(tables[flags.step], settings["num_generations"], ["format_reward", "accuracy_reward"])
    draw_group(group, flags.rows, flags.output)


if __name__ == "__main__":
    main()
