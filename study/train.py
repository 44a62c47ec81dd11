"""train_grpo.py or train_gtpo.py with the share of guesses as a metric.

Otherwise the run is that of the script.

python -m study.train train_gtpo.py --model tiny --dataset arithmetic --G 8
"""

import sys
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gtpo.arguments import GTPOArguments, Settings
from gtpo.cli.parse import find_backend, load_backend_of, parse, parse_evaluation, read_command_line
from gtpo.errors import UsageError
from gtpo.models.backend import check_backend
from gtpo.runs.script import run_script
from study import SETTINGS, Row
from study.bench import Base, Comparison
from study.comparison import made_differently


def with_measures(trainer: Any) -> Any:
    """A trainer that also logs ``guesses``, the percentage of completions that say "guess"."""

    class Measured(trainer):
        def _generate_and_score_completions(self, inputs: list[Row]) -> Row:
            batch = super()._generate_and_score_completions(inputs)
            ids = batch["completion_ids"]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            batch["is_guess"] = torch.tensor(["guess" in text for text in texts], device=ids.device)
            return batch

        @wraps(trainer.objective)  # the same tokens have a gradient
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Row) -> Any:
            loss, measured = super().objective(logps, token_entropy, inputs)
            guesses = 100 * inputs["is_guess"].float().mean()
            return loss, measured._replace(metrics={**(measured.metrics or {}), "guesses": guesses})

    return Measured


def check(comparison: Comparison) -> list[Base]:
    """Read all that the runs and evaluations will read, so that no mistake is found after hours of training.

    Returns:
        The bases, with the length of completions in training for those that have none for the evaluation.

    Raises:
        UsageError: For a base, arm, setting, reward, column or benchmark that cannot be used.
    """
    from gtpo.evaluation.arguments import EvaluationArguments
    from gtpo.evaluation.jobs import load_problems, select_benchmarks

    found = []
    given = sys.argv
    try:
        for base in comparison.bases:
            evaluation, _ = comparison.evaluations(base, [])
            flags, _ = parse_evaluation(EvaluationArguments, evaluation.flags)
            for name, source in select_benchmarks(flags).items():
                load_problems(name, source, flags)
            for arm in comparison.arms:
                [run] = comparison.runs(base, [arm], comparison.rates[:1], comparison.seeds[:1])
                words = run.argv[2 * base.with_measures :]  # without -m study.train
                sys.argv = ["study", *words, "--output_dir", str(run.run.path.with_name("checked"))]
                settings = main(only_read=True)
                stored = run.run.read_environment().get("made_from", {})
                if changed := made_differently(stored, settings.made_from, ["held_out"]):
                    what = f"{run.run.path} was made with another {', '.join(changed)}"
                    raise UsageError(f"{what}, which has changed since: name another --output_dir.")
            found.append(base._replace(max_new_tokens=base.max_new_tokens or settings.trainer.max_completion_length))
    finally:
        sys.argv = given
    return found


def main(only_read: bool = False) -> Settings:
    """Train; or only read what the command line names and check that the run can start."""
    method = sys.argv.pop(1)[6:10]  # of train_grpo.py or train_gtpo.py
    classes = (*SETTINGS, GTPOArguments) if method == "gtpo" else SETTINGS
    line = read_command_line(method)
    if only_read:
        check_backend(find_backend(line, classes))
    else:
        backend = load_backend_of(line, classes)
    from trl import GRPOConfig

    from gtpo import GRPOTrainer, GTPOTrainer
    from gtpo.data.load import load_rows
    from gtpo.grading.user_functions import load_rewards
    from gtpo.models.load import load_policy, load_tokenizer
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.hooks import load_objective
    from gtpo.training.loop import run
    from rewards import rewards_in

    trainer = GTPOTrainer if method == "gtpo" else GRPOTrainer
    kind, own_settings = load_objective(line.flags.get("objective"), trainer, (*classes, GRPOConfig))
    settings = parse(line, (*classes, *own_settings, GRPOConfig))
    rows, _ = load_rows(settings)
    rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), rows.column_names)
    checkpoint = check_run(settings, rows)
    if only_read:
        kind.check_settings(settings.trainer)
        load_tokenizer(settings.source, settings.prompt)
        return settings
    policy, tokenizer = load_policy(settings, backend, checkpoint)
    start_run(settings)
    options = {"settings": settings.settings, "processing_class": tokenizer, "train_dataset": rows}
    options["tags"] = settings.prompt.format_tags
    if method == "gtpo":
        options["gtpo"] = settings.gtpo
    measured = with_measures(kind)
    run(measured(policy, rewards, settings.trainer, **options), settings, checkpoint)
    return settings


if __name__ == "__main__":
    run_script(main)
