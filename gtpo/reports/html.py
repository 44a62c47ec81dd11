"""The report of a run: its curves, a held-out prompt over training, and groups with the weight of each token.

    python -m gtpo.reports.html outputs/RUN          # writes outputs/RUN/report.html

``HTML(group_html(read_group(table, G, rewards)[1]))`` shows a group in a notebook.
"""

import argparse
import io
import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gtpo.arguments import MODEL_ALIASES, Values
from gtpo.errors import printable
from gtpo.files import write_atomically
from gtpo.reports.curves import arm_of_run, plot_training
from gtpo.reports.metrics import Rows, finite_values, reward_names
from gtpo.reports.summary import TEMPLATES, find_problems, initial_entropy_text, score_lines
from gtpo.runs.directory import RunDirectory, command_of, existing_run, method_of
from gtpo.runs.script import run_script
from gtpo_loss import conflict_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """A prompt and its G completions; every list has one element per completion.

    A group from a stored table lacks the special tokens of the prompt, and has spans in place of tokens.
    """

    prompt: str
    tokens: list[list[str]]  # text of each token, the end-of-text token included
    rewards: dict[str, list[float | None]]  # by reward function; None where it gave none
    advantages: list[float]  # A_i
    weights: list[list[float]]  # lambda of each token, Eq. 9
    entropy: list[float]  # <H>_i in nats
    keep: list[float]  # delta: 0 for a completion that the entropy filter drops, else 1
    messages: list[Values] | None = None  # the turns of the prompt, {role, content}; None for plain text
    gold_answer: str | None = None
    cut_off: list[bool] = field(default_factory=list)  # at the length limit; empty where that is not known

    def spans(self, i: int) -> list[tuple[str, float]]:
        """Completion i as (text, weight), neighbouring tokens of one weight together."""
        weighted = zip(self.weights[i], self.tokens[i], strict=True)
        spans = []
        for weight, run in itertools.groupby(weighted, key=itemgetter(0)):
            text = "".join(token for _, token in run)
            spans.append((text.replace("\n", "↵"), weight))
        return spans


def logged_text(logged: Any) -> str:
    """A prompt or completion of TRL's table as text: since 1.16 the table has the messages of a conversation."""
    return logged if isinstance(logged, str) else "\n".join(message["content"] for message in logged)


def read_group(
    table: str | Path, group_size: int, rewards: Sequence[str], positive_weight: float = 2.0
) -> tuple[int, Group]:
    """The step and the first group of a stored table of completions (``completions/*.parquet`` of a run)."""
    from pyarrow.parquet import read_table

    columns = read_table(table).slice(0, group_size).to_pydict()
    advantages = columns["advantage"]
    everywhere = torch.ones(len(advantages), 1, dtype=torch.bool)
    on_spans = conflict_weights(everywhere, torch.tensor(advantages), positive_weight)[:, 0].tolist()
    tokens = []
    weights = []
    for completion, spans, on_span in zip(columns["completion"], columns["conflicts"], on_spans, strict=True):
        text = logged_text(completion)
        edges = [0, *itertools.chain(*spans), len(text)]
        tokens.append([text[a:b] for a, b in itertools.pairwise(edges)])
        weights.append([on_span if piece % 2 else 1.0 for piece in range(len(edges) - 1)])
    group = Group(
        prompt=logged_text(columns["prompt"][0]),
        tokens=tokens,
        rewards={name: columns[name] for name in rewards if name in columns},
        advantages=advantages,
        weights=weights,
        entropy=columns["entropy"],
        keep=columns["delta"],
        messages=columns.get("messages", [None])[0],
        gold_answer=columns.get("gold_answer", [None])[0],
        cut_off=columns.get("cut_off", []),
    )
    return columns["step"][0], group


def _macro(name: str) -> Any:
    return getattr(TEMPLATES.get_template("group.html.jinja").module, name)


def group_html(group: Group) -> str:
    """The group as HTML: its prompt turn by turn, the gold answer, and its completions, highest advantage first."""
    order = sorted(range(len(group.advantages)), key=lambda i: -group.advantages[i])
    return str(_macro("group")(group, order))


class Sample(NamedTuple):
    """One completion of a step with its rewards."""

    step: Any
    prompt: str
    completion: str
    rewards: dict[str, float | None]


def side_by_side(samples: Sequence[Sample]) -> str:
    """Completions of several steps as the columns of a table; a prompt that all of them have stands above it."""
    return str(_macro("side_by_side")(samples))


def write_report(run_directory: str | Path, groups: int = 3) -> Path:
    """Write ``report.html``: the curves of a run, and a few of its groups from first to last step."""
    run = existing_run(run_directory, having="metrics")
    rows = run.read_metrics()
    settings = run.read_config()
    environment = run.read_environment()
    method = method_of(run)
    shown = _read_groups(run, settings, reward_names(rows), groups)
    page = TEMPLATES.get_template("report.html.jinja").render(
        method=method,
        ended=date.fromtimestamp(run.metrics.stat().st_mtime),
        base=MODEL_ALIASES.get(settings["model"], settings["model"]),
        environment=environment,
        problems=find_problems(rows, settings.get("max_completion_length")).values(),
        scores=score_lines(run, rows),
        entropy=initial_entropy_text(run),
        seconds=finite_values(rows, "step_time"),
        again=method and command_of(run, "--config", str(run.config), "--output_dir", "outputs/NAME"),
        curves=_curves(run, settings["run_name"], rows),
        held_out=read_held_out(run, groups),
        groups=shown,
        settings=settings,
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


def _read_groups(run: RunDirectory, settings: Values, rewards: Sequence[str], count: int) -> list[tuple[int, str]]:
    """(step, HTML) of the first group of so many stored tables.

    A table that cannot be read is logged.
    """
    shown = []
    positive_weight = settings.get("conflict_positive_weight", 2.0)
    for path in _spread(run.completion_tables(), count):
        try:
            step, group = read_group(path, settings["num_generations"], rewards, positive_weight)
            shown.append((step, group_html(group)))
        except Exception as error:  # a truncated file, or a foreign one
            logger.warning("%s cannot be read and is not shown: %s", path, error)
    return shown


def _spread(paths: Sequence[Path], count: int) -> list[Path]:
    """So many of some files, from the first to the last; none through a link or a named pipe."""
    own = [path for path in paths if path.is_file() and not path.is_symlink()]
    shown = min(count, len(own))
    spread = []
    for i in range(shown):
        place = i * (len(own) - 1) // max(1, shown - 1)
        spread.append(own[place])
    return spread


def read_held_out(run: RunDirectory, count: int) -> list[Sample]:
    """The completions of a held-out prompt at the first, middle and last evaluation."""
    samples = []
    for path in _spread(sorted(run.completions.glob("held_out_*.json")), count):
        stored = json.loads(path.read_bytes())
        prompt = logged_text(stored["prompt"])
        completion = logged_text(stored["completion"])
        samples.append(Sample(stored["step"], prompt, completion, stored["rewards"]))
    return samples


def main() -> None:
    what = "Write the report.html of runs: curves and a few groups."
    parser = argparse.ArgumentParser(prog="python -m gtpo.reports.html", allow_abbrev=False, description=what)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(printable(str(write_report(run))))


if __name__ == "__main__":
    run_script(main)
