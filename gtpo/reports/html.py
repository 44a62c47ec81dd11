"""The report of a run: its curves, completions of several steps, and groups with the weight of each token.

    python -m gtpo.reports.html outputs/RUN          # writes outputs/RUN/report.html

In a notebook:

    HTML(group_html(trainer.inspect_group(0)))  # G completions of one prompt, generated and scored; not trained on
    HTML(side_by_side(read_held_out(RunDirectory(run), 3)))  # one held-out prompt at the first, middle and last step
"""

import argparse
import dataclasses
import io
import itertools
import json
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from gtpo.arguments import (
    DataArguments,
    GTPOArguments,
    ModelArguments,
    PromptArguments,
    RewardArguments,
    RunArguments,
    fields_of,
)
from gtpo.files import write_atomically
from gtpo.reports.curves import plot_training
from gtpo.reports.groups import Group, read_group
from gtpo.reports.metrics import reward_names
from gtpo.reports.summary import find_problems, initial_entropy_text, score_lines
from gtpo.runs.directory import RunDirectory, command_of, method_of
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)

SETTINGS = (ModelArguments, DataArguments, PromptArguments, RewardArguments, GTPOArguments, RunArguments)  # ours

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  # a truncated file, or foreign


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
    """The group as HTML: its prompt turn by turn, the gold answer, and a table of completions, highest advantage first.

    Tokens of weight 2 are green, those of weight 0 grey; a completion with delta = 0 is struck out, and one that was
    cut off at the length limit ends with a mark. Line breaks of a completion are shown as ↵.
    """
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
    """Write ``report.html``: the curves of a run and a few of its groups, from first to last step; of SFT curves only.

    Raises:
        UsageError: If the run has no metrics.
    """
    run = RunDirectory(run_directory)
    rows, settings = run.read_metrics(), run.read_config()
    svg = io.StringIO()
    plot_training({settings["run_name"]: rows}).savefig(svg, format="svg")
    shown: list[tuple[int, str]] = []
    samples: list[Sample] = []
    for path in _spread(run.completion_tables(), groups):
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
        title=f"{(method_of(run) or 'run').upper()} of {settings['model']} on {settings['dataset']}: "
        f"{settings['run_name']}",
        facts=_facts(run, settings, rows),
        curves="<svg" + svg.getvalue().partition("<svg")[2],
        held_out=Markup(side_by_side(held_out)) if held_out else "",
        samples=Markup(side_by_side(samples)) if len(samples) > 1 else "",
        corrected=settings.get("conflict_correction"),
        groups=shown,
        settings=sorted(changed_settings(settings).items()),
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
    for path in _spread(run.held_out_completions(), count):
        try:
            stored = json.loads(path.read_bytes())
            rewards = {str(name): None if value is None else float(value) for name, value in stored["rewards"].items()}
            samples.append(Sample(stored["step"], str(stored["prompt"]), str(stored["completion"]), rewards))
        except UNREADABLE as error:
            logger.warning("%s cannot be read and is not shown: %s", path, error)
    return samples


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that differ from the defaults of TRL, Transformers and ours."""
    from trl import GRPOConfig, SFTConfig

    trainer = GRPOConfig if "num_generations" in settings else SFTConfig
    fields = fields_of([trainer, *SETTINGS])
    return {
        name: value
        for name, value in settings.items()
        if value is not None and (name not in fields or value != _default(fields[name]))
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _facts(run: RunDirectory, settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Problems, scores, initial entropy, duration and the command that repeats the run."""
    lines = [f"{problem}." for problem in find_problems(rows, settings.get("max_completion_length")).values()]
    lines += score_lines(run, rows)
    if entropy := initial_entropy_text(run):
        above = settings.get("entropy_threshold", math.log(2))
        lines.append(f"⟨H⟩_ini, the mean token entropy: {entropy}, threshold {above:.3f} nats")
    if seconds := sum(row.get("step_time") or 0.0 for row in rows):
        lines.append(f"Steps took {timedelta(seconds=round(seconds))} in all, without checkpoints and evaluations")
    if method_of(run):
        again = command_of(run, "--config", str(run.config), "--output_dir", "outputs/NAME")
        lines.append(f"The same run again: {again}")
    return lines


def main() -> None:
    what = "Write the report.html of runs: curves and a few groups."
    parser = argparse.ArgumentParser(prog="python -m gtpo.reports.html", allow_abbrev=False, description=what)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(write_report(run))


if __name__ == "__main__":
    run_script(main)
