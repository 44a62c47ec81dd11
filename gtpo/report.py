"""Groups as pictures: G completions of a prompt with what the objective makes of each token, and the page of a run.

python report.py outputs/RUN            # writes outputs/RUN/report.html: its curves and a few of its groups

In a notebook:

view = group_of(trainer, row=0)         # G completions of one prompt, sampled and scored now; nothing is trained
HTML(group_html(view))
trainer.add_callback(LiveCurves("GTPO"))  # the curves below the cell, as they grow
"""

import argparse
import copy
import html
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gtpo.cli import read_yaml, run_script
from gtpo.errors import UsageError
from gtpo.paper.figures import plot_training, reward_names
from gtpo.runs import ON_MAIN_PROCESS, read_metrics, write_atomically
from gtpo_loss import completion_entropy

# Translucent, and text in the page's own colour: readable on a light and on a dark page.
_GREEN, _GREY = "rgba(46, 160, 67, 0.4)", "rgba(128, 128, 128, 0.4)"
_COLOURS = {2.0: _GREEN, 0.0: _GREY}  # lambda
_TABLE = "color: inherit; border-collapse: collapse; table-layout: auto; width: 100%"
_CELL = "padding: 3px 8px; text-align: right; vertical-align: top; white-space: nowrap"
_TEXT = "padding: 3px 8px; text-align: left; vertical-align: top; width: 100%"
# <code>, because notebooks typeset $...$ elsewhere; its own background and frame would cover the colours.
_CODE = "white-space: pre-wrap; overflow-wrap: anywhere; color: inherit; background: none; border: 0; padding: 0"
_LEGEND = " · ".join(
    [
        f'<span style="background: {_GREEN}">green, λ = 2</span>: shared with a penalised completion, counts twice',
        f'<span style="background: {_GREY}">grey, λ = 0</span>: shared with a rewarded one, not pushed down',
        "<s>struck out</s>, δ = 0: ⟨H⟩ (nats) is over the threshold, nothing is learned",
    ]
)


@dataclass(frozen=True)
class GroupView:
    """A prompt and its G completions; every list has one element per completion.

    Attributes:
        prompt: What the policy was given; a group from a stored table lacks the special tokens.
        tokens: Text of each token, the end-of-text token included.
        rewards: Name of a reward function -> its rewards.
        advantages: A_i.
        weights: lambda of each token, Eq. 9.
        entropy: <H>_i in nats.
        delta: 0 for a completion that the entropy filter leaves out, else 1.
    """

    prompt: str
    tokens: list[list[str]]
    rewards: dict[str, list[float]]
    advantages: list[float]
    weights: list[list[float]]
    entropy: list[float]
    delta: list[float]


def group_of(trainer: Any, row: int) -> GroupView:
    """G completions of one prompt, sampled, scored, masked and filtered by the trainer as in a training step.

    Nothing is trained, logged or counted, and the state of the random generators is put back: a run is the same whether
    it was looked at or not, and looking twice shows the same completions. GTPO's initial entropy is measured if it has
    not been yet.

    Args:
        trainer: A GTPOTrainer or GRPOTrainer of ``trainer.py``, in one process.
        row: Which row of its ``train_dataset``.

    Raises:
        UsageError: If the trainer runs in several processes.
    """
    if trainer.accelerator.num_processes > 1:
        raise UsageError(f"a group is shown from one process, and {trainer.accelerator.num_processes} are running.")
    size = trainer.num_generations
    before = copy.deepcopy((trainer._metrics, trainer._logs)), trainer.state.num_input_tokens_seen
    was_training = trainer.model.training
    trainer.model.train()  # the groups of TRL's training mode; there is no dropout
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            batch = trainer._generate_and_score_completions([trainer.train_dataset[row]] * size)
            rewards = {name: list(trainer._logs["rewards"][name])[-size:] for name in trainer.reward_func_names}
            entropy = _mean_entropy(trainer, batch)
    finally:
        trainer.model.train(was_training)
        (trainer._metrics, trainer._logs), trainer.state.num_input_tokens_seen = before
    valid = batch["completion_mask"].bool()
    weights = trainer._weights(batch)
    prompt_ids = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]
    return GroupView(
        prompt=trainer.processing_class.decode(prompt_ids),
        tokens=[_texts(trainer.processing_class, batch["completion_ids"][i][valid[i]].tolist()) for i in range(size)],
        rewards=rewards,
        advantages=batch["advantages"].tolist(),
        weights=[weights[i][valid[i]].tolist() for i in range(size)],
        entropy=entropy.tolist(),
        delta=trainer._delta(entropy, batch).tolist(),
    )


def group_html(view: GroupView) -> str:
    """The group as an HTML table, a completion a row, the highest advantage first.

    Tokens of weight 2 stand on green, those of weight 0 on grey; a completion with delta = 0 is struck out. A line
    break in a completion is shown as ↵.
    """
    names = list(view.rewards)
    header = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in ["A", *names, "⟨H⟩"])
    rows = []
    for i in sorted(range(len(view.advantages)), key=lambda i: -view.advantages[i]):
        numbers = [f"{view.advantages[i]:+.2f}", *(f"{view.rewards[name][i]:g}" for name in names)]
        cells = "".join(f'<td style="{_CELL}">{number}</td>' for number in [*numbers, f"{view.entropy[i]:.3f}"])
        text = _spans(view.tokens[i], view.weights[i])
        if view.delta[i] == 0:
            text = f"<s>{text}</s>"
        rows.append(f'<tr>{cells}<td style="{_TEXT}"><code style="{_CODE}">{text}</code></td></tr>')
    return (
        f'<div style="overflow-x: auto"><p><code style="{_CODE}">{html.escape(view.prompt)}</code></p>'
        f'<table style="{_TABLE}"><thead><tr>{header}<th style="{_TEXT}">completion</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table><p>{_LEGEND}</p></div>"
    )


