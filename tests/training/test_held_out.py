"""Held-out rows: which they are, their metrics, and that an evaluation leaves training as it was."""

import copy
import itertools
import math
import random
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from helpers.canned import batch_of, trained_weights
from helpers.files import tables_of, write_lines
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run
from helpers.scripts import ROOT
from helpers.settings import parsed
from helpers.weights import same_weights
from transformers import TrainerState, set_seed

from gtpo.arguments import Settings
from gtpo.data.load import hold_out, load_rows
from gtpo.reports.summary import find_problems, score_lines
from gtpo.runs.start import check_run, start_run
from gtpo.training.batch import isolated_rng
from gtpo.training.held_out import eval_batches
from gtpo.training.metrics_writer import MetricsWriter
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

TABLES = tables_of(__file__)

Values = dict[str, Any]


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


def reward_of_row(prompts: list[str], **kwargs: Any) -> list[float]:
    """What the prompt says; random numbers are drawn, as a reward may."""
    draw()
    return [float(prompt.split()[-1]) if "worth" in prompt else random.random() for prompt in prompts]


def rows_worth(*worth: float) -> Dataset:
    return Dataset.from_dict({"prompt": [f"A row of{' some' * i} worth {value}" for i, value in enumerate(worth)]})


HELD_OUT = rows_worth(1.0, 2.0, 4.0, 8.0, 16.0)
EVALUATING = {"held_out": 5, "eval_strategy": "steps", "eval_steps": 1}
EVALUATING |= {"per_device_eval_batch_size": 2, "num_generations_eval": 1}


@pytest.fixture
def make_sampling(build: Any) -> Any:
    """``make_sampling(method, evaluates=True, **settings)``: it samples, and evaluates HELD_OUT at every step."""

    def make(method: str, evaluates: bool = True, **settings: Any) -> Any:
        small = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6}
        trainer = build(method, rewards=[reward_of_row], **small | (EVALUATING if evaluates else {}) | settings)
        trainer.__class__ = {"gtpo": GTPOTrainer, "grpo": GRPOTrainer}[method]
        if evaluates:
            trainer.eval_dataset = HELD_OUT
        return trainer

    return make


# Settings


def settings(*argv: str, method: str = "gtpo") -> Settings:
    return parsed("--output_dir", "run", *argv, method=method)


def test_an_evaluation_has_random_numbers_of_its_own() -> None:
    set_seed(1)
    expected = draw()
    set_seed(1)
    drawn = []
    for seed in (3, 3, 4):
        with isolated_rng(seed, torch.device("cpu")):
            drawn.append(draw())
    assert draw() == expected
    assert drawn[0] == drawn[1] and not {*drawn[0]} & {*drawn[2]}


EVALUATED = ("--eval_rows", "9")
SIZES = (*EVALUATED, "--G", "4", "--per_device_train_batch_size", "4", "--num_generations_eval")


@pytest.mark.parametrize(
    ("method", "argv", "expected"),
    [
        (
            "gtpo",
            (*EVALUATED, "--G", "4", "--prompts_per_step", "3"),
            {
                "eval_strategy": "steps",
                "eval_steps": 0.1,
                "num_generations_eval": 1,
                "metric_for_best_model": "eval_accuracy",
                "greater_is_better": True,
                "per_device_eval_batch_size": 12,
                "per_device_train_batch_size": 12,
            },
        ),
        # whole groups
        ("gtpo", (*SIZES, "1"), {"per_device_eval_batch_size": 4}),
        ("gtpo", (*SIZES, "3"), {"per_device_eval_batch_size": 6}),
        ("gtpo", (*SIZES, "8"), {"per_device_eval_batch_size": 8}),
        # without accuracy
        ("gtpo", (*EVALUATED, "--reward", "format"), {"metric_for_best_model": "eval_reward"}),
        (
            "sft",
            (*EVALUATED, "--per_device_train_batch_size", "6"),
            {"metric_for_best_model": "eval_loss", "greater_is_better": False, "per_device_eval_batch_size": 6},
        ),
        # no rows
        ("gtpo", (), {"eval_strategy": "no", "eval_steps": None, "metric_for_best_model": None}),
        # the config.yaml of a run without them
        ("gtpo", ("--config", "config.yaml"), {"eval_strategy": "no"}),
        ("gtpo", ("--config", "config.yaml", *EVALUATED), {"eval_strategy": "steps"}),
    ],
)
def test_the_settings_of_an_evaluation_follow_from_others(
    method: str, argv: tuple[str, ...], expected: Values, here: Path
) -> None:
    (here / "config.yaml").write_text("eval_strategy: 'no'\nper_device_eval_batch_size: 8\n")
    trainer = settings(*argv, method=method).trainer
    assert {name: getattr(trainer, name) for name in expected} == expected


# Which rows


