"""What token weights do to tokens that rewarded and penalized completions share: the figure of docs/method.md.

    python benchmarks/conflict_push_figure.py outputs/RUN --output push.png

Every group of the run's completion tables is evaluated under each objective, the run's own among them. The tables have
text: the run's tokenizer encodes it again, and the end token follows unless the completion was cut off.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtpo.errors import UsageError
from gtpo.reports.curves import grid
from gtpo.runs.directory import RunDirectory, run_of
from gtpo.runs.script import run_script
from gtpo.training.diagnosis import conflict_push, token_weights
from gtpo_loss import conflict_spans, conflict_weights

OBJECTIVES = {  # name -> loss_type, and whether lambda applies
    "GRPO": ("grpo", False),
    "Dr. GRPO": ("dr_grpo", False),
    "DAPO": ("dapo", False),
    "GTPO": ("grpo", True),
    "GTPO,\ndr_grpo": ("dr_grpo", True),
}
PANELS = {"common": "tokens that the whole group shares", "anchored": "all conflict tokens"}  # conflict span -> title


def relative_pushes(
    ids: Tensor, mask: Tensor, advantages: Tensor, max_completion_length: int, span: str
) -> dict[str, float]:
    """Push on the conflict tokens of one group over the same with |A_i|: 1 raises with all weight, -1 lowers.

    Args:
        ids, mask: Token ids of the group and 1 on its tokens. Shape (G, T).
        advantages: A_i. Shape (G,).
        max_completion_length: T_max of dr_grpo.
        span: As for :func:`gtpo_loss.conflict_spans`.

    Returns:
        Objective -> value; empty without conflict tokens.
    """
    runs = conflict_spans(ids, mask, advantages, len(ids), span)
    either = runs[0] | runs[1]
    if not either.any():
        return {}
    weights, values = conflict_weights(either, advantages), {}
    for name, (loss_type, corrected) in OBJECTIVES.items():
        each = token_weights(mask, loss_type, max_completion_length)
        pushes = conflict_push(ids, mask, runs, each * advantages, weights, len(ids))
        size, _ = conflict_push(ids, mask, runs, each * advantages.abs(), weights, len(ids))
        values[name] = (pushes[corrected] / size)[0].item()
    return values


def groups_of(run: RunDirectory) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, mask and advantages of every stored group of a run.

    Raises:
        UsageError: If the run has no tokenizer.
    """
    from pyarrow.parquet import read_table
    from transformers import AutoTokenizer

    saved = [path for path in (run.adapter, run.model) if (path / "tokenizer_config.json").is_file()]
    if not saved:
        raise UsageError(f"{run.path} has no tokenizer in adapter/ or model/: name a finished run.")
    tokenizer = AutoTokenizer.from_pretrained(saved[0], trust_remote_code=False)
    size = run.read_config()["num_generations"]
    for path in run.completion_tables():
        rows = read_table(path).to_pylist()
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            texts = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in group]
            ends = [[] if row.get("cut_off") else [tokenizer.eos_token_id] for row in group]
            tokens = [torch.tensor(text + end) for text, end in zip(texts, ends, strict=True)]
            pad = torch.nn.utils.rnn.pad_sequence
            ids, mask = (pad(part, batch_first=True) for part in (tokens, [torch.ones_like(row) for row in tokens]))
            yield ids, mask, torch.tensor([row["advantage"] for row in group])


def draw_push(run_directory: str, output: str) -> str:
    """Write the figure: one box per objective over the groups of a run, for each panel.

    Raises:
        UsageError: If the run has no completions, no tokenizer, or no group with conflict tokens.
    """
    run = run_of(run_directory)
    if not run.completion_tables():
        raise UsageError(f"{run_directory} has no completions/: name a run of train_gtpo.py or train_grpo.py.")
    longest, groups = run.read_config()["max_completion_length"], list(groups_of(run))
    figure, axes = grid(1, len(PANELS))
    for axis, (span, title) in zip(axes[0], PANELS.items(), strict=True):
        values = [found for group in groups if (found := relative_pushes(*group, longest, span))]
        if not values:
            raise UsageError(f"{run_directory} has no group with conflict tokens.")
        _boxes(axis, values)
        axis.set_title(f"{title}\n({len(values)} groups)", fontsize=9)
    axes[0][0].set_ylabel("push / push with |A|")
    figure.savefig(output, dpi=150)
    return output


def _boxes(axis: Any, values: list[dict[str, float]]) -> None:
    columns = [[found[name] for found in values] for name in OBJECTIVES]
    axis.axhline(0, color="black", linewidth=1)
    axis.boxplot(columns, whis=(5, 95), showfliers=False, medianprops={"color": "#D55E00", "linewidth": 2})
    axis.set_xticks(range(1, len(OBJECTIVES) + 1), list(OBJECTIVES), fontsize=8)
    axis.set_ylim(-1.1, 1.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Draw the push on shared tokens under GRPO, Dr. GRPO, DAPO and GTPO, on the groups of a run.",
    )
    parser.add_argument("run", metavar="RUN", help="Run directory of train_gtpo.py or train_grpo.py.")
    parser.add_argument("--output", default="push.png", help="Path of the figure [push.png].")
    flags = parser.parse_args()
    Path(flags.output).parent.mkdir(parents=True, exist_ok=True)
    print(draw_push(flags.run, flags.output))


if __name__ == "__main__":
    run_script(main)
