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
from helpers import canned
from helpers.canned import batch_of, trained_weights
from helpers.files import read_json, tables_of, write_lines
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run, rows_of
from helpers.scripts import ROOT
from helpers.settings import parsed
from helpers.weights import same_weights
from transformers import TrainerState

from gtpo.arguments import DataArguments, ModelArguments, RunArguments, Settings
from gtpo.data.load import hold_out, load_rows, load_train
from gtpo.reports.summary import find_problems, held_out_text, scores
from gtpo.runs.directory import RunDirectory
from gtpo.runs.start import check_run, start_run
from gtpo.training.batch import isolated_rng
from gtpo.training.held_out import eval_batches
from gtpo.training.metrics_writer import MetricsWriter
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

TABLES = tables_of(__file__)

Values = dict[str, Any]

WORTH = [1.0, 2.0, 4.0, 8.0, 16.0]  # reward of the held-out rows


def reward_of_row(prompts: list[str], **kwargs: Any) -> list[float]:
    """What the prompt says; random numbers are drawn, as a reward may."""
    random.random(), np.random.random(), torch.rand(1)
    return [float(prompt.split()[-1]) if "worth" in prompt else random.random() for prompt in prompts]


def rows_worth(worth: list[float]) -> Dataset:
    return Dataset.from_dict({"prompt": [f"A row of{' some' * i} worth {value}" for i, value in enumerate(worth)]})


@pytest.fixture
def make_sampling(build: Any) -> Any:
    """``make_sampling(method, held_out, name="", **settings)``: it samples, and evaluates these rows at every step."""

    def make(method: str, held_out: Dataset | None, **settings: Any) -> Any:
        settings = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6} | settings
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(canned.TRAINERS, method, {"gtpo": GTPOTrainer, "grpo": GRPOTrainer}[method])
            trainer = build(method, **settings)
        trainer.reward_funcs = [reward_of_row]
        trainer.reward_func_names = ["reward_of_row"]
        if held_out is not None:
            trainer.eval_dataset = held_out
            trainer.args.eval_strategy = "steps"
            trainer.args.eval_steps = 1
            trainer.args.per_device_eval_batch_size = 2
            trainer.num_generations_eval = 1
        return trainer

    return make


def evaluations(trainer: Any) -> list[Values]:
    return [row for row in trainer.state.log_history if "eval_reward" in row]


# Settings


def settings(*argv: str, method: str = "gtpo") -> Settings:
    return parsed("--output_dir", "run", *argv, method=method)


def test_the_limit_does_not_cut_held_out_rows(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(f'{{"prompt": "{i} + 1?", "answer": {i + 1}}}\n' for i in range(3)))
    rows, held_out = load_rows(settings("--dataset", "arithmetic", "--limit", "2", "--eval_dataset", str(path)))
    assert held_out is not None and (len(rows), len(held_out)) == (2, 3)