def test_every_row_is_held_out_or_trained_on() -> None:
    rows = Dataset.from_dict({"row": range(20)})
    rest, held_out = (list(part["row"]) for part in hold_out(rows, 5, seed=3))
    assert len(held_out) == 5 and sorted(rest + held_out) == list(range(20))
    assert rest == sorted(rest) and held_out == sorted(held_out)
    assert list(hold_out(rows, 5, seed=3)[1]["row"]) == held_out != list(hold_out(rows, 5, seed=4)[1]["row"])


def test_batches_have_whole_groups_each_row_counts_once() -> None:
    """All small cases: rows, G, batch size, processes."""
    for rows, group, batch, ranks in itertools.product(range(1, 10), (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4)):
        if batch * ranks % group:
            continue
        each = [eval_batches(rows, group, batch, ranks, rank) for rank in range(ranks)]
        weights = [0.0] * rows
        for parts in zip(*each, strict=True):
            indices, prompts = zip(*parts, strict=True)
            assert len({*map(len, indices)}) == len({*prompts}) == 1  # collectives need equal shares
            assert len(indices[0]) <= batch
            together = list(itertools.chain(*indices))  # in rank order
            for place in range(0, len(together), group):
                row = together[place]
                assert together[place : place + group] == [row] * group
                weights[row] += prompts[0] * group / len(together)
        assert weights == pytest.approx([1.0] * rows), (rows, group, batch, ranks)


def test_held_out_rows_are_training_rows_or_others() -> None:
    arithmetic = "--dataset", "arithmetic"
    every, none = load_rows(settings(*arithmetic))
    rows, held_out = load_rows(settings(*arithmetic, "--eval_rows", "10"))
    assert none is None and len(rows) == len(every) - 10 and len(held_out) == 10
    hard = "--eval_dataset", "arithmetic_hard", "--eval_rows", "10"
    rows, held_out = load_rows(settings(*arithmetic, "--limit", "2", *hard))
    assert (len(rows), len(held_out)) == (2, 10)
    assert held_out.column_names == rows.column_names == ["prompt", "answer", "solution"]
    with refused("--eval_split is 'train'"):
        load_rows(settings(*arithmetic, "--eval_dataset", "arithmetic", "--eval_split", "train"))


def test_a_file_of_held_out_rows(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"prompt": f"How many are {i} and 1?", "answer": str(i + 1)} for i in range(6)]
    write_lines(here / "a.jsonl", lines[:4])
    write_lines(here / "b.jsonl", [line | {"more": "x"} for line in lines[3:]])
    write_lines(here / "c.jsonl", [{"prompt": "What?"}])
    _, held_out = load_rows(settings("--dataset", "a.jsonl", "--eval_dataset", "b.jsonl"))
    assert list(held_out["answer"]) == ["4", "5", "6"]
    assert held_out.column_names == ["prompt", "answer"]  # what the rewards see in training
    assert caplog.messages == ["1 of 3 held-out prompts are also prompts of training rows"]
    caplog.clear()
    both = ("--dataset", "a.jsonl", "--eval_dataset", "b.jsonl")
    for flags, answers in (
        (("--limit", "1"), [["1"], ["4", "5", "6"]]),
        (("--eval_rows", "3"), [None, ["4", "5", "6"]]),
    ):
        found = load_rows(settings(*both, "--dry_run", *flags))
        expected = [answers[0] or ["1", "2", "3", "4"], answers[1]]
        assert [list(part["answer"]) for part in found] == expected  # --limit is for the training rows alone
    assert not caplog.messages  # in a plan
    rows, held_out = load_rows(settings(*both, "--eval_rows", "2"))
    assert len(rows) == 4 and len(held_out) == 2 and {*held_out["answer"]} < {"4", "5", "6"}
    with refused("--eval_rows is 4: expected fewer than the 3 rows"):
        load_rows(settings(*both, "--eval_rows", "4"))
    with refused("'answer'"):
        load_rows(settings("--dataset", "a.jsonl", "--eval_dataset", "c.jsonl"))


# Metrics


def test_a_metric_is_the_mean_over_the_rows(make_sampling: Any) -> None:
    """Five rows in batches of two: a mean of the batches' means would be (1.5 + 6 + 16) / 3."""
    trainer = make_sampling("gtpo")
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_rewards/reward_of_row/mean"] == 31 / 5
    assert math.isfinite(metrics["eval_loss"]) and metrics["eval_completion_length"] <= 6
    of_groups = {"eval_conflict_tokens", "eval_frac_reward_zero_std"}
    assert of_groups.isdisjoint(metrics) and metrics["eval_num_tokens"] == 0  # that of training, as TRL's
    trainer.num_generations_eval = 2
    others = trainer.evaluate(rows_worth(3.0))
    assert of_groups <= others.keys() and others["eval_reward"] == 3.0
    batches = [rows for rows, _ in trainer.get_eval_dataloader()]  # by default of the trainer's rows, each twice
    assert [row["prompt"] for row in itertools.chain(*batches)] == [
        prompt for prompt in HELD_OUT["prompt"] for _ in "12"
    ]