def _spans(tokens: Sequence[str], weights: Sequence[float]) -> str:
    """The escaped text, each run of tokens of one weight on its colour."""
    parts = []
    for weight, run in itertools.groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1]):
        text = html.escape("".join(token for token, _ in run).replace("\n", "↵"))
        parts.append(f'<span style="background: {_COLOURS[weight]}">{text}</span>' if weight in _COLOURS else text)
    return "".join(parts)


def _mean_entropy(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """<H>_i, in micro-batches of the size that training uses. Shape (B,)."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    parts = zip(*(batch[name].split(trainer.args.per_device_train_batch_size) for name in names), strict=True)
    entropies = []
    for part in parts:
        inputs = dict(zip(names, part, strict=True))
        _, token_entropy = trainer._logps_and_entropy(trainer.model_wrapped, inputs)
        entropies.append(completion_entropy(token_entropy, inputs["completion_mask"]))
    return torch.cat(entropies)


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token as it stands behind the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]


class LiveCurves(TrainerCallback):
    """Draws the curves of a run below the notebook cell that trains it, in place of those before, every few steps.

    To be added after ``tracking.track``, whose metrics.jsonl it reads.
    """

    def __init__(self, label: str, every: int = 10) -> None:
        self.label, self.every, self.shown = label, every, None

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from IPython.display import display

        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        curves = plot_training({self.label: read_metrics(args.output_dir)})
        if self.shown is None:
            self.shown = display(curves, display_id=True)
        else:
            self.shown.update(curves)


def write_report(run_directory: str | Path, groups: int = 3) -> Path:
    """Write ``report.html``: the curves of a run and a few of its groups, from first to last step; one process does.

    Args:
        run_directory: A run of ``train_gtpo.py``, ``train_grpo.py`` or ``train_sft.py``.
        groups: How many steps are shown with one group each; a run without completions (SFT) has its curves alone.

    Raises:
        UsageError: If the run has no metrics.
    """
    run = Path(run_directory)
    if not ON_MAIN_PROCESS:
        return run / "report.html"
    rows = read_metrics(run)
    settings = read_yaml(run / "config.yaml")
    svg = io.StringIO()
    plot_training({settings["run_name"]: rows}).savefig(svg, format="svg")
    tables = sorted((run / "completions").glob("*.parquet"))
    chosen = [tables[i * (len(tables) - 1) // max(1, groups - 1)] for i in range(min(groups, len(tables)))]
    parts = []
    for path in chosen:
        step, view = stored_group(path, settings["num_generations"], reward_names(rows))
        parts.append(f"<h2>A group of step {step}</h2>{group_html(view)}")
    if parts and not settings.get("conflict_correction"):
        parts.insert(0, "<p>This run gives every token weight 1: the colours show what the correction would do.</p>")
    title = html.escape(f"{settings['run_name']}: {settings['model']} on {settings['dataset']}")
    page = _PAGE.format(title=title, curves=svg.getvalue().partition("<svg")[2], groups="".join(parts))
    write_atomically(run / "report.html", page)
    return run / "report.html"


def stored_group(path: str | Path, group_size: int, rewards: Sequence[str]) -> tuple[int, GroupView]:
    """The step and the first group of a stored table of completions (``completions/*.parquet`` of a run).

    Args:
        path: The table.
        group_size: G.
        rewards: Which columns are rewards; a reward function may have logged others of its own.
    """
    from pyarrow.parquet import read_table

    rows = read_table(path).to_pylist()[:group_size]
    tokens, weights = [], []
    for row in rows:
        sign = (row["advantage"] > 0) - (row["advantage"] < 0)
        on_span = {1: 2.0, -1: 0.0, 0: 1.0}[sign]  # Eq. 9
        edges = [0, *(edge for span in row["conflicts"] for edge in span), len(row["completion"])]
        tokens.append([row["completion"][a:b] for a, b in itertools.pairwise(edges)])
        weights.append([on_span if piece % 2 else 1.0 for piece in range(len(edges) - 1)])
    return rows[0]["step"], GroupView(
        prompt=rows[0]["prompt"],
        tokens=tokens,
        rewards={name: [row[name] for row in rows] for name in rewards},
        advantages=[row["advantage"] for row in rows],
        weights=weights,
        entropy=[row["entropy"] for row in rows],
        delta=[row["delta"] for row in rows],
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }}
figure {{ background: white; margin: 0; padding: .5rem }}
svg {{ height: auto; max-width: 100% }}
tr + tr td {{ border-top: 1px solid rgba(128, 128, 128, .3) }}
</style></head><body>
<h1>{title}</h1>
<figure><svg{curves}</figure>
{groups}
</body></html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write report.html of a run: its curves and a few of its groups.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run directories.")
    for run in parser.parse_args().runs:
        print(write_report(run))


if __name__ == "__main__":
    run_script(main)
