"""The report of a run: its curves, and groups with the weight of each token.

    python -m gtpo.reports.html outputs/RUN          # writes outputs/RUN/report.html

``HTML(group_html(read_group(table, G, rewards)[1]))`` shows a group in a notebook.
"""

import argparse
import io
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gtpo.arguments import Values
from gtpo.errors import printable
from gtpo.files import write_atomically
from gtpo.reports.curves import arm_of_run, plot_training
from gtpo.reports.metrics import Rows, reward_names
from gtpo.reports.summary import TEMPLATES, find_problems, score_lines
from gtpo.runs.directory import RunDirectory, command_of, existing_run, method_of
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)


class Group(NamedTuple):
    """A prompt and its completions: rows of a stored table (docs/metrics.md), each with its ``spans``."""

    rewards: list[str]  # their columns
    rows: list[Values]


def logged_text(logged: Any) -> str:
    """A prompt or completion of TRL's table as text: since 1.16 the table has the messages of a conversation."""
    return logged if isinstance(logged, str) else "\n".join(message["content"] for message in logged)


def read_group(
    table: str | Path, group_size: int, rewards: Sequence[str], positive_weight: float = 2.0
) -> tuple[int, Group]:
    """The step and the first group of a stored table of completions (``completions/*.parquet`` of a run)."""
    from pyarrow.parquet import read_table

    rows = read_table(table).slice(0, group_size).to_pylist()
    for row in rows:
        on_span = positive_weight * (row["advantage"] > 0) if row["advantage"] else 1.0  # lambda of Eq. 9
        row["spans"] = _spans(logged_text(row["completion"]), row["conflicts"], on_span)
        row["prompt"] = logged_text(row["prompt"])
    return rows[0]["step"], Group([name for name in rewards if name in rows[0]], rows)


def _spans(text: str, conflicts: Sequence[Sequence[int]], on_span: float) -> list[tuple[str, float]]:
    """A completion as (text, lambda of Eq. 9); conflict tokens, which are each second span, have ``on_span``."""
    edges = [0, *itertools.chain(*conflicts), len(text)]
    spans = []
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        spans.append((text[start:end], on_span if number % 2 else 1.0))
    return spans


def group_html(group: Group) -> str:
    """The group as HTML: its prompt turn by turn, the gold answer, and its completions, highest advantage first."""
    return str(TEMPLATES.get_template("group.html.jinja").module.group(group))  # type: ignore[attr-defined]


def write_report(run_directory: str | Path) -> Path:
    """Write ``report.html``: the curves of a run, and its first, middle and last stored group."""
    run = existing_run(run_directory, having="metrics")
    rows = run.read_metrics()
    settings = run.read_config()
    page = TEMPLATES.get_template("report.html.jinja").render(
        method=method_of(run),
        settings=settings,
        problems=find_problems(rows, settings.get("max_completion_length")).values(),
        scores=score_lines(rows),
        again=command_of(run, "--config", str(run.config), "--output_dir", "outputs/NAME"),
        curves=_curves(run, settings["run_name"], rows),
        groups=_read_groups(run, settings, reward_names(rows)),
    )
    write_atomically(run.report, page)
    return run.report


def _curves(run: RunDirectory, name: str, rows: Rows) -> str:
    """The curves as SVG whose text and axes have the color of the page."""
    figure = plot_training({name: rows}, arms={name: arm_of_run(run)})
    svg = io.StringIO()
    figure.savefig(svg, format="svg", transparent=True)
    _, tag, drawing = svg.getvalue().partition("<svg")
    return tag + drawing.replace("#000000", "currentColor")


def _read_groups(run: RunDirectory, settings: Values, rewards: Sequence[str]) -> list[tuple[int, str]]:
    """(step, HTML) of the first group of three stored tables; a table that cannot be read is logged."""
    shown = []
    positive_weight = settings.get("conflict_positive_weight", 2.0)
    for path in _shown_tables(run):
        try:
            step, group = read_group(path, settings["num_generations"], rewards, positive_weight)
            shown.append((step, group_html(group)))
        except Exception as error:  # a truncated file, or a foreign one
            logger.warning("%s cannot be read and is not shown: %s", path, error)
    return shown


def _shown_tables(run: RunDirectory) -> list[Path]:
    """The first, middle and last table; none through a link or a named pipe."""
    own = [path for path in run.completion_tables() if path.is_file() and not path.is_symlink()]
    return own and sorted({own[0], own[len(own) // 2], own[-1]})


def main() -> None:
    what = "Write the report.html of runs: curves and a few groups."
    parser = argparse.ArgumentParser(prog="python -m gtpo.reports.html", allow_abbrev=False, description=what)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(printable(str(write_report(run))))


if __name__ == "__main__":
    run_script(main)
