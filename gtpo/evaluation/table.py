"""The results table as text, with the columns of Table 1 of the paper."""

from collections.abc import Mapping, Sequence

from pandas import DataFrame, MultiIndex

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.errors import printable
from gtpo.evaluation.records import Entries, Entry, Scores, by_benchmark
from gtpo.models.source import title_of

PASS_COLUMNS = (1, 8, 16, 32, 64)
MAJ_COLUMNS = (4, 8, 16, 32, 64)  # k in Table 1
WIDTH = 80  # columns of a terminal
Sizes = Sequence[int]  # values of k
TITLES = {"pass": "Pass@k (%)", "maj": "Maj@k (%)"}
SHARES = {"Format": "(%)", "Cut off": "(%)", "Unreadable": "(%)", "Pass@1": "95 % interval"}


def format_table(entries: Entries) -> str:
    """The entries as text, one block per benchmark, in percent."""
    return "\n\n".join(map(_block, by_benchmark(entries).values()))


def lay_out(cells: Sequence[Sequence[str]], headers: int) -> list[str]:
    """Lines of a table as pandas writes it, at most 80 wide; control characters are escaped.

    Columns that do not fit follow below, each part with the first column again.

    Args:
        cells: The text of each cell, by row.
        headers: The number of rows that are headers.
    """
    shown = [[*map(printable, row)] for row in cells]
    corner, *names = zip(*shown[:headers], strict=True)
    frame = DataFrame(
        [row[1:] for row in shown[headers:]],
        index=[row[0] for row in shown[headers:]],
        columns=MultiIndex.from_tuples(names, names=corner),
    )
    return [line.rstrip() for line in frame.to_string(line_width=WIDTH).splitlines()]


def columns_up_to(k: int, columns: Sizes) -> list[int]:
    """The columns up to k, and k itself."""
    return sorted({k, *(column for column in columns if column <= k)})


def _block(rows: Entries) -> str:
    """Title and tables of one benchmark; grader and dropped rows are the same for all rows."""
    columns = {
        "pass": _columns(rows, PASS_COLUMNS),
        "maj": _columns(rows, MAJ_COLUMNS),
    }
    cells = [[""], [""]]
    for metric, ks in columns.items():
        cells[0] += [TITLES[metric]] * len(ks)
        cells[1] += map(str, ks)
    cells[0] += SHARES.keys()
    cells[1] += SHARES.values()
    for row in rows:
        label = row.label
        if row.settings.sampling.load_in_4bit:
            label += " (4-bit)"
        shares = row.shares["format"], 100 - row.shares["finished"], row.shares["unreadable"]
        shown = [f"{share:.1f}" for share in shares]
        cells.append([label, *_numbers(row.strict, columns), *shown, _interval(row.strict)])
        if row.lenient and _differ(row.strict, row.lenient):
            cells.append(["  lenient", *_numbers(row.lenient, columns), "", "", "", _interval(row.lenient)])
    return "\n".join([*_heading(rows), *lay_out(cells, headers=2)])


def _heading(rows: Entries) -> list[str]:
    """The lines above the table of one benchmark."""
    first = rows[0]
    title = BENCHMARK_TITLES.get(first.benchmark, first.benchmark)
    sizes = " and ".join(dict.fromkeys(str(row.k) for row in rows))
    models = " and ".join(dict.fromkeys(title_of(row.origin.model) for row in rows))
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


def _numbers(scores: Scores, columns: Mapping[str, Sizes]) -> list[str]:
    """The cells of pass@k and maj@k."""
    cells = []
    for metric, ks in columns.items():
        by_k = scores.means[metric]
        cells += [f"{by_k[k]:.1f}" if k in by_k else "-" for k in ks]
    return cells


def _interval(scores: Scores) -> str:
    """That of pass@1."""
    return "{:.1f} to {:.1f}".format(*scores.intervals["pass"][1])


def _differ(strict: Scores, lenient: Scores) -> bool:
    """Whether a lenient score is over a point from the strict one."""
    differences = []
    for metric, by_k in lenient.means.items():
        differences += [abs(score - strict.means[metric][k]) for k, score in by_k.items()]
    return max(differences, default=0) > 1
