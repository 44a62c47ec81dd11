"""What a run says at its start, while something goes wrong, and at its end."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.files import tables_of
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch, mark
from transformers import TrainerControl, TrainerState

from gtpo.arguments import Settings
from gtpo.reports.summary import PROBLEM_STEPS, RunMessages, end_lines, find_problems, scores

TABLES = tables_of(__file__)


def settings_of(directory: Path, *argv: str) -> Settings:
    return parsed("--output_dir", str(directory), "--model", "tiny", "--dataset", "arithmetic", *argv)


def row(step: int, **metrics: Any) -> dict[str, Any]:
    good = {"rewards/a/mean": 1.0, "rewards/a/std": 0.5, "completions/clipped_ratio": 0.25}
    return {"step": step} | good | {key.replace("__", "/"): value for key, value in metrics.items()}


# ---- scores ----


def test_scores_are_means_of_first_and_last_ten_rows() -> None:
    rows = [{"step": step, "accuracy": float(step), "formatting": 50.0} for step in range(1, 31)]
    assert scores(rows) == ["accuracy 5.5 -> 25.5 %", "formatting 50.0 -> 50.0 %"]


@mark.parametrize(
    ("rows", "expected"),
    TABLES["scores_of_short_runs"],
)
def test_scores_of_short_runs(rows: list[dict[str, Any]], expected: list[str]) -> None:
    assert scores(rows) == expected


# ---- problems ----


def test_no_problem_in_a_good_run() -> None:
    assert find_problems([row(step) for step in range(1, 9)], 64) == {}
    assert find_problems([], 64) == {}


def test_completions_that_are_all_cut_off() -> None:
    rows = [row(step, completions__clipped_ratio=1.0) for step in range(1, 9)]
    for last, percent in ((1.0, "100 %"), (0.9, "98 %")):
        rows[-1]["completions/clipped_ratio"] = last
        found = find_problems(rows, 64)
        assert found.keys() == {"cut off"} and percent in found["cut off"] and "steps 4 to 8" in found["cut off"]
    rows[-1]["completions/clipped_ratio"] = 0.7  # a mean of 0.94
    assert find_problems(rows, 64) == {}


def test_rewards_that_are_all_zero() -> None:
    zero = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0, "rewards__b__mean": 0.0, "rewards__b__std": 0.0}
    rows = [row(step, **zero) for step in range(1, 6)]
    assert "(a, b)" in find_problems(rows, 64)["zero"]
    rows[2]["rewards/b/mean"] = 0.1
    assert find_problems(rows, 64) == {}
    rows[2]["rewards/b/mean"] = 0.0
    rows[2]["rewards/b/std"] = 1.0  # rewards of both signs with the mean 0
    assert find_problems(rows, 64) == {}
    same = [row(step, rewards__a__std=1e-8) for step in range(1, 9)]
    assert "(a)" in find_problems(same, 64)["constant"]
    assert find_problems([row(0), *same], 64) == {}  # what is learned ends like this


def test_a_reward_that_gives_none_does_not_count() -> None:
    none = {"rewards__b__mean": None, "rewards__b__std": math.nan}
    assert find_problems([row(step, **none) for step in range(1, 6)], 64) == {}
    nothing = {"rewards__a__mean": None, "rewards__a__std": None}
    assert find_problems([row(step, **nothing) for step in range(1, 6)], 64) == {}
    zero = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0}
    assert "(a)" in find_problems([row(step, **zero, **none) for step in range(1, 6)], 64)["zero"]


def test_each_problem_is_said_once_while_it_happens(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    messages = RunMessages(settings_of(tmp_path / "a run"), 100)
    args = SimpleNamespace(output_dir=str(tmp_path / "a run"), world_size=1)
    bad = {"completions/clipped_ratio": 1.0, "rewards/a/mean": 0.0, "rewards/a/std": 0.0}
    said = []
    for step in range(1, 3 * PROBLEM_STEPS):
        messages.on_log(args, TrainerState(global_step=step), TrainerControl(), logs=dict(bad))
        said.append(len(caplog.messages))
    assert said == [0] * (PROBLEM_STEPS - 1) + [2] * (2 * PROBLEM_STEPS)
    caplog.clear()
    messages = RunMessages(settings_of(tmp_path), 100)
    monkeypatch.setenv("RANK", "1")
    for step in range(1, 10):  # other processes say nothing
        state = TrainerState(global_step=step)
        messages.on_log(args, state, TrainerControl(), logs=dict(bad))
        messages.on_train_begin(args, state, TrainerControl())
    assert not caplog.messages


# ---- end ----


def test_a_problem_takes_the_place_of_success(tmp_path: Path) -> None:
    rows = [row(step, completions__clipped_ratio=1.0) for step in (1, 2, 3)]
    lines = end_lines(settings_of(tmp_path), rows, 5.0)
    assert "--max_completion_length" in lines[0] and sum("finished" in line for line in lines) == 1


def test_the_last_lines_of_a_run(tmp_path: Path) -> None:
    """Scores wrap at 80 columns between words, files that exist are named, and a path with a space is quoted."""
    run = tmp_path / "a run"
    run.mkdir()
    long = dict.fromkeys([f"rewards__of_the_{name}_file__mean" for name in ("first", "second", "third")], 2.0)
    assert end_lines(settings_of(run), [row(step, **long) for step in range(1, 41)], 80.4) == [
        f"Run finished (0:01:20): {run}",
        "Means of the first and last 10 logged steps: cut off 25.0 -> 25.0 %, a 1 -> 1,",
        "  of_the_first_file 2 -> 2, of_the_second_file 2 -> 2, of_the_third_file 2 -> 2",
        f"Evaluate: python evaluate.py --benchmarks arithmetic --runs '{run}'",
    ]


@mark.parametrize(("flags", "expected"), TABLES["how_to_evaluate"])
def test_the_last_line_evaluates_your_data_too(flags: str, expected: str, here: Path) -> None:
    (here / "train.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    settings = parsed("--output_dir", "run", "--model", "tiny", *flags.split())
    assert end_lines(settings, [], None)[-1] == f"Evaluate: python evaluate.py --benchmarks {expected}"
