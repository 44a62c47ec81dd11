"""The report of a run: its curves, completions of several steps, and groups with the weight of each token.

    python -m gtpo.reports.html outputs/RUN          # writes outputs/RUN/report.html

``HTML(group_html(trainer.inspect_group(0)))`` shows a group in a notebook.
"""

import argparse
import io
import itertools
import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jinja2
import torch
from markupsafe import Markup

from gtpo.errors import printable
from gtpo.files import write_atomically
from gtpo.reports.curves import plot_training
from gtpo.reports.metrics import reward_names
from gtpo.reports.summary import find_problems, initial_entropy_text, score_lines
from gtpo.runs.directory import RunDirectory, command_of, existing_run, method_of
from gtpo.runs.script import run_script
from gtpo_loss import conflict_weights

logger = logging.getLogger(__name__)

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  # a truncated file, or foreign


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
    messages: list[dict[str, Any]] | None = None  # the turns of the prompt, {role, content}; None for plain text
    gold_answer: str | None = None
    cut_off: list[bool] = field(default_factory=list)  # at the length limit; empty where that is not known


def logged_text(logged: Any) -> str:
    """A prompt or completion of TRL's table as text: since 1.16 the table has the messages of a conversation."""
    return logged if isinstance(logged, str) else "\n".join(message["content"] for message in logged)


def read_group(
    table: str | Path, group_size: int, rewards: Sequence[str], positive_weight: float = 2.0
) -> tuple[int, Group]:
    """The step and the first group of a stored table of completions (``completions/*.parquet`` of a run)."""
    from pyarrow.parquet import read_table

    rows = read_table(table).to_pylist()[:group_size]
    tokens = []
    weights = []
    for row in rows:
        on_span = conflict_weights(
            torch.ones(1, 1, dtype=torch.bool), torch.tensor([row["advantage"]]), positive_weight
        ).item()
        text = logged_text(row["completion"])
        edges = [0, *(edge for span in row["conflicts"] for edge in span), len(text)]
        tokens.append([text[a:b] for a, b in itertools.pairwise(edges)])
        weights.append([on_span if piece % 2 else 1.0 for piece in range(len(edges) - 1)])
    return rows[0]["step"], Group(
        prompt=logged_text(rows[0]["prompt"]),
        tokens=tokens,
        rewards={name: [row[name] for row in rows] for name in rewards if name in rows[0]},
        advantages=[row["advantage"] for row in rows],
        weights=weights,
        entropy=[row["entropy"] for row in rows],
        keep=[row["delta"] for row in rows],
        messages=rows[0].get("messages"),
        gold_answer=rows[0].get("gold_answer"),
        cut_off=[row["cut_off"] for row in rows if "cut_off" in row],
    )


def _reward(value: float | None) -> str:
    """A reward as text; "-" where the function gave none, which TRL stores as NaN."""
    return "-" if value is None or math.isnan(value) else f"{value:g}"


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)
_TEMPLATES.filters["reward"] = _reward


def _macro(name: str) -> Any:
    return getattr(_TEMPLATES.get_template("group.html.jinja").module, name)


def group_html(group: Group) -> str:
    """The group as HTML: its prompt turn by turn, the gold answer, and its completions, highest advantage first."""
    rows = []
    for i in sorted(range(len(group.advantages)), key=lambda i: -group.advantages[i]):
        rewards = (_reward(values[i]) for values in group.rewards.values())
        pairs = zip(group.tokens[i], group.weights[i], strict=True)
        runs = itertools.groupby(pairs, key=lambda pair: pair[1])  # tokens of one weight
        rows.append(
            {
                "numbers": [f"{group.advantages[i]:+.2f}", *rewards, f"{group.entropy[i]:.3f}"],
                "spans": [("".join(t for t, _ in run).replace("\n", "↵"), weight) for weight, run in runs],
                "kept": group.keep[i] != 0,
                "cut_off": bool(group.cut_off) and group.cut_off[i],
            }
        )
    turns = [(turn["role"], turn["content"]) for turn in group.messages or [{"role": "", "content": group.prompt}]]
    if group.gold_answer is not None:
        turns.append(("gold answer", group.gold_answer))
    return str(_macro("group")(turns, list(group.rewards), rows))


