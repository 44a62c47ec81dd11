"""docs/objectives.md: which objective? The stored runs of three comparisons on one page."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from gtpo.files import write_atomically
from gtpo.reports.curves import add_legend, grid
from study import Row, Values
from study.bench import Arm, Base, stored_comparison
from study.compare import every_found, page_values, primary_rows, table_of
from study.rendering import render

PAGE, FIGURE = Path("docs/objectives.md"), Path("results/objectives/objectives.png")
MARKERS = ("o", "s", "D", "v", "^")  # of the conditions
MEASURE = "pass@1 sampled"


class Condition(NamedTuple):
    """A base, with one update a generation or several."""

    title: str
    base: Base
    rows: dict[str, Row]  # arm -> its primary difference from GRPO
    rates: Values  # arm -> its learning rate


def conditions_of(name: str, updates: str) -> tuple[list[Condition], Row]:
    """The conditions of a stored comparison, and the values of its table."""
    comparison = stored_comparison(name)
    every = every_found(comparison)
    primary = primary_rows(comparison, every)
    found = []
    for of_base in every:
        rows = {row["arm"].name: row for row in primary if row["where"] == of_base.base.name}
        found.append(Condition(f"{updates}, {of_base.base.name}", of_base.base, rows, of_base.rates))
    tables = [table_of(comparison, each) for each in every]
    return found, page_values(comparison, tables)


def write_objectives() -> list[Path]:
    """The page and its figure, if every arm has been run; the files written. Off policy comes last."""
    on_policy, _ = conditions_of("objectives", "one update")
    one_rate, _ = conditions_of("objectives_one_rate", "one update at 0.3e-3")
    off_policy, off_values = conditions_of("objectives_off_policy", "four updates")
    conditions = [*on_policy, *one_rate, *off_policy]
    if any(row["half_width"] is None for condition in conditions for row in condition.rows.values()):
        return []
    arms = off_values["comparison"].arms[1:]
    draw(conditions, arms, FIGURE)
    labels = {arm.name: arm.label for arm in off_values["comparison"].arms}
    largest = max((abs(row["mean"]), name) for condition in one_rate for name, row in condition.rows.items())
    values = {**off_values, "conditions": conditions, "arms": arms, "labels": labels, "largest": largest}
    write_atomically(PAGE, render("objectives.template.md", values))
    return [PAGE, FIGURE]


def draw(conditions: list[Condition], arms: list[Arm], path: Path) -> None:
    """A line per objective: its difference from GRPO under each condition, with the 95 % interval."""
    figure, axes = grid(1, 1, width=7.5, height=0.6 * len(arms))
    axis = axes[0, 0]
    axis.axvline(0, color="black", linewidth=1)
    for number, (condition, marker) in enumerate(zip(conditions, MARKERS, strict=True)):
        for line, arm in enumerate(arms):
            if arm.name not in condition.rows:
                continue
            row = condition.rows[arm.name]
            is_decided = abs(row["mean"]) > row["half_width"] and row["holm"] < 0.05
            axis.errorbar(
                row["mean"],
                line + 0.16 * (number - len(conditions) // 2),
                xerr=row["half_width"],
                fmt=marker,
                color=f"C{number}",
                markerfacecolor=f"C{number}" if is_decided else "white",
                label=condition.title,
            )
    axis.set(yticks=range(len(arms)), yticklabels=[arm.label for arm in arms])
    axis.set_xlabel(f"{MEASURE} minus GRPO, points, with 95 % interval; filled: decided")
    axis.invert_yaxis()
    add_legend(figure)
    write_atomically(path, partial(figure.savefig, dpi=100, format="png"))
