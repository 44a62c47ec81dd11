"""The results table as text, with the columns of Table 1 of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.errors import printable
from gtpo.evaluation.records import Entry
from gtpo.evaluation.targets import short_name

PASS_COLUMNS = (1, 8, 16, 32, 64)
MAJ_COLUMNS = (4, 8, 16, 32, 64)  # k in Table 1
WIDTH = 80  # columns of a terminal


def format_table(entries: Sequence[Entry]) -> str:
    """The entries as text, one block per benchmark, in percent."""
    benchmarks = dict.fromkeys(entry.benchmark for entry in entries)
    return "\n\n".join(_block(name, [row for row in entries if row.benchmark == name]) for name in benchmarks)


def lay_out(cells: Sequence[Sequence[str]], headers: int) -> list[str]:
    """Lines of a table with aligned columns and rules, at most 80 wide; control characters are escaped.

    Columns that do not fit follow in tables below, each with the first column again.

    Args:
        cells: The text of each cell, by row.
        headers: The number of rows above the second rule.
    """
    shown = [[printable(cell) for cell in line] for line in cells]
    first, *columns = ([cell.ljust(max(map(len, column))) for cell in column] for column in zip(*shown, strict=True))
    tables = [[first]]
    for column in columns:
        width = sum(len(cells[0]) + 2 for cells in tables[-1]) + len(column[0])
        if width > WIDTH and tables[-1] != [first]:
            tables.append([first])
        tables[-1].append(column)
    lines: list[str] = []
    for table in tables:
        rows = ["  ".join(row).rstrip() for row in zip(*table, strict=True)]
        rule = "-" * max(map(len, rows))
        lines += [rule, *rows[:headers], rule, *rows[headers:], rule][bool(lines) :]
    return lines


def columns_up_to(k: int, columns: Sequence[int]) -> list[int]:
    """The columns up to k, and k itself."""
    return sorted({column for column in columns if column <= k} | {k})


def _block(benchmark: str, rows: Sequence[Entry]) -> str:
    """Title and tables of one benchmark; grader and dropped rows are the same for all rows."""
    pass_columns = _columns(rows, PASS_COLUMNS)
    maj_columns = _columns(rows, MAJ_COLUMNS)
    sizes = {str(row.k): None for row in rows}
    models = {short_name(row.origin.model): None for row in rows}
    title = BENCHMARK_TITLES.get(benchmark, printable(benchmark))
    lines = [
        f"{title}: {rows[0].problems} problems, k = {' and '.join(sizes)}",
        f"Base model: {printable(' and '.join(models))}",
    ]
    grader = rows[0].graded_by.get("grader")
    if grader:
        lines.append(f"Graded by {printable(grader)}")
    dropped = [f"{count} {reason}" for reason, count in rows[0].dropped.items()]
    if dropped:
        lines.append(f"Rows dropped: {', '.join(dropped)}")
    cells = [
        ["", "Pass@k (%)", "Maj@k (%)", "Format", "Cut off", "Unreadable", "Pass@1"],
        ["", _header(pass_columns), _header(maj_columns), "(%)", "(%)", "(%)", "95 % interval"],
    ]
    for row in rows:
        scores = row.scores
        label = row.label + (" (4-bit)" if row.settings.get("load_in_4bit") else "")
        shares = [f"{share:.1f}" for share in (scores["format"], 100 - scores["finished"], scores["unreadable"])]
        numbers = [_numbers(scores["pass"], pass_columns), _numbers(scores["maj"], maj_columns)]
        cells.append([label, *numbers, *shares, _interval(row.intervals["pass"])])
        if _differs_leniently(scores):
            lenient = [_numbers(scores["pass_lenient"], pass_columns), _numbers(scores["maj_lenient"], maj_columns)]
            cells.append(["  lenient", *lenient, "", "", "", _interval(row.intervals["pass_lenient"])])
    return "\n".join([*lines, *lay_out(cells, headers=2)])


def _columns(rows: Sequence[Entry], of_paper: Sequence[int]) -> list[int]:
    """The columns of all rows."""
    return sorted({k for row in rows for k in columns_up_to(row.k, of_paper)})


def _header(ks: Sequence[int]) -> str:
    return " ".join(f"{k:>5}" for k in ks)


def _numbers(scores: Mapping[str, float], ks: Sequence[int]) -> str:
    return " ".join(f"{scores[str(k)]:5.1f}" if str(k) in scores else "    -" for k in ks)


def _interval(by_k: Mapping[str, Sequence[float]]) -> str:
    low, high = by_k["1"]
    return f"{low:.1f} to {high:.1f}"


def _differs_leniently(scores: Mapping[str, Any]) -> bool:
    """Whether a lenient score is over a point from the strict one; a user's grader gives none."""
    for metric in ("pass", "maj"):
        lenient = scores.get(f"{metric}_lenient", {})
        if any(abs(lenient[k] - scores[metric][k]) > 1 for k in lenient):
            return True
    return False
