"""Which signal moves first in runs that fail: table and figure of docs/signals.md, from the runs of results/tiny.

    python benchmarks/first_signal.py

A signal is a metric that is too low or too high. It sounds where its mean over the last 25 steps is outside a limit
that 95 % of the runs at the stable rate keep at every step.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtpo.paper.results import read_results
from gtpo.reports.curves import grid, line_style
from gtpo.reports.metrics import smooth

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 25  # steps of the trailing mean
PAGE, FIGURE = ROOT / "docs" / "signals.md", ROOT / "docs" / "images" / "signals.png"
START, END = "<!-- table -->\n", "<!-- end -->\n"

Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Signal:
    """A metric that is too high (``sign`` 1) or too low (-1)."""

    name: str
    metric: str
    sign: int
    digits: int = 2

    def curve(self, rows: Rows) -> list[float]:
        """The trailing mean times ``sign``; a step without the metric repeats the last value."""
        values: list[float] = []
        for row in rows:
            if row.get(self.metric) is not None:
                values.append(self.sign * row[self.metric])
            elif values:
                values.append(values[-1])
        return smooth(values, WINDOW)[WINDOW - 1 :]


SIGNALS = (
    Signal("accuracy low (%)", "accuracy", -1, 0),
    Signal("formatting low (%)", "formatting", -1, 0),
    Signal("entropy high (nats)", "entropy", 1),
    Signal("entropy low (nats)", "entropy", -1),
    Signal("conflict tokens few", "conflict_tokens", -1, 1),
    Signal("conflict push negative", "conflict_push", -1, 4),
    Signal("KL high (β > 0)", "kl", 1),
)


def stored_runs(directory: Path) -> dict[str, list[Rows]]:
    """The runs with the rewards of Section 8.2, by rate."""
    found: dict[str, list[Rows]] = {"stable": [], "late": []}
    for name, seeds in read_results([directory]).metrics.items():
        if name != "sft" and "word" not in name:
            found["late" if "-late" in name else "stable"] += seeds.values()
    return found


def limit_of(highest: Sequence[float]) -> float:
    """What 95 % of the runs do not exceed, of the highest value of each."""
    return sorted(highest)[math.ceil(0.95 * len(highest)) - 1]


def first_step(curve: Sequence[float], limit: float) -> float:
    """The step at which a curve first exceeds its limit, infinity if it does not."""
    return next((WINDOW + i for i, value in enumerate(curve) if value > limit), math.inf)


def sounds(runs: dict[str, list[Rows]]) -> dict[Signal, tuple[float, dict[int, float]]]:
    """Signal -> its limit, and the step at which it sounds in each late run that logs the metric."""
    found = {}
    for signal in SIGNALS:
        curves = {rate: {i: signal.curve(rows) for i, rows in enumerate(runs[rate])} for rate in runs}
        limit = limit_of([max(curve) for curve in curves["stable"].values() if curve])
        found[signal] = limit, {i: first_step(curve, limit) for i, curve in curves["late"].items() if curve}
    return found


def format_table(found: dict[Signal, tuple[float, dict[int, float]]]) -> str:
    """A row per signal, by the median step at which it sounds."""
    lines = [
        "| signal | limit | sounds in | median step | before formatting |",
        "|---|---|---|---|---|",
    ]
    formatting = next(steps for signal, (_, steps) in found.items() if signal.metric == "formatting")
    for signal, (limit, steps) in sorted(found.items(), key=lambda item: median(item[1][1].values())):
        when = list(steps.values())
        before = [formatting[i] > step for i, step in steps.items() if min(formatting[i], step) < math.inf]
        share = "" if signal.metric == "formatting" else f"{100 * sum(before) / len(before):.0f} %"
        sounded = f"{sum(map(math.isfinite, when))} of {len(when)} runs"
        cells = (signal.name, f"{signal.sign * limit:.{signal.digits}f}", sounded, f"{median(when):.0f}", share)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: dict[Signal, tuple[float, dict[int, float]]], output: Path) -> None:
    """The share of the late runs in which each signal has sounded, over the training steps."""
    figure, [[axis]] = grid(1, 1, width=7.5, height=3.6)
    for number, (signal, (_, steps)) in enumerate(sorted(found.items(), key=lambda item: median(item[1][1].values()))):
        when = sorted(step for step in steps.values() if step < math.inf)
        shares = [100 * (i + 1) / len(steps) for i in range(len(when))]
        axis.step([WINDOW, *when, 160], [0, *shares, shares[-1]], where="post", label=signal.name, **line_style(number))
    axis.set(xlabel="Training step", ylabel="Runs in which it has sounded (%)", ylim=(0, 102))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(output, dpi=110)


def main() -> None:
    found = sounds(stored_runs(ROOT / "results" / "tiny"))
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + format_table(found) + END + rest.partition(END)[2])
    draw(found, FIGURE)


if __name__ == "__main__":
    main()
