"""The results table as text, with the columns of Table 1 of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.errors import printable
from gtpo.evaluation.records import Entry
from gtpo.evaluation.targets import short_name

PASS_COLUMNS = (1, 8, 16, 32, 64)
MAJ_COLUMNS = (4, 8, 16, 32, 64)  # k in Table 1


def format_table(entries: Sequence[Entry]) -> str:
    """The entries as text, one block per benchmark, in percent."""
    benchmarks = dict.fromkeys(entry.benchmark for entry in entries)
    return "\n\n".join(_block(name, [row for row in entries if row.benchmark == name]) for name in benchmarks)


def lay_out(cells: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """The lines of a table with aligned columns, and a rule as wide as they are; control characters are escaped."""
    shown = [[printable(cell) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown]
    return lines, "-" * max(map(len, lines))


def columns_up_to(k: int, columns: Sequence[int]) -> list[int]:
    """The columns up to k, and k itself."""
    return sorted({column for column in columns if column <= k} | {k})


def _block(benchmark: str, rows: Sequence[Entry]) -> str:
    """Title, header and rows of one benchmark, with rules between them."""
    pass_columns, maj_columns = (
        sorted({k for row in rows for k in columns_up_to(row.k, columns)}) for columns in (PASS_COLUMNS, MAJ_COLUMNS)
    )
    groups = [("Pass@k (%)", "pass", pass_columns), ("Maj@k (%)", "maj", maj_columns)]
    cells = [
        ["", "", *(title for title, _, _ in groups), "Format", "Cut off", "Unreadable", "Pass@1"],
        ["Model", "Method", *(" ".join(f"{k:>5}" for k in ks) for _, _, ks in groups), *["(%)"] * 3, "95 % interval"],
    ]
    for row in rows:
        scores = row.scores
        method = row.label if row.origin.adapter else "model" if row.label.startswith("model-") else "base"
        model = short_name(row.origin.model) + (" (4-bit)" if row.settings.get("load_in_4bit") else "")
        numbers = [_numbers(scores[name], ks) for _, name, ks in groups]
        shares = [f"{share:.1f}" for share in (scores["format"], 100 - scores["finished"], scores["unreadable"])]
        cells.append([model, method, *numbers, *shares, _interval(row.intervals["pass"])])
        if _differs_leniently(scores, pass_columns, maj_columns):
            lenient = [_numbers(scores["pass_lenient"], pass_columns), _numbers(scores["maj_lenient"], maj_columns)]
            cells.append(["", f"{method}, lenient", *lenient, *[""] * 3, _interval(row.intervals["pass_lenient"])])
    lines, rule = lay_out(cells)
    sizes = " and ".join(str(k) for k in sorted({row.k for row in rows}))
    title = f"{BENCHMARK_TITLES.get(benchmark, printable(benchmark))}: {rows[0].problems} problems, k = {sizes}"
    if grader := rows[0].graded_by.get("grader"):  # one --grader for all rows
        title += f", graded by {printable(grader)}"
    if dropped := ", ".join(f"{count} {reason}" for reason, count in rows[0].dropped.items()):
        title += f"\nRows dropped: {dropped}"
    return "\n".join([title, rule, *lines[:2], rule, *lines[2:], rule])


def _numbers(scores: Mapping[str, float], ks: Sequence[int]) -> str:
    return " ".join(f"{scores[str(k)]:5.1f}" if str(k) in scores else "    -" for k in ks)


def _interval(by_k: Mapping[str, Sequence[float]]) -> str:
    low, high = by_k["1"]
    return f"{low:.1f} to {high:.1f}"


def _differs_leniently(scores: Mapping[str, Any], pass_columns: Sequence[int], maj_columns: Sequence[int]) -> bool:
    """Whether a lenient score of the table is over a point from the strict one; a user's grader gives none."""
    shown = [("pass", str(k)) for k in pass_columns] + [("maj", str(k)) for k in maj_columns]
    return "pass_lenient" in scores and any(
        abs(scores[f"{metric}_lenient"][k] - scores[metric][k]) > 1 for metric, k in shown if k in scores[metric]
    )
