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


@mark.parametrize(("rows", "expected"), TABLES["scores_of_short_runs"])
def test_scores_of_short_runs(rows: list[dict[str, Any]], expected: list[str]) -> None:
    assert scores(rows) == expected


# ---- problems ----


def test_no_problem_in_a_good_run() -> None:
    assert find_problems([row(step) for step in range(1, 9)], 64) == {}
    assert find_problems([], 64) == {}


@mark.parametrize(("last", "percent"), [(1.0, "100 %"), (0.9, "98 %"), (0.7, None)])
def test_completions_that_are_all_cut_off(last: float, percent: str | None) -> None:
    rows = [row(step, completions__clipped_ratio=1.0) for step in range(1, 8)]
    found = find_problems([*rows, row(8, completions__clipped_ratio=last)], 64)
    assert found.keys() == ({"cut off"} if percent else set())  # above a mean of 0.95
    assert not percent or (percent in found["cut off"] and "steps 4 to 8" in found["cut off"])


ZERO = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0}
NONE = {"rewards__b__mean": None, "rewards__b__std": math.nan}  # of a reward that does not apply


@mark.parametrize(
    ("metrics", "last", "problem", "named"),
    [
        (ZERO | {"rewards__b__mean": 0.0, "rewards__b__std": 0.0}, {}, "zero", "(a, b)"),
        (ZERO | NONE, {}, "zero", "(a)"),
        (ZERO, {"rewards__a__mean": 0.1}, None, ""),
        (ZERO, {"rewards__a__std": 1.0}, None, ""),  # rewards of both signs with the mean 0
        ({"rewards__a__std": 1e-8}, {}, "constant", "(a)"),
        (NONE, {}, None, ""),
        ({"rewards__a__mean": None, "rewards__a__std": None}, {}, None, ""),
    ],
)
def test_rewards_that_are_all_zero_or_alike(
    metrics: dict[str, Any], last: dict[str, Any], problem: str | None, named: str
) -> None:
    found = find_problems([*(row(step, **metrics) for step in range(1, 5)), row(5, **(metrics | last))], 64)
    assert found.keys() == ({problem} if problem else set())
    assert named in "".join(found.values())


def test_rewards_that_become_alike_are_no_problem() -> None:
    """What is learned ends like this."""
    assert find_problems([row(0), *(row(step, rewards__a__std=1e-8) for step in range(1, 9))], 64) == {}


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
    bad = {"completions/clipped_ratio": 1.0, "rewards/a/mean": 0.0, "rewards/a/std": 0.0}
    said = []
    for step in range(1, 3 * PROBLEM_STEPS):
        messages.on_log(args, TrainerState(global_step=step), TrainerControl(), logs=dict(bad))
        said.append(len(caplog.messages))
    assert said == [0] * (PROBLEM_STEPS - 1) + [problems] * (2 * PROBLEM_STEPS)


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