def test_an_evaluation_has_random_numbers_of_its_own() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.random()), torch.rand(1).item()

    def isolated(seed: int) -> tuple[float, ...]:
        with isolated_rng(seed, torch.device("cpu")):
            return draw()

    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    drawn = [isolated(seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] and all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


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
        ("gtpo", (*SIZES, "2"), {"per_device_eval_batch_size": 4}),
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
    rows = Dataset.from_dict({"prompt": [f"Row {i}" for i in range(20)]})
    rest, held_out = (part["prompt"] for part in hold_out(rows, 5, seed=3))
    assert len(held_out) == 5 and sorted([*rest, *held_out]) == sorted(rows["prompt"])
    assert all(list(part) == sorted(part, key=rows["prompt"].index) for part in (rest, held_out))  # order of the rows
    assert list(hold_out(rows, 5, seed=3)[1]["prompt"]) == list(held_out)
    assert list(hold_out(rows, 5, seed=4)[1]["prompt"]) != list(held_out)


def test_batches_have_whole_groups_each_row_counts_once() -> None:
    """All small cases: rows, G, batch size, processes."""
    for rows, group, batch, ranks in itertools.product(range(1, 10), (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4)):
        if batch * ranks % group:
            continue
        each = [eval_batches(rows, group, batch, ranks, rank) for rank in range(ranks)]
        weights = [0.0] * rows
        for parts in zip(*each, strict=True):
            assert len({len(indices) for indices, _ in parts}) == 1  # collectives need equal shares
            assert len({prompts for _, prompts in parts}) == 1
            assert len(parts[0][0]) <= batch
            together = [row for indices, _ in parts for row in indices]  # in rank order
            groups = [together[i : i + group] for i in range(0, len(together), group)]
            assert all(len(set(one)) == 1 and len(one) == group for one in groups)
            for one in groups:
                weights[one[0]] += parts[0][1] / len(groups)
        assert weights == pytest.approx([1.0] * rows), (rows, group, batch, ranks)


def settings_for(data: DataArguments, seed: int = 0) -> Settings:
    return Settings("gtpo", data, ModelArguments(), RunArguments(), trainer=SimpleNamespace(seed=seed))


def test_held_out_rows_are_training_rows_or_others(tmp_path: Path) -> None:
    every = load_train(DataArguments("arithmetic"), seed=7)
    rows, held_out = load_rows(settings_for(DataArguments("arithmetic", eval_rows=10), seed=7))
    assert held_out is not None and len(rows) == len(every) - 10 and len(held_out) == 10
    chosen = {str(prompt) for prompt in held_out["prompt"]}
    assert [p for p in every["prompt"] if str(p) not in chosen] == list(rows["prompt"])
    rows, held_out = load_rows(
        settings_for(DataArguments("arithmetic", eval_dataset="arithmetic_hard", eval_rows=10), seed=7)
    )
    assert held_out is not None and len(rows) == len(every) and len(held_out) == 10
    assert held_out.column_names == rows.column_names == ["prompt", "answer", "solution"]
    assert load_rows(settings_for(DataArguments("arithmetic"), seed=7))[1] is None
    with refused("--eval_split is 'train'"):
        load_rows(settings_for(DataArguments("arithmetic", eval_dataset="arithmetic", eval_split="train"), seed=7))


def test_a_file_of_held_out_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"prompt": f"How many are {i} and 1?", "answer": str(i + 1), "more": "x"} for i in range(6)]
    for name, part, columns in (("a", lines[:4], ("prompt", "answer")), ("b", lines[3:], ("prompt", "answer", "more"))):
        rows = [{column: row[column] for column in columns} for row in part]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "c.jsonl").write_text('{"prompt": "What?"}\n')
    own = DataArguments(str(tmp_path / "a.jsonl"), eval_dataset=str(tmp_path / "b.jsonl"))
    rows, held_out = load_rows(settings_for(own))
    assert held_out is not None and list(held_out["answer"]) == ["4", "5", "6"]
    assert held_out.column_names == ["prompt", "answer"]  # what the rewards see in training
    assert caplog.messages == ["1 of 3 held-out prompts are also prompts of training rows"]
    with refused("'answer'"):
        load_rows(settings("--dataset", str(tmp_path / "a.jsonl"), "--eval_dataset", str(tmp_path / "c.jsonl")))


# Metrics


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_metric_is_the_mean_over_the_rows(method: str, make_sampling: Any) -> None:
    """Five rows in batches of two: a mean of the batches' means would be (1.5 + 6 + 16) / 3."""
    trainer = make_sampling(method, rows_worth(WORTH))
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_rewards/reward_of_row/mean"] == sum(WORTH) / 5
    assert math.isfinite(metrics["eval_loss"]) and metrics["eval_completion_length"] <= 6
    of_groups = {"eval_conflict_tokens", "eval_frac_reward_zero_std"}
    assert of_groups.isdisjoint(metrics) and metrics["eval_num_tokens"] == 0  # that of training, as TRL's
    trainer.num_generations_eval = 2
    others = trainer.evaluate(rows_worth([3.0]))
    assert of_groups <= others.keys() and others["eval_reward"] == 3.0


def test_each_process_draws_numbers_of_its_own(make_sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_sampling("grpo", rows_worth(WORTH))
    monkeypatch.setattr(trl.GRPOTrainer, "evaluate", lambda self, *_: {"drawn": torch.rand(1).item()})
    drawn = []
    for rank in (0, 1, 0):
        trainer.accelerator = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
        drawn.append(trainer.evaluate()["drawn"])
    assert drawn[0] == drawn[2] != drawn[1]


# Training beside an evaluation


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"eval_on_start": True}, {"num_iterations": 2}], ids=["", "start", "2-iter"])
@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_training_is_the_same_with_and_without_evaluation(method: str, settings: Values, make_sampling: Any) -> None:
    weights = []
    logs = []
    for held_out in (None, rows_worth(WORTH)):
        more = {"max_steps": 4, "gtpo": {"initial_entropy": None}} | (settings if held_out else {})
        more |= {"num_iterations": settings.get("num_iterations", 1)}
        trainer = make_sampling(method, held_out, name=str(held_out is None), **more)
        weights.append(trained_weights(trainer))
        logs.append([row for row in trainer.state.log_history if "reward" in row])
        assert len(evaluations(trainer)) == (0 if held_out is None else 4 + ("eval_on_start" in settings))
    assert same_weights(*weights)
    for plain, beside in zip(*logs, strict=True):
        assert plain.pop("step_time") > 0 and beside.pop("step_time") > 0
        assert plain == beside


def test_an_evaluation_leaves_the_table_of_the_step(make_sampling: Any) -> None:
    trainer = make_sampling("grpo", rows_worth(WORTH), log_completions=True)
    batch_of(trainer, size=4)
    before = copy.deepcopy(trainer._logs)
    assert len(before["completion"]) == len(before["extra"]["cut_off"]) == 4
    trainer.evaluate()
    assert trainer._logs == before