class Sample(NamedTuple):
    """One completion of a step with its rewards."""

    step: Any
    prompt: str
    completion: str
    rewards: dict[str, float | None]


def side_by_side(samples: Sequence[Sample]) -> str:
    """Completions of several steps as the columns of a table; a prompt that all of them have stands above it."""
    common = samples[0].prompt if len({sample.prompt for sample in samples}) == 1 else ""
    return str(_macro("side_by_side")(samples, common))


def write_report(run_directory: str | Path, groups: int = 3) -> Path:
    """Write ``report.html``: the curves of a run, and a few of its groups from first to last step."""
    run = existing_run(run_directory)
    rows = run.read_metrics()
    settings = run.read_config()
    svg = io.StringIO()
    plot_training({settings["run_name"]: rows}).savefig(svg, format="svg")
    shown: list[tuple[int, str]] = []
    samples: list[Sample] = []
    tables = [path for path in run.completion_tables() if not path.is_symlink()]
    for path in _spread(tables, groups):
        try:
            step, group = read_group(
                path, settings["num_generations"], reward_names(rows), settings.get("conflict_positive_weight", 2.0)
            )
            shown.append((step, Markup(group_html(group))))
            asked = group.messages[-1]["content"] if group.messages else group.prompt
            first = {name: values[0] for name, values in group.rewards.items()}
            samples.append(Sample(step, asked, "".join(group.tokens[0]), first))
        except UNREADABLE as error:
            logger.warning("%s cannot be read and is not shown: %s", path, error)
    held_out = read_held_out(run, groups)
    page = _TEMPLATES.get_template("report.html.jinja").render(
        method=method_of(run) or "run",
        facts=_facts(run, settings, rows),
        curves="<svg" + svg.getvalue().partition("<svg")[2],
        held_out=Markup(side_by_side(held_out)) if held_out else "",
        samples=Markup(side_by_side(samples)) if len(samples) > 1 else "",
        groups=shown,
        settings=settings,
    )
    write_atomically(run.report, page)
    return run.report


def _spread(paths: Sequence[Path], count: int) -> list[Path]:
    """So many of some files, from the first to the last."""
    shown = min(count, len(paths))
    return [paths[i * (len(paths) - 1) // max(1, shown - 1)] for i in range(shown)]


def read_held_out(run: RunDirectory, count: int) -> list[Sample]:
    """The completions of a held-out prompt at the first, middle and last evaluation."""
    samples = []
    found = [path for path in run.completions.glob("held_out_*.json") if not path.is_symlink()]
    for path in _spread(sorted(found), count):
        stored = json.loads(path.read_bytes())
        prompt = logged_text(stored["prompt"])
        completion = logged_text(stored["completion"])
        samples.append(Sample(stored["step"], prompt, completion, stored["rewards"]))
    return samples


def _facts(run: RunDirectory, settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Problems, scores, initial entropy, duration, machine and the command that repeats the run."""
    lines = [f"{problem}." for problem in find_problems(rows, settings.get("max_completion_length")).values()]
    lines += score_lines(run, rows)
    if entropy := initial_entropy_text(run):
        above = settings.get("entropy_threshold", math.log(2))
        lines.append(f"⟨H⟩_ini, the mean token entropy: {entropy}, threshold {above:.3f} nats")
    if seconds := [row["step_time"] for row in rows if row.get("step_time")]:
        total = f"{timedelta(seconds=round(sum(seconds)))} in all, {fmean(seconds):.1f} s each"
        lines.append(f"Steps took {total}, without checkpoints and evaluations")
    with suppress(*UNREADABLE):
        found = run.read_environment()
        lines.append(f"On {', '.join(found['gpus']) or str(found['cpu_count']) + ' CPU cores'}, {found['platform']}")
    if method_of(run):
        again = command_of(run, "--config", str(run.config), "--output_dir", "outputs/NAME")
        lines.append(f"The same run again: {again}")
    return lines


def main() -> None:
    what = "Write the report.html of runs: curves and a few groups."
    parser = argparse.ArgumentParser(prog="python -m gtpo.reports.html", allow_abbrev=False, description=what)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(printable(str(write_report(run))))


if __name__ == "__main__":
    run_script(main)
