"""The report of a run: its curves, completions of several steps, and groups with the weight of each token.

    python -m gtpo.reports.html outputs/RUN          # writes outputs/RUN/report.html

In a notebook:

    HTML(group_html(trainer.inspect_group(0)))  # G completions of one prompt, generated and scored; not trained on
    HTML(side_by_side(read_held_out(RunDirectory(run), 3)))  # one held-out prompt at the first, middle and last step
"""

import argparse
import dataclasses
import html
import io
import itertools
import json
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

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
from gtpo.runs.directory import RunDirectory, method_of
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)

SETTINGS = (ModelArguments, DataArguments, PromptArguments, RewardArguments, GTPOArguments, RunArguments)  # ours

# Translucent, with text in the page's color: readable on light and dark pages.
_COLORS = {2.0: "rgba(46, 160, 67, 0.4)", 0.0: "rgba(128, 128, 128, 0.4)"}  # of a weight lambda: green, grey
_TABLE = "color: inherit; border-collapse: collapse; table-layout: auto; width: 100%"
_CELL = "padding: 3px 8px; text-align: right; vertical-align: top; white-space: nowrap"
_COLUMN = "padding: 0 8px; text-align: left; vertical-align: top; border: 0"
_TEXT = "padding: 3px 8px; text-align: left; vertical-align: top; width: 100%"
# <code>, because notebooks typeset $...$ in other elements; its background and border would cover the colors.
_TURN = "border-left: 3px solid rgba(128, 128, 128, 0.4); margin: 6px 0; padding: 0 10px"
_CUT = " <b>✂</b>"
_CODE = "white-space: pre-wrap; overflow-wrap: anywhere; color: inherit; background: none; border: 0; padding: 0"


def group_html(group: Group) -> str:
    """The group as HTML: its prompt turn by turn, the gold answer, and a table of completions, highest advantage first.

    Tokens of weight 2 are green, those of weight 0 grey; a completion with delta = 0 is struck out, and one that was
    cut off at the length limit ends with a mark. Line breaks of a completion are shown as ↵.
    """
    names = list(group.rewards)
    header = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in ["A", *names, "⟨H⟩"])
    rows = []
    for i in sorted(range(len(group.advantages)), key=lambda i: -group.advantages[i]):
        numbers = [f"{group.advantages[i]:+.2f}", *(_reward(group.rewards[name][i]) for name in names)]
        cells = "".join(f'<td style="{_CELL}">{number}</td>' for number in [*numbers, f"{group.entropy[i]:.3f}"])
        text = _spans(group.tokens[i], group.weights[i])
        if group.keep[i] == 0:
            text = f"<s>{text}</s>"
        mark = _CUT if group.cut_off and group.cut_off[i] else ""
        rows.append(f'<tr>{cells}<td style="{_TEXT}"><code style="{_CODE}">{text}</code>{mark}</td></tr>')
    turns = [(turn["role"], turn["content"]) for turn in group.messages or [{"role": "", "content": group.prompt}]]
    if group.gold_answer is not None:
        turns.append(("gold answer", group.gold_answer))
    return (
        f'<div style="overflow-x: auto">{"".join(_turn(*turn) for turn in turns)}'
        f'<table style="{_TABLE}"><thead><tr>{header}<th style="{_TEXT}">completion</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table><p>{_LEGEND}</p></div>"
    )


def _turn(role: str, content: str) -> str:
    label = f"<b>{html.escape(role)}</b><br>" if role else ""
    return f'<p style="{_TURN}">{label}<code style="{_CODE}">{html.escape(content)}</code></p>'


def _reward(value: float | None) -> str:
    """A reward as text; "-" where the function gave none, which TRL stores as NaN."""
    return "-" if value is None or math.isnan(value) else f"{value:g}"


def _spans(tokens: Sequence[str], weights: Sequence[float]) -> str:
    """The escaped text, each run of tokens of one weight in its color."""
    parts = []
    for weight, run in itertools.groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1]):
        text = html.escape("".join(token for token, _ in run).replace("\n", "↵"))
        parts.append(_colored(text, weight))
    return "".join(parts)


def _colored(text: str, weight: float) -> str:
    return f'<span style="background: {_COLORS[weight]}">{text}</span>' if weight in _COLORS else text


_LEGEND = (
    "A: the advantage, the reward above the mean of the group in standard deviations · ⟨H⟩: mean entropy of the "
    f"completion's tokens · {_colored('green, λ = 2', 2.0)}: shared from either end with a penalized "
    "completion, counts twice · "
    f"{_colored('grey, λ = 0', 0.0)}: shared so with a rewarded one, no update · "
    "<s>struck out</s>, δ = 0: ⟨H⟩ (nats) is above the threshold, no update · "
    "✂: reached the length limit · ↵: line break"
)


UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  # a truncated file, or foreign
_FIXED = (
    "This row is not trained on. Every evaluation draws the same random numbers, so only the weights differ between "
    "the columns."
)
_VARYING = (
    "The first completion of each group below. Each step trains on other prompts, so these prompts differ; a run with "
    "<code>--eval_rows 20</code> shows the same one at each evaluation."
)
_TERMS = (
    "accuracy and formatting: the mean rewards for the correct answer and for the tags in order, in percent of their "
    "maximum · any format: the correct answer with or without tags · ⟨H⟩: the mean entropy of the tokens in nats; "
    "0 is certain, ln 2 = 0.693 a coin toss · conflict tokens: opening and closing tokens that "
    "rewarded and penalized completions of a prompt share"
)


