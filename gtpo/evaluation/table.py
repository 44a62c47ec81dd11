from collections.abc import Sequence

from evaluate import TITLES
from gtpo.evaluation.scores import Entry
from gtpo.evaluation.targets import short_name

PASS_COLUMNS, MAJ_COLUMNS = (1, 8, 16, 32, 64), (4, 8, 16, 32, 64)  # Table 1


def table(entries: Sequence[Entry]) -> str:
    """The entries as text: a block for each benchmark with the rows and columns of Table 1, all in percent."""
    blocks = []
    for benchmark in dict.fromkeys(entry["benchmark"] for entry in entries):
        rows = [entry for entry in entries if entry["benchmark"] == benchmark]
        pass_columns, maj_columns = (
            sorted({k for row in rows for k in columns_up_to(row["k"], columns)})
            for columns in (PASS_COLUMNS, MAJ_COLUMNS)
        )
        groups = [
            ("Pass@k (%), unbiased", "pass", pass_columns),
            ("Pass@k (%), first k", "pass_first_k", pass_columns),
            ("Maj@k (%)", "maj", maj_columns),
        ]
        cells = [["", "", *(title for title, _, _ in groups), "Format", "Pass@1"]]
        cells.append(
            ["Model", "Method", *(" ".join(f"{k:>5}" for k in ks) for _, _, ks in groups), "(%)", "95 % interval"]
        )
        for row in rows:
            numbers = [
                " ".join(
                    f"{row['scores'][name][str(k)]:5.1f}" if str(k) in row["scores"][name] else "    -" for k in ks
                )
                for _, name, ks in groups
            ]
            low, high = row["intervals"]["pass"]["1"]
            format_rate = f"{row['scores']['format']:.1f}"
            method = row["label"] if row["adapter"] else "base"
            cells.append([short_name(row["model"]), method, *numbers, format_rate, f"{low:.1f} to {high:.1f}"])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        rule = "-" * max(map(len, lines))
        sizes = " and ".join(str(k) for k in sorted({row["k"] for row in rows}))
        lines.insert(0, f"{TITLES[benchmark]}: {rows[0]['problems']} problems, k = {sizes}")
        blocks.append("\n".join([lines[0], rule, *lines[1:3], rule, *lines[3:], rule]))
    return "\n\n".join(blocks)


def columns_up_to(k: int, columns: Sequence[int]) -> list[int]:
    """The columns of Table 1 that k samples can fill, and k itself."""
    return sorted({column for column in columns if column <= k} | {k})
