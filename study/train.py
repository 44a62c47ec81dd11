"""train_grpo.py or train_gtpo.py with ln pi of the tags and the share of guesses as metrics.

Otherwise the run is that of the script.

python -m study.train train_gtpo.py --model tiny --dataset arithmetic --G 8
"""

import sys
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gtpo.arguments import GTPOArguments
from gtpo.cli.parse import load_backend_from_flags, parse
from gtpo.runs.script import run_script
from study import SETTINGS, Row, Words
from study.tags import TAG_METRICS, tag_logps, tag_spans


def with_measures(trainer: Any, tags: Words) -> Any:
    """A trainer that also logs ln pi of each tag, and ``guesses``, the percentage of completions that say "guess"."""

    class Measured(trainer):
        def _generate_and_score_completions(self, inputs: list[Row]) -> Row:
            batch = super()._generate_and_score_completions(inputs)
            batch["tag_spans"] = tag_spans(self._tokenizer, batch["completion_ids"], batch["completion_mask"], tags)
            texts = self._tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
            batch["is_guess"] = torch.tensor(["guess" in text for text in texts], device=batch["tag_spans"].device)
            return batch

        @wraps(trainer.objective)  # the same tokens have a gradient
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Row) -> Any:
            loss, measured = super().objective(logps, token_entropy, inputs)
            found = tag_logps(inputs["tag_spans"], inputs["completion_mask"], logps.detach())
            of_tags = dict(zip(TAG_METRICS, found, strict=True))
            guesses = 100 * inputs["is_guess"].float().mean()
            return loss, measured._replace(metrics={**(measured.metrics or {}), **of_tags, "guesses": guesses})

    return Measured


def main() -> None:
    method = sys.argv.pop(1)[6:10]  # of train_grpo.py or train_gtpo.py
    classes = (*SETTINGS, GTPOArguments) if method == "gtpo" else SETTINGS
    backend = load_backend_from_flags(method, classes)
    from trl import GRPOConfig

    from gtpo import GRPOTrainer, GTPOTrainer
    from gtpo.data.load import load_rows
    from gtpo.grading.user_functions import load_rewards
    from gtpo.models.load import load_policy
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from gtpo.training.objective import load_objective
    from rewards import rewards_in

    trainer = GTPOTrainer if method == "gtpo" else GRPOTrainer
    kind, own_settings = load_objective(trainer, (*classes, GRPOConfig))
    settings = parse(method, (*classes, *own_settings, GRPOConfig))
    rows, _ = load_rows(settings)
    rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), rows.column_names)
    checkpoint = check_run(settings, rows)
    policy, tokenizer = load_policy(settings, backend)
    start_run(settings)
    options = {"settings": settings.settings, "processing_class": tokenizer, "train_dataset": rows}
    if method == "gtpo":
        options["gtpo"] = settings.gtpo
    measured = with_measures(kind, settings.prompt.format_tags)
    run(measured(policy, rewards, settings.trainer, **options), settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
