"""What a run says at its start, while something goes wrong, and at its end."""

import json
import logging
import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, PromptArguments, RunArguments, Settings
from gtpo.cli.parse import parse
from gtpo.reports.summary import (
    PROBLEM_STEPS,
    RunMessages,
    end_lines,
    find_problems,
    initial_entropy_text,
    scores,
    start_lines,
)
from gtpo.runs.directory import RunDirectory

CLASSES = (DataArguments, PromptArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig)


def settings_of(directory: Path, *argv: str) -> Settings:
    words = ["--output_dir", str(directory), "--model", "tiny", "--dataset", "arithmetic", *argv]
    return parse("gtpo", CLASSES, words)


def row(step: int, **metrics: Any) -> dict[str, Any]:
    good = {"rewards/a/mean": 1.0, "rewards/a/std": 0.5, "completions/clipped_ratio": 0.25}
    return {"step": step} | good | {key.replace("__", "/"): value for key, value in metrics.items()}


# ---- scores ----


def test_scores_are_means_of_the_first_and_last_ten_rows() -> None:
    rows = [{"step": step, "accuracy": float(step), "formatting": 50.0} for step in range(1, 31)]
    assert [str(score) for score in scores(rows)] == [
        "accuracy 5.5 -> 25.5 %",
        "formatting 50.0 -> 50.0 %",
    ]


def test_a_run_shorter_than_twenty_rows_compares_its_halves() -> None:
    rows = [{"step": step, "accuracy": value} for step, value in enumerate((10.0, 20.0, 30.0, 60.0, 80.0), 1)]
    assert [(score.first, score.last) for score in scores(rows)] == [(15.0, 70.0)]
    assert [(score.first, score.last) for score in scores(rows[:1])] == [(10.0, 10.0)]


def test_own_rewards_are_shown_and_the_paper_s_are_not_repeated() -> None:
    names = ("rewards/accuracy_reward/mean", "rewards/format_reward/mean", "rewards/mine/mean")
    rows = [{"step": 1, "accuracy": 10.0, "loss": 3.0} | dict.fromkeys(names, 2.0)]
    assert [score.name for score in scores(rows)] == ["accuracy", "mine"]


def test_supervised_fine_tuning_shows_token_accuracy_and_loss() -> None:
    rows = [{"step": 1, "loss": 0.5, "mean_token_accuracy": 0.25}, {"step": 2, "loss": 0.25, "mean_token_accuracy": 1}]
    assert [str(score) for score in scores(rows)] == ["token accuracy 25.0 -> 100.0 %", "loss 0.5 -> 0.25"]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "x"])
def test_values_that_are_no_numbers_do_not_count(bad: Any) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "accuracy": bad}, {"step": 2}, {"step": 3, "accuracy": 30.0}]
    assert [(score.first, score.last) for score in scores(rows)] == [(30.0, 30.0)]
    assert scores(rows[:2]) == []


# ---- problems ----


def test_no_problem_in_a_good_run() -> None:
    assert find_problems([row(step) for step in range(1, 9)], 64) == {}
    assert find_problems([], 64) == {}


def test_completions_that_are_all_cut_off() -> None:
    rows = [row(step, completions__clipped_ratio=1.0) for step in range(1, 9)]
    assert find_problems(rows, 64) == {
        "cut off": "100 % of the completions of steps 4 to 8 were cut off at 64 tokens: raise --max_completion_length"
    }
    rows[-1]["completions/clipped_ratio"] = 0.9
    assert find_problems(rows, 64)["cut off"].startswith("98 % of the completions of steps 4 to 8 ")
    rows[-1]["completions/clipped_ratio"] = 0.7  # a mean of 0.94
    assert find_problems(rows, 64) == {}


def test_rewards_that_are_all_zero() -> None:
    zero = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0, "rewards__b__mean": 0.0, "rewards__b__std": 0.0}
    rows = [row(step, **zero) for step in range(1, 6)]
    assert find_problems(rows, 64)["zero"].startswith("every reward (a, b) of steps 1 to 5 was 0, so all ")
    rows[2]["rewards/b/mean"] = 0.1
    assert find_problems(rows, 64) == {}
    rows[2]["rewards/b/mean"] = 0.0
    rows[2]["rewards/b/std"] = 1.0  # rewards of both signs with the mean 0
    assert find_problems(rows, 64) == {}


def test_a_reward_that_gives_none_does_not_count() -> None:
    none = {"rewards__b__mean": None, "rewards__b__std": math.nan}
    assert find_problems([row(step, **none) for step in range(1, 6)], 64) == {}
    nothing = {"rewards__a__mean": None, "rewards__a__std": None}
    assert find_problems([row(step, **nothing) for step in range(1, 6)], 64) == {}
    zero = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0}
    problem = find_problems([row(step, **zero, **none) for step in range(1, 6)], 64)["zero"]
    assert problem.startswith("every reward (a) of steps 1 to 5 was 0")


