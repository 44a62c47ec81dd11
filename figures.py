"""Figures from run directories: today the training curves of Figs. 2 to 5 (accuracy, formatting, entropy, conflicts).

    python figures.py --runs outputs/demo/gtpo --output outputs/demo/curves.png
    python figures.py --runs outputs/gtpo-tiny-arithmetic-a outputs/grpo-tiny-arithmetic-b --labels GTPO GRPO

Raw values are drawn faint, their trailing mean bold.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import UsageError, run_script

PANELS = {  # metric -> axis label; percent of the maximum reward, as in the paper
    "accuracy": "accuracy (%)",
    "formatting": "formatting (%)",
    "entropy": "entropy ⟨H⟩ (nats)",
    "conflict_tokens": "conflict tokens per completion",
}
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)  # Okabe and Ito: safe for colour-blind eyes
LINES = ("-", "--", ":", "-.")  # past the last colour


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a run, oldest first; a last line cut short by a kill is left out.

    Raises:
        UsageError: If the run has no metrics.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(f"{run} holds no metrics.jsonl: name the directory of a training run.")
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not rows:
        raise UsageError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over the last ``window`` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_training(runs: dict[str, list[dict[str, Any]]], window: int = 10, panels: dict[str, str] | None = None) -> Any:
    """One row of panels over the training steps: every run's raw values faint, their trailing mean bold.

    Args:
        runs: Legend name -> the rows of :func:`read_metrics`.
        window: Steps of the trailing mean.
        panels: Metric -> title of its panel; those of ``PANELS`` by default.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure

    panels = panels or PANELS
    figure = Figure(figsize=(3.5 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (metric, label) in zip(axes, panels.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            colour, line = COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(steps, smooth(values, window), color=colour, linestyle=line, linewidth=2, label=name)
        if metric == "entropy":
            axis.axhline(math.log(2), color="black", linestyle="--", linewidth=1, label="ln 2")
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False)
        axis.set_xlabel("training step")
        axis.set_title(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Training on samples of the policy; bold: mean of the last {window} steps", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, metavar="RUN", help="Run directories.")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="Legend names; the directories' by default.")
    parser.add_argument("--output", default="curves.png", metavar="FILE", help="Picture to write (.png or .pdf).")
    parser.add_argument("--window", type=int, default=10, help="Steps of the trailing mean (10).")
    arguments = parser.parse_args()
    labels = arguments.labels or [Path(run).name for run in arguments.runs]
    if len(labels) != len(arguments.runs):
        raise UsageError(f"{len(labels)} labels for {len(arguments.runs)} runs: give one for each.")
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UsageError(f"two runs are called {twice!r}: tell them apart with --labels.")
    if arguments.window < 1:
        raise UsageError(f"--window is {arguments.window}: expected at least 1 step.")
    runs = {label: read_metrics(run) for label, run in zip(labels, arguments.runs, strict=True)}
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    plot_training(runs, arguments.window).savefig(arguments.output, dpi=150)
    print(arguments.output)


if __name__ == "__main__":
    run_script(main)
