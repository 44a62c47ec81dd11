"""train_grpo.py or train_gtpo.py with the share of guesses as a metric.

Otherwise the run is that of the script.

python -m study.train train_gtpo.py --model tiny --dataset arithmetic --G 8
"""

import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gtpo.arguments import GTPOArguments, Settings
from gtpo.cli.parse import (
    CommandLine,
    find_backend,
    load_backend_of,
    parse,
    parse_evaluation,
    read_command_line,
)
from gtpo.errors import UsageError
from gtpo.models.backend import check_backend
from gtpo.runs.script import run_script
from paper.matrix import Experiment
from study import SETTINGS, Row, Words
from study.comparison import Base, Comparison
from study.pairs import made_differently

SCRIPTS = {"train_grpo.py": ("grpo", SETTINGS), "train_gtpo.py": ("gtpo", (*SETTINGS, GTPOArguments))}


def with_measures(trainer: Any) -> Any:
    """A trainer that also logs ``guesses``, the percentage of completions that say "guess"."""

    class WithGuesses(trainer):
        def _generate_and_score_completions(self, inputs: list[Row]) -> Row:
            batch = super()._generate_and_score_completions(inputs)
            ids = batch["completion_ids"]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            batch["is_guess"] = torch.tensor(["guess" in text for text in texts], device=ids.device)  # (B,)
            return batch

        @wraps(trainer.objective)  # the same tokens have a gradient
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Row) -> Any:
            loss, measured = super().objective(logps, token_entropy, inputs)
            guesses = 100 * inputs["is_guess"].float().mean()
            return loss, measured._replace(metrics={**(measured.metrics or {}), "guesses": guesses})

    return WithGuesses


def check(comparison: Comparison) -> list[Base]:
    """Read all that the runs and evaluations will read, so that no mistake is found after hours of training.

    Returns:
        The bases, with the length of completions in training for those that have none for the evaluation.

    Raises:
        UsageError: For a base, arm, setting, reward, column or benchmark that cannot be used.
    """
    from gtpo.evaluation.arguments import EvaluationArguments
    from gtpo.evaluation.benchmarks import select_benchmarks

    found = []
    for base in comparison.bases:
        evaluation, _ = comparison.evaluations(base, [])
        flags, _ = parse_evaluation(EvaluationArguments, evaluation.flags)
        for benchmark in select_benchmarks(flags):
            benchmark.load()
        seeds = [*dict.fromkeys([*comparison.seeds, *comparison.rate_seeds])]
        for arm in comparison.arms:
            runs = comparison.runs(base, [arm], comparison.rates, seeds)
            settings = _read(runs[0])
            for run in runs:
                _check_made_from(run, settings.made_from)
        found.append(base._replace(max_new_tokens=base.max_new_tokens or settings.trainer.max_completion_length))
    return found


def check_runs(runs: Sequence[Experiment]) -> None:
    """UsageError or ArgumentError where the settings of an arm are those of another revision; the first run tells."""
    for run in {run.name: run for run in reversed(runs)}.values():
        _settings(run)


def _check_made_from(run: Experiment, now: Row) -> None:
    """UsageError if a run that is there was made from other rows or files; ``now``: hashes, of any seed of its arm."""
    stored = run.run.read_environment().get("made_from", {})
    if made_differently(stored, now, ["held_out"]):  # a seed may have rows of its own
        now = _read(run).made_from
    if changed := made_differently(stored, now, ["held_out"]):
        what = f"{run.directory} was made with another {', '.join(changed)}"
        raise UsageError(f"{what}, which has changed since: name another --output_dir.")


def _read(run: Experiment) -> Settings:
    """The settings of a run that could start: all that it reads but the model is read."""
    kind, settings = _settings(run)
    from gtpo.models.load import load_tokenizer
    from gtpo.training.loop import read_data
    from rewards import rewards_in

    data = read_data(kind, settings, rewards_in)
    data.fitting(load_tokenizer(settings.source, settings.prompt), settings)
    return settings


def _settings(run: Experiment) -> tuple[Any, Settings]:
    """The trainer class and the settings of a run, on a backend that is there."""
    script, *words = run.argv[2 * (run.argv[0] == "-m") :]  # without -m study.train
    line = line_of(script, [*words, "--output_dir", str(run.directory.with_name("checked"))])
    check_backend(find_backend(line))
    return parse_line(line)


def line_of(script: str, words: Words) -> CommandLine:
    """A command line of train_grpo.py or train_gtpo.py."""
    if script not in SCRIPTS:
        raise UsageError(f"python -m study.train {script}: name {' or '.join(SCRIPTS)} first.")
    return read_command_line(*SCRIPTS[script], words)


def parse_line(line: CommandLine) -> tuple[Any, Settings]:
    """The trainer class of a command line, and its settings."""
    from trl import GRPOConfig

    from gtpo import GRPOTrainer, GTPOTrainer
    from gtpo.training.hooks import load_objective

    trainer = GTPOTrainer if line.method == "gtpo" else GRPOTrainer
    kind, own = load_objective(line.objective, trainer, (*line.classes, GRPOConfig))
    return kind, parse(line, (*own, GRPOConfig))


def main() -> None:
    script = "".join(sys.argv[1:2])
    line = line_of(script, sys.argv[2:])
    backend = load_backend_of(line)  # before trl, transformers and peft: Unsloth patches them
    kind, settings = parse_line(line)
    from gtpo.training.loop import train_policy
    from rewards import rewards_in

    own: Row = {"settings": settings.settings}
    if line.method == "gtpo":
        own = {"gtpo": settings.gtpo, "tags": settings.prompt.format_tags}
    train_policy(with_measures(kind), settings, backend, rewards_in, own)


if __name__ == "__main__":
    run_script(main)
