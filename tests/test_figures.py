"""Curves: what is drawn is what the run logged."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import figures
from config import UsageError
from figures import PANELS, plot_training, read_metrics, smooth

FACTORS = {"accuracy": 2.0, "formatting": 3.0, "entropy": 0.01, "conflict_tokens": 5.0}


def rows(steps: int, offset: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"step": step} | {name: factor * step + offset for name, factor in FACTORS.items()}
        for step in range(1, steps + 1)
    ]


def write_run(folder: Path, steps: int = 3, offset: float = 0.0) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(steps, offset)))
    return str(folder)


def drawn(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Axis title -> legend name -> (x, y) of the bold lines."""
    return {
        axis.get_title(): {
            str(line.get_label()): ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()])
            for line in axis.lines
            if not str(line.get_label()).startswith("_")
        }
        for axis in figure.axes
    }


def test_drawn_values_are_the_logged_ones() -> None:
    runs = {"GTPO": rows(5), "GRPO": rows(4, offset=7.0)}
    figure = plot_training(runs, window=1)
    assert [axis.get_title() for axis in figure.axes] == list(PANELS.values())
    for metric, title in PANELS.items():
        shown = drawn(figure)[title]
        for name, logged in runs.items():
            assert shown[name] == ([row["step"] for row in logged], [row[metric] for row in logged])


def test_raw_values_stand_behind_their_mean() -> None:
    figure = plot_training({"GTPO": rows(6)}, window=3)
    raw, mean = figure.axes[0].lines[:2]
    assert list(raw.get_ydata()) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert list(mean.get_ydata()) == [2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    assert raw.get_alpha() < 1 and raw.get_color() == mean.get_color()
    assert "3 steps" in figure.get_suptitle()


def test_smoothing_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 2) == [1.0, 1.5, 4.0, 4.5]
    assert smooth([1.0, 2.0, 6.0, 3.0], 3) == [1.0, 1.5, 3.0, pytest.approx(11 / 3)]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([4.0, 2.0], 100) == [4.0, 3.0]
    assert smooth([], 5) == []


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(1, 40))
def test_smoothing_is_the_mean_of_what_came_last(values: list[float], window: int) -> None:
    got = smooth(values, window)
    assert len(got) == len(values)
    for i, mean in enumerate(got):
        past = values[: i + 1][-window:]
        assert mean == pytest.approx(sum(past) / len(past))


def test_ln_2_is_drawn_with_the_entropy_alone() -> None:
    shown = drawn(plot_training({"GTPO": rows(3)}))
    assert shown[PANELS["entropy"]]["ln 2"][1] == [pytest.approx(0.693147, abs=1e-6)] * 2
    assert all("ln 2" not in lines for title, lines in shown.items() if title != PANELS["entropy"])
    assert math.isclose(shown[PANELS["entropy"]]["ln 2"][1][0], math.log(2))


def test_step_without_a_metric_is_left_out() -> None:
    logged = rows(4)
    del logged[1]["accuracy"]
    logged[2]["accuracy"] = None
    shown = drawn(plot_training({"GTPO": logged}, window=1))
    assert shown[PANELS["accuracy"]]["GTPO"] == ([1.0, 4.0], [2.0, 8.0])
    assert len(shown[PANELS["entropy"]]["GTPO"][0]) == 4


def test_all_runs_are_drawn_and_told_apart() -> None:
    """An ablation has more runs than a palette has colours: none may be missing in silence."""
    runs = {f"run {i}": rows(2, offset=i) for i in range(9)}
    figure = plot_training(runs)
    for title, shown in drawn(figure).items():
        assert shown.keys() - {"ln 2"} == runs.keys(), title
    styles = [
        (line.get_color(), line.get_linestyle())
        for line in figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    ]
    assert len(set(styles)) == len(runs)


# ---- reading ----


def test_metrics_are_read_in_order_without_half_a_line(tmp_path: Path) -> None:
    run = Path(write_run(tmp_path / "run"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "accur')
    assert read_metrics(run) == rows(3)


@pytest.mark.parametrize(
    ("content", "message"), [(None, r"holds no metrics\.jsonl"), ("", "is empty"), ('{"step": 1, "lo', "is empty")]
)
def test_missing_metrics_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_metrics(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# ---- the command ----


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", *argv])
    figures.main()


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_command_writes_the_picture(
    suffix: str, magic: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / f"curves.{suffix}"
    command(monkeypatch, "--runs", write_run(tmp_path / "a"), write_run(tmp_path / "b"), "--output", str(output))
    assert output.read_bytes().startswith(magic)
    assert capsys.readouterr().out.strip() == str(output)


def test_runs_of_the_same_name_are_both_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """outputs/a/gtpo and outputs/b/gtpo: two curves, or a sentence that asks for labels, never one of the two."""
    seen = []
    monkeypatch.setattr(figures, "plot_training", lambda runs, window: seen.append(runs) or plot_training(runs, window))
    try:
        runs = (write_run(tmp_path / "a" / "gtpo"), write_run(tmp_path / "b" / "gtpo", offset=9.0))
        command(monkeypatch, "--runs", *runs, "--output", str(tmp_path / "curves.png"))
    except UsageError as error:
        assert "label" in str(error)
    else:
        assert len(seen[0]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--labels", "A", "B"], "2 labels for 1 runs"), (["--window", "0"], "--window is 0: expected at least 1")],
)
def test_bad_usage_is_refused(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        command(monkeypatch, "--runs", run, *argv, "--output", str(tmp_path / "curves.png"))
    assert not (tmp_path / "curves.png").exists()
