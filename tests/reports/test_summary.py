"""What a run says at its start, while something goes wrong, and at its end."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.files import tables_of, write_json
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch, mark
from transformers import TrainerControl, TrainerState

from gtpo.arguments import Settings
from gtpo.reports.summary import PROBLEM_STEPS, RunMessages, end_lines, find_problems, score_lines, scores
from gtpo.runs.directory import RunDirectory

TABLES = tables_of(__file__)


def settings_of(directory: Path, *argv: str) -> Settings:
    return parsed("--output_dir", str(directory), "--model", "tiny", "--dataset", "arithmetic", *argv)


def row(step: int, **metrics: Any) -> dict[str, Any]:
    good = {"reward": 1.0, "reward_std": 0.5, "frac_reward_zero_std": 0.5, "completions/clipped_ratio": 0.25}
    return {"step": step} | good | metrics


# ---- scores ----


@mark.parametrize(("rows", "expected"), TABLES["scores"])
def test_scores_are_means_of_finite_values(rows: list[dict[str, Any]], expected: str) -> None:
    assert scores(rows, 2) == expected


def test_a_line_of_training_and_one_of_held_out_rows() -> None:
    """Of ten steps, or half of a short run."""
    rows: list[dict[str, Any]] = [{"step": step, "accuracy": float(step)} for step in range(1, 31)]
    evaluations = [{"step": step, "eval_accuracy": 5.0 * step, "eval_runtime": 2.0} for step in (0, 10, 20)]
    assert score_lines([*evaluations, *rows]) == [
        "Means of the first and last 10 logged steps: accuracy 5.5 -> 25.5 %",
        "Held-out rows, steps 0 to 20: accuracy 0.0 -> 100.0 %",
    ]
    assert score_lines(rows[:5]) == ["Means of the first and last 2 logged steps: accuracy 1.5 -> 4.5 %"]
    assert score_lines([{"step": 1}]) == []


# ---- problems ----


CUT = {"completions/clipped_ratio": 1.0}
ZERO = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
EQUAL = {"reward_std": 0.0, "frac_reward_zero_std": 1.0}


@mark.parametrize(("last", "is_problem"), [(0.9, True), (0.7, False)])
def test_completions_that_are_all_cut_off(last: float, is_problem: bool) -> None:
    """Above a mean of 0.95 of the last five steps."""
    rows = [row(step, **CUT) for step in range(1, 8)]
    found = find_problems([*rows, row(8, **{"completions/clipped_ratio": last})], 64)
    assert ("98 % of the completions of steps 4 to 8" in found.get("cut off", "")) == is_problem
    assert find_problems([], 64) == {}


@mark.parametrize(
    ("metrics", "last", "problem"),
    [
        (ZERO, {}, "zero"),
        (ZERO, {"reward": 0.1, "frac_reward_zero_std": 0.5}, None),
        (ZERO, {"reward_std": 1.0, "frac_reward_zero_std": 0.5}, None),  # rewards of both signs with the mean 0
        (EQUAL, {}, "constant"),
        (EQUAL, {"frac_reward_zero_std": 0.9}, None),  # what is learned ends like this
        ({"reward": None, "reward_std": math.nan, "frac_reward_zero_std": 0.0}, {}, None),
    ],
)
def test_rewards_that_are_all_zero_or_alike(metrics: dict[str, Any], last: dict[str, Any], problem: str | None) -> None:
    found = find_problems([*(row(step, **metrics) for step in range(1, 5)), row(5, **(metrics | last))], 64)
    assert found.keys() == ({problem} if problem else set())


@mark.parametrize(("rank", "problems"), [("0", 2), ("1", 0)])
def test_each_problem_is_said_once_while_it_happens(
    rank: str, problems: int, here: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """By the first process alone."""
    messages = RunMessages(settings_of(here), 100)
    monkeypatch.setenv("RANK", rank)
    args = SimpleNamespace(output_dir=str(here), world_size=1)
    messages.on_train_begin(args, TrainerState(max_steps=9), TrainerControl())
    assert bool(caplog.messages) == (rank == "0")
    caplog.clear()
    state = TrainerState()
    said = []
    for step in range(1, 3 * PROBLEM_STEPS):
        state.log_history += [{"step": step} | CUT | ZERO, {"step": step, "eval_runtime": 1.0}]
        messages.on_log(args, state, TrainerControl())
        said.append(len(caplog.messages))
    assert said == [0] * (PROBLEM_STEPS - 1) + [problems] * (2 * PROBLEM_STEPS)


# ---- end ----


def test_a_problem_takes_the_place_of_success(tmp_path: Path) -> None:
    lines = end_lines(settings_of(tmp_path), RunDirectory(tmp_path), [row(step, **CUT) for step in (1, 2, 3)])
    assert "--max_completion_length" in lines[0]


def test_the_last_lines_of_a_run(tmp_path: Path) -> None:
    """Scores wrap at 80 columns between words, files that exist are named, and a path with a space is quoted."""
    run = tmp_path / "a run"
    (run / "best").mkdir(parents=True)
    write_json(run / "best" / "best.json", {"step": 7, "accuracy": 50.0})
    long = dict.fromkeys([f"rewards/of_the_{name}_file/mean" for name in ("first", "second", "third")], 2.0)
    assert end_lines(settings_of(run), RunDirectory(run), [row(step, **long) for step in range(1, 41)]) == [
        f"Run finished: {run}",
        "Means of the first and last 10 logged steps: cut off 25.0 -> 25.0 %,",
        "  of_the_first_file 2 -> 2, of_the_second_file 2 -> 2, of_the_third_file 2 -> 2",
        f"Best: {run}/best (step 7)",
        f"Evaluate: python evaluate.py --benchmarks arithmetic --runs '{run}'",
    ]


@mark.parametrize(("flags", "expected"), TABLES["how_to_evaluate"])
def test_the_last_line_evaluates_your_data_too(flags: str, expected: str, here: Path) -> None:
    (here / "train.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    settings = parsed("--output_dir", "run", "--model", "tiny", *flags.split())
    assert end_lines(settings, RunDirectory("run"), [])[-1] == f"Evaluate: python evaluate.py --benchmarks {expected}"


def test_a_run_whose_gradient_is_always_0_has_trained_nothing() -> None:
    """Where the rewards say it already, once."""
    steps = [row(step, grad_norm=0.0, reward=1.0, frac_reward_zero_std=0.5) for step in range(1, 4)]
    assert [*find_problems(steps, 64)] == ["still"] and "nothing was trained" in find_problems(steps, 64)["still"]
    assert not find_problems([*steps, row(4, grad_norm=0.1)], 64)
    assert not find_problems([row(1, reward=1.0)], 64)  # of a run without norms
    equal = [line | {"frac_reward_zero_std": 1.0} for line in steps]
    assert [*find_problems(equal, 64)] == ["constant"]