def test_each_problem_is_said_once_while_it_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = RunMessages(settings_of(tmp_path / "a run"), 100)
    args = SimpleNamespace(output_dir=str(tmp_path / "a run"), world_size=1)
    bad = {"completions/clipped_ratio": 1.0, "rewards/a/mean": 0.0, "rewards/a/std": 0.0}
    said = []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 3 * PROBLEM_STEPS):
            messages.on_log(args, TrainerState(global_step=step), TrainerControl(), logs=dict(bad))
            said.append(len(caplog.messages))
    assert said == [0] * (PROBLEM_STEPS - 1) + [2] * (2 * PROBLEM_STEPS)
    assert caplog.messages[0] == (
        "Warning: 100 % of the completions of steps 1 to 5 were cut off at 64 tokens: raise --max_completion_length."
    )


def test_other_processes_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = RunMessages(settings_of(tmp_path), 100)
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=2)
    for step in range(1, 10):
        state = TrainerState(global_step=step, is_world_process_zero=False)
        messages.on_log(args, state, TrainerControl(), logs={"completions/clipped_ratio": 1.0})
        messages.on_train_begin(args, state, TrainerControl())
    assert not caplog.messages


# ---- start ----


def test_the_start_names_model_data_folder_and_steps(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", "--G", "4", "--prompts_per_step", "3", "--max_completion_length", "64")
    assert start_lines(settings, prompts=4000, steps=150) == [
        f"GTPO of tiny on arithmetic: {tmp_path / 'run'}",
        "150 steps of 3 prompts x 4 completions of at most 64 tokens; 4,000 prompts",
    ]
    assert start_lines(settings, 4000, 150, done=50, processes=2)[1] == (
        "150 steps of 6 prompts x 4 completions of at most 64 tokens; 4,000 prompts; continues after step 50"
    )


def test_the_start_of_supervised_fine_tuning(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--model", "tiny", "--dataset", "arithmetic"]
    settings = parse("sft", (DataArguments, PromptArguments, ModelArguments, RunArguments, SFTConfig), words)
    count = settings.completions_per_step
    assert start_lines(settings, 4000, 20)[1] == f"20 steps of {count} rows; 4,000 prompts"


# ---- end ----


def test_the_end_has_scores_files_and_a_command_that_can_be_pasted(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "gamma 0.5")
    run = RunDirectory(settings.output_dir)
    run.adapter.mkdir(parents=True)
    run.report.write_text("")
    rows = [row(step, accuracy=float(step), completions__clipped_ratio=0.5) for step in (1, 2)]
    first, second, adapter, report, command = end_lines(settings, rows, 92.4)
    assert first == f"Run finished (0:01:32): {run.path}"
    assert (adapter, report) == (f"Adapter: {run.adapter}", f"Report: {run.report}")
    assert (
        second.replace("\n ", "")
        == "First and last logged step: accuracy 1.0 -> 2.0 %, cut off 50.0 -> 50.0 %, a 1 -> 1"
    )
    long = [row(step, accuracy=1.0, accuracy_lenient=2.0, formatting=3.0, mean_token_accuracy=0.1) for step in (1, 2)]
    scores = end_lines(settings, long, 92.4)[1]
    assert scores.count("\n") == 1 and max(map(len, scores.splitlines())) <= 100
    assert shlex.split(command.removeprefix("Evaluate: python ")) == [
        "evaluate.py",
        "--benchmarks",
        "arithmetic",
        "--runs",
        str(run.path),
    ]


def test_a_problem_takes_the_place_of_success(tmp_path: Path) -> None:
    rows = [row(step, completions__clipped_ratio=1.0) for step in (1, 2, 3)]
    lines = end_lines(settings_of(tmp_path), rows, 5.0)
    assert lines[0] == (
        "Run finished, but 100 % of the completions of steps 1 to 3 were cut off at 64 tokens: "
        "raise --max_completion_length."
    )
    assert sum("finished" in line for line in lines) == 1


def test_a_resumed_run_without_new_steps_has_no_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert end_lines(settings, [row(1)], None)[0].startswith("Run finished: ")
    settings.run.resume = str(tmp_path)
    assert end_lines(settings, [row(1)], 3600.0)[0].startswith("Run finished (1:00:00 since --resume): ")


def test_your_own_data_has_no_benchmark_to_evaluate_on(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    settings.data.dataset = "mine.jsonl"
    assert end_lines(settings, [], None)[-1] == f"Use it: {tmp_path / 'adapter' / 'README.md'} has a quick start"


def test_the_initial_entropy_and_its_filter_or_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert initial_entropy_text(run) is None
    for record, text in (
        ({"initial_entropy": 0.0938, "filter_on": True}, "0.094 nats before training, entropy filter on"),
        ({"initial_entropy": 0.7, "filter_on": False}, "0.700 nats before training, entropy filter off"),
        ({"initial_entropy": 0.7}, None),
        ({"initial_entropy": "x", "filter_on": True}, None),
        ([], None),
    ):
        run.initial_entropy.write_text(json.dumps(record))
        assert initial_entropy_text(run) == text