def test_each_evaluation_stores_the_last_rows_completion(make_sampling: Any, tmp_path: Path) -> None:
    """The last row is worth 16; equal weights and random numbers give an equal completion."""
    trainer = make_sampling("grpo", rows_worth(WORTH), log_completions=True)
    for step in (0, 7):
        trainer.state.global_step = step
        trainer.evaluate()
    first, second = (read_json(path) for path in sorted((tmp_path / "completions").glob("held_out_*.json")))
    assert (first.pop("step"), second.pop("step")) == (0, 7) and first == second
    assert first["prompt"].endswith("worth 16.0") and first["rewards"] == {"reward_of_row": 16.0}
    assert isinstance(first["completion"], str) and first.keys() == {"prompt", "completion", "rewards"}
    silent = make_sampling("grpo", rows_worth(WORTH), name="silent", log_completions=False)
    silent.evaluate()
    assert not (tmp_path / "silent" / "completions").exists()


@pytest.mark.parametrize(("method", "more"), [("gtpo", {}), ("grpo", {"beta": 0.04})])
def test_every_name_that_a_run_logs_is_explained(method: str, more: Values, make_sampling: Any) -> None:
    """In docs/metrics.md; our script adds tokens_per_second, and rewards.py what it logs."""
    trainer = make_sampling(method, rows_worth(WORTH), max_steps=1, **more)
    trained_weights(trainer)
    logged = {
        name.removeprefix("eval_") for row in trainer.state.log_history for name in row if "train_loss" not in row
    }
    explained = set(re.findall(r"`(?:eval_)?([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert {name.replace("reward_of_row", "format_reward") for name in logged} - explained == set()
    assert {"step", "samples_per_second", "rewards/reward_of_row/mean", "conflict_tokens"} <= logged
    assert {"tokens_per_second", "conflict_fraction"} <= explained


def test_the_initial_entropy_has_its_own_random_numbers(make_sampling: Any) -> None:
    """Measured within an evaluation it is the same as before training."""
    trainer = make_sampling("gtpo", None, gtpo={"initial_entropy": None})
    rows = list(trainer.train_dataset)
    measured = trainer.initial_entropy.sampled_entropies(rows)
    state = torch.random.get_rng_state()
    with isolated_rng(5, torch.device("cpu")):
        assert trainer.initial_entropy.sampled_entropies(rows) == measured
    assert torch.equal(torch.random.get_rng_state(), state)


# Resume


def chosen_rows(given: Any) -> tuple[list[Values], list[Values] | None]:
    """Training and held-out rows as settings choose them."""
    rows = rows_of(100)
    if given.data.eval_dataset:
        return rows, [{"prompt": given.data.eval_dataset}]
    if given.data.eval_rows:
        first = given.trainer.seed % 50
        last = first + given.data.eval_rows
        return rows[:first] + rows[last:], rows[first:last]
    return rows, None


@pytest.mark.parametrize(
    ("before", "flags", "is_kept"),
    TABLES["a_resumed_run_keeps_its_held_out_rows"],
)
def test_a_resumed_run_keeps_its_held_out_rows(before: str, flags: str, is_kept: bool, tmp_path: Path) -> None:
    started = settings("--output_dir", str(tmp_path), "--max_steps", "10", *before.split())
    check_run(started, *chosen_rows(started))
    start_run(started)
    newest = checkpoint(tmp_path, 2)
    with nullcontext() if is_kept else refused(flags.split()[0]):
        given = settings("--output_dir", str(tmp_path), "--resume", *flags.split())
        assert check_run(given, *chosen_rows(given)) == str(newest)


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path: Path) -> None:
    line = {"step": 2, "eval_reward": 1.0, "eval_runtime": 1.0}
    run = fake_run(tmp_path, rows=[line])
    arguments = SimpleNamespace(eval_on_start=True)
    MetricsWriter(run).on_train_begin(arguments, TrainerState(global_step=2, log_history=[line]), None)
    assert not arguments.eval_on_start and len(run.read_metrics()) == 1
    arguments.eval_on_start = True
    MetricsWriter(RunDirectory(tmp_path / "new")).on_train_begin(arguments, TrainerState(), None)
    assert arguments.eval_on_start


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
    assert scores(BOTH) == scores(ROWS) and scores(BOTH[:8]) == scores([row for row in BOTH[:8] if row in ROWS])
    assert find_problems(BOTH, 64) == find_problems(ROWS, 64)
    assert held_out_text(BOTH, {}) == "Held-out rows, steps 4 to 8: accuracy 20.0 -> 40.0 %, mine 1 -> 1"
    best = {"eval_accuracy": 40.0, "step": 8}
    assert str(held_out_text(BOTH, best)).endswith("mine 1 -> 1; best/ has eval_accuracy 40 of step 8")
    assert held_out_text(BOTH, {"accuracy": 40.0, "step": 8}) == held_out_text(BOTH, {})
    assert held_out_text(ROWS, {}) is None