class Sample(NamedTuple):
    """One completion of a step with its rewards."""

    step: Any
    prompt: str
    completion: str
    rewards: dict[str, float | None]


def side_by_side(samples: Sequence[Sample]) -> str:
    """Completions of several steps as the columns of a table; a prompt that all of them have stands above it."""
    common = samples[0].prompt if len({sample.prompt for sample in samples}) == 1 else ""
    cells = []
    for sample in samples:
        rewards = " · ".join(f"{name} {_reward(value)}" for name, value in sample.rewards.items())
        own = "" if common else _turn("prompt", sample.prompt)
        text = f"<p><b>step {html.escape(str(sample.step))}</b><br>{html.escape(rewards)}</p>"
        cells.append(f'<td style="{_COLUMN}">{text}{own}{_turn("completion", sample.completion)}</td>')
    above = _turn("prompt", common) if common else ""
    return f'{above}<table style="{_TABLE}; table-layout: fixed"><tbody><tr>{"".join(cells)}</tr></tbody></table>'


def write_report(run_directory: str | Path, groups: int = 3) -> Path:
    """Write ``report.html``: the curves of a run and a few of its groups, from first to last step; of SFT curves only.

    Raises:
        UsageError: If the run has no metrics.
    """
    run = RunDirectory(run_directory)
    rows, settings = run.read_metrics(), run.read_config()
    svg = io.StringIO()
    plot_training({settings["run_name"]: rows}).savefig(svg, format="svg")
    parts: list[str] = []
    samples: list[Sample] = []
    for path in _spread(run.completion_tables(), groups):
        try:
            step, group = read_group(
                path, settings["num_generations"], reward_names(rows), settings.get("conflict_positive_weight", 2.0)
            )
            parts.append(f"<h2>A group of step {html.escape(str(step))}</h2>{group_html(group)}")
            asked = group.messages[-1]["content"] if group.messages else group.prompt
            first = {name: values[0] for name, values in group.rewards.items()}
            samples.append(Sample(step, asked, "".join(group.tokens[0]), first))
        except UNREADABLE as error:
            logger.warning("%s cannot be read and is not shown: %s", path, error)
    if parts and not settings.get("conflict_correction"):
        parts.insert(0, "<p>This run gives every token weight 1: the colors show what the correction would do.</p>")
    if held_out := read_held_out(run, groups):
        parts.insert(0, f"<h2>One held-out prompt over training</h2><p>{_FIXED}</p>{side_by_side(held_out)}")
    elif len(samples) > 1:
        parts.insert(0, f"<h2>One completion each of several steps</h2><p>{_VARYING}</p>{side_by_side(samples)}")
    stored = (
        f"<tr><td>{html.escape(str(key))}</td><td><code>{html.escape(str(value))}</code></td></tr>"
        for key, value in sorted(changed_settings(settings).items())
    )
    what = f"{(method_of(run) or 'run').upper()} of {settings['model']} on {settings['dataset']}"
    title = html.escape(f"{what}: {settings['run_name']}")
    page = _PAGE.format(
        title=title,
        facts=_facts(run, settings, rows),
        terms=_TERMS,
        curves=svg.getvalue().partition("<svg")[2],
        groups="".join(parts),
        settings="".join(stored),
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


def _facts(run: RunDirectory, settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Problems, scores, initial entropy, duration and the command that repeats the run, as paragraphs."""
    lines = [f"{problem}." for problem in find_problems(rows, settings.get("max_completion_length")).values()]
    lines += score_lines(run, rows)
    if entropy := initial_entropy_text(run):
        above = settings.get("entropy_threshold", math.log(2))
        lines.append(f"⟨H⟩_ini, the mean token entropy: {entropy}, threshold {above:.3f} nats")
    if seconds := sum(row.get("step_time") or 0.0 for row in rows):
        lines.append(f"Steps took {timedelta(seconds=round(seconds))} in all, without checkpoints and evaluations")
    if method := method_of(run):
        lines.append(f"The same run again: python train_{method}.py --config {run.config} --output_dir outputs/NAME")
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }}
figure {{ background: white; margin: 0; padding: .5rem }}
svg {{ height: auto; max-width: 100% }}
details {{ margin: 2rem 0 }}
summary {{ cursor: pointer }}
details td {{ padding: 1px 12px 1px 0; vertical-align: top; overflow-wrap: anywhere }}
tr + tr td {{ border-top: 1px solid rgba(128, 128, 128, .3) }}
</style></head><body>
<h1>{title}</h1>
{facts}
<figure><svg{curves}</figure>
<p>{terms}</p>
{groups}
<details><summary>Changed settings (all: config.yaml)</summary><table>{settings}</table></details>
</body></html>
"""


def main() -> None:
    what = "Write the report.html of runs: curves and a few groups."
    parser = argparse.ArgumentParser(prog="python -m gtpo.reports.html", allow_abbrev=False, description=what)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(write_report(run))


if __name__ == "__main__":
    run_script(main)