def test_each_process_draws_numbers_of_its_own(make_sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_sampling("grpo")
    monkeypatch.setattr(trl.GRPOTrainer, "evaluate", lambda *_: draw())
    drawn = []
    for rank in (0, 1, 0):
        trainer.accelerator = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
        drawn.append(trainer.evaluate())
    assert drawn[0] == drawn[2] != drawn[1]


# Training beside an evaluation


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"eval_on_start": True}, {"num_iterations": 2}], ids=["", "start", "2-iter"])
@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_training_is_the_same_with_and_without_evaluation(method: str, settings: Values, make_sampling: Any) -> None:
    weights = []
    logs = []
    for evaluates in (False, True):
        more = {"max_steps": 4, "gtpo": {"initial_entropy": None}} | (settings if evaluates else {})
        more |= {"num_iterations": settings.get("num_iterations", 1)}
        trainer = make_sampling(method, evaluates, name=str(evaluates), **more)
        weights.append(trained_weights(trainer))
        logs.append([row for row in trainer.state.log_history if "reward" in row])
        evaluations = [row for row in trainer.state.log_history if "eval_reward" in row]
        assert len(evaluations) == (4 + ("eval_on_start" in settings) if evaluates else 0)
    assert same_weights(*weights)
    for plain, beside in zip(*logs, strict=True):
        assert plain.pop("step_time") > 0 and beside.pop("step_time") > 0
        assert plain == beside


def test_an_evaluation_leaves_the_table(make_sampling: Any) -> None:
    trainer = make_sampling("grpo", log_completions=True)
    batch_of(trainer, size=4)
    table = copy.deepcopy(trainer._logs)
    assert len(table["completion"]) == len(table["extra"]["cut_off"]) == 4
    trainer.evaluate()
    assert trainer._logs == table and trainer.log_completions


@pytest.mark.parametrize(("method", "beta"), [("gtpo", 0.0), ("grpo", 0.04)])
def test_every_name_that_a_run_logs_is_explained(method: str, beta: float, make_sampling: Any) -> None:
    """In docs/metrics.md; our script adds tokens_per_second, and rewards.py what it logs."""
    trainer = make_sampling(method, beta=beta)
    trainer.train()
    *rows, _ = trainer.state.log_history
    logged = {name.removeprefix("eval_").replace("reward_of_row", "format_reward") for row in rows for name in row}
    explained = set(re.findall(r"`(?:eval_)?([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert logged <= explained, logged - explained
    assert {"step", "samples_per_second", "rewards/format_reward/mean", "conflict_tokens"} <= logged
    assert {"tokens_per_second", "conflict_fraction"} <= explained


# Resume


@pytest.mark.parametrize(("before", "flags", "is_kept"), TABLES["a_resumed_run_keeps_its_held_out_rows"])
def test_a_resumed_run_keeps_its_held_out_rows(before: str, flags: str, is_kept: bool, here: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(100)]
    write_lines(here / "rows.jsonl", rows)
    started = settings("--dataset", "rows.jsonl", "--max_steps", "10", *before.split())
    check_run(started, *load_rows(started))
    start_run(started)
    newest = checkpoint(Path("run"), 2)
    with nullcontext() if is_kept else refused(flags.split()[0]):
        given = settings("--resume", *flags.split())
        assert check_run(given, *load_rows(given)) == str(newest)


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path: Path) -> None:
    for step, evaluates in ((0, True), (2, False)):
        arguments = SimpleNamespace(eval_on_start=True)
        MetricsWriter(fake_run(tmp_path)).on_train_begin(arguments, TrainerState(global_step=step), None)
        assert arguments.eval_on_start is evaluates


# Readers of metrics.jsonl


ROWS: list[Values] = [
    {"step": step, "accuracy": 10.0 * step, "formatting": 50.0, "completions/clipped_ratio": 1.0 if step > 4 else 0.0}
    for step in range(1, 9)
]
EVALUATIONS: list[Values] = [
    {"step": step, "eval_accuracy": 5.0 * step, "eval_rewards/mine/mean": 1.0, "eval_runtime": 2.0}
    for step in (4, 6, 8)
]
BOTH = sorted([*ROWS, *EVALUATIONS], key=lambda row: row["step"])


def test_held_out_rows_do_not_enter_training_scores() -> None:
    of_training, of_held_out = score_lines(BOTH)
    assert [of_training] == score_lines(ROWS)
    assert find_problems(BOTH, 64) == find_problems(ROWS, 64)
    assert of_held_out == "Held-out rows, steps 4 to 8: accuracy 20.0 -> 40.0 %, mine 1 -> 1"
