"""The results table as text, with the columns of Table 1 of the paper."""

from collections.abc import Mapping, Sequence

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.errors import printable
from gtpo.evaluation.records import Entries, Entry, Stored, by_benchmark
from gtpo.evaluation.targets import short_name

PASS_COLUMNS = (1, 8, 16, 32, 64)
MAJ_COLUMNS = (4, 8, 16, 32, 64)  # k in Table 1
WIDTH = 80  # columns of a terminal
Sizes = Sequence[int]  # values of k
HEADER = [
    "",
    "Pass@k (%)",
    "Maj@k (%)",
    "Format",
    "Cut off",
    "Unreadable",
    "Pass@1",
]


def format_table(entries: Entries) -> str:
    """The entries as text, one block per benchmark, in percent."""
    return "\n\n".join(map(_block, by_benchmark(entries).values()))


def lay_out(cells: Sequence[Sequence[str]], headers: int) -> list[str]:
    """Lines of a table with aligned columns and rules, at most 80 wide; control characters are escaped.

    Columns that do not fit follow in tables below, each with the first column again.

    Args:
        cells: The text of each cell, by row.
        headers: The number of rows above the second rule.
    """
    columns = []
    for texts in zip(*cells, strict=True):
        shown = [*map(printable, texts)]
        width = max(map(len, shown))
        columns.append([text.ljust(width) for text in shown])
    first, *others = columns
    tables = [[first]]
    for column in others:
        used = sum(len(cells[0]) + 2 for cells in tables[-1])
        if used + len(column[0]) > WIDTH and used > len(first[0]) + 2:
            tables.append([first])
        tables[-1].append(column)
    lines: list[str] = []
    for table in tables:
        rows = ["  ".join(row).rstrip() for row in zip(*table, strict=True)]
        rule = "-" * max(map(len, rows))
        if not lines:
            lines.append(rule)
        lines += [*rows[:headers], rule, *rows[headers:], rule]
    return lines


def columns_up_to(k: int, columns: Sizes) -> list[int]:
    """The columns up to k, and k itself."""
    return sorted({k, *(column for column in columns if column <= k)})


def _block(rows: Entries) -> str:
    """Title and tables of one benchmark; grader and dropped rows are the same for all rows."""
    columns = {
        "pass": _columns(rows, PASS_COLUMNS),
        "maj": _columns(rows, MAJ_COLUMNS),
    }
    sizes = [" ".join(f"{k:>5}" for k in ks) for ks in columns.values()]
    cells = [HEADER, ["", *sizes, "(%)", "(%)", "(%)", "95 % interval"]]
    for row in rows:
        scores = row.scores
        label = row.label
        if row.settings.get("load_in_4bit"):
            label += " (4-bit)"
        shares = scores["format"], 100 - scores["finished"], scores["unreadable"]
        shown = [f"{share:.1f}" for share in shares]
        cells.append([label, *_numbers(scores, columns), *shown, _interval(row.intervals["pass"])])
        if _differs_leniently(scores):
            lenient = _numbers(scores, columns, "_lenient")
            cells.append(["  lenient", *lenient, "", "", "", _interval(row.intervals["pass_lenient"])])
    return "\n".join([*_heading(rows), *lay_out(cells, headers=2)])


def _heading(rows: Entries) -> list[str]:
    """The lines above the table of one benchmark."""
    first = rows[0]
    title = BENCHMARK_TITLES.get(first.benchmark, first.benchmark)
    sizes = " and ".join(dict.fromkeys(str(row.k) for row in rows))
    models = " and ".join(dict.fromkeys(short_name(row.origin.model) for row in rows))
    lines = [
        f"{title}: {first.problems} problems, k = {sizes}",
        f"Base model: {models}",
    ]
    if grader := first.graded_by.get("grader"):
        lines.append(f"Graded by {grader}")
    if dropped := ", ".join(f"{count} {reason}" for reason, count in first.dropped.items()):
        lines.append(f"Rows dropped: {dropped}")
    lines += [f"{row.label} was {said}" for row in rows if (said := trained_on_text(row))]
    return list(map(printable, lines))


def trained_on_text(entry: Entry) -> str:
    """The part of the problems that the run was trained on; empty without any."""
    return f"trained on {entry.trained_on} of the {entry.problems} problems" if entry.trained_on else ""


def _columns(rows: Entries, of_paper: Sizes) -> list[int]:
    """The columns of all rows."""
    return sorted({k for row in rows for k in columns_up_to(row.k, of_paper)})


def _numbers(scores: Stored, columns: Mapping[str, Sizes], kind: str = "") -> list[str]:
    """The cells of pass@k and maj@k; ``kind``: ``_lenient`` for the lenient scores."""
    cells = []
    for metric, ks in columns.items():
        by_k = scores[metric + kind]
        numbers = (f"{by_k[k]:5.1f}" if k in by_k else "    -" for k in map(str, ks))
        cells.append(" ".join(numbers))
    return cells


def _interval(by_k: Stored) -> str:
    return "{:.1f} to {:.1f}".format(*by_k["1"])


def _differs_leniently(scores: Stored) -> bool:
    """Whether a lenient score is over a point from the strict one; a user's grader gives none."""
    differences = []
    for metric in ("pass", "maj"):
        lenient = scores.get(f"{metric}_lenient", {})
        differences += [abs(score - scores[metric][k]) for k, score in lenient.items()]
    return max(differences, default=0) > 1
