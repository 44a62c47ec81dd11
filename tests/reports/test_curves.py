"""Training curves: the color of a line is the method of its run, its dash the condition, all lines are equally wide."""

import math
from pathlib import Path
from typing import Any

from helpers.files import tables_of
from helpers.refusals import refused
from helpers.runs import fake_run
from matplotlib.figure import Figure
from pytest import MonkeyPatch, approx, mark

from gtpo.reports.curves import arm_of, draw_runs, panels_of, plot_mean, plot_training
from gtpo.reports.metrics import smooth

TABLES = tables_of(__file__)


@mark.parametrize(("method", "settings", "arm"), TABLES["the_arm_of_a_run"])
def test_the_arm_of_a_run(method: str, settings: dict[str, Any], arm: str) -> None:
    assert arm_of(method, settings) == arm


def test_a_mean_has_gaps_at_non_finite_values() -> None:
    assert str(smooth([1.0, math.nan, 3.0, 4.0, math.inf], 2)) == "[1.0, nan, nan, 3.5, inf]"


def test_the_lines_of_one_run() -> None:
    """The mean, held-out rows with a marker for each evaluation, any format below the mean."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval_runtime": 1.0, "eval_accuracy": 10.0}]
    rows += [{"step": step, "accuracy": 10.0 * step, "accuracy_lenient": 20.0} for step in (1, 2)]
    figure = plot_training({"GTPO": rows}, window=2)
    logged, mean, lenient, held_out = figure.axes[1].lines
    assert [*logged.get_ydata(), *mean.get_ydata()] == [10.0, 20.0, 10.0, 15.0]
    assert lenient.get_label() == "GTPO, any format, where it differs" and lenient.get_linestyle() == ":"
    assert (held_out.get_label(), [*held_out.get_xdata()], held_out.get_marker()) == ("GTPO, held out", [0], "o")
    assert {line.get_color() for line in (logged, mean, lenient, held_out)} == {"#0072B2"}
    assert "last 2 logged steps" in figure.get_suptitle()


def labelled(axis: Any) -> dict[str, Any]:
    """The lines of a legend, by label."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def test_several_runs_have_colors_dashes_and_one_legend() -> None:
    """Two of one arm differ in the dash; a run of your own objective is black; a dollar is text."""
    rows = [{"step": step, "accuracy": 1.0, "formatting": 2.0, "entropy": 0.5} for step in (1, 2, 3)]
    arms = {"late $": "gtpo", "mine": "objective"}
    figure = plot_training({"GTPO": rows, "late $": rows, "GRPO": rows, "mine": rows}, arms=arms)
    titles = ["accuracy (%)", "formatting (%)", "entropy ⟨H⟩ (nats)"]
    assert [axis.get_title() for axis in figure.axes] == titles
    assert "last 10 logged steps" in figure.get_suptitle()
    expected = {
        "GTPO": ("#0072B2", "-"),
        r"late \$": ("#0072B2", "--"),
        "GRPO": ("#777777", "-"),
        "mine": ("black", "-"),
    }
    for axis in figure.axes:
        lines = labelled(axis)
        ln2 = lines.pop("ln 2", None)
        assert (ln2 is not None) is (axis.get_title() == titles[2])
        assert {label: (line.get_color(), line.get_linestyle()) for label, line in lines.items()} == expected
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*expected, "ln 2"]


def test_the_panels_of_several_runs() -> None:
    """Rewards of your own first, of whichever run; the loss where nothing else was logged but one metric."""
    first = [{"step": 1, "accuracy": 1.0, "rewards/format_reward/mean": 1.0, "rewards/b/mean": 1.0}]
    second = [{"step": 1, "conflict_tokens": None}, {"step": 2, "rewards/a/mean": 1.0, "conflict_tokens": 3.0}]
    assert [*panels_of([first, second])] == ["rewards/a/mean", "rewards/b/mean", "accuracy", "conflict_tokens"]
    assert panels_of([[{"step": 1, "entropy": 0.5, "loss": 1.0}]]) == {"loss": "loss", "entropy": "entropy ⟨H⟩ (nats)"}


def test_the_mean_over_seeds_and_its_band() -> None:
    """1, 2 and 3: mean 2, half width 4.303 / √3; a gap where a seed is NaN; no band for two seeds."""
    for curves, means in (([[1.0, 5.0], [2.0, 5.0], [3.0, math.nan]], [2.0, math.nan]), ([[1.0, 2.0]] * 2, [1.0, 2.0])):
        axis = Figure().subplots()
        plot_mean(axis, "mean", [10, 20], curves, {"color": "red"})
        [line] = axis.lines
        assert (line.get_label(), [*line.get_xdata()]) == ("mean", [10, 20])
        assert [*line.get_ydata()] == approx(means, nan_ok=True)
        assert len(axis.collections) == (len(curves) == 3)
    axis = Figure().subplots()
    plot_mean(axis, "mean", [10], [[1.0], [2.0], [3.0]], {"color": "red"})
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)


def test_runs_are_drawn_under_their_names_or_labels(here: Path, monkeypatch: MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "gtpo.reports.curves.plot_training", lambda *given: drawn.append(given) or plot_training(*given)
    )
    rows = [{"step": 1, "accuracy": 1.0, "formatting": 2.0}]
    fake_run(here / "a", {"model": "tiny", "gamma": 0.1, "conflict_correction": False}, rows)
    fake_run(here / "b", {"model": "tiny", "num_generations": 4}, [row | {"step": 2} for row in rows])
    fake_run(here / "c", rows=rows)  # without settings
    assert draw_runs(["a", "b", "c"], None, "of/figure.png", 7) == "of/figure.png" and Path("of/figure.png").is_file()
    draw_runs(["a", "b"], ["one", "two"], "figure.png", 7)
    found = [(given[0], *given[1:]) for given in drawn]
    assert [[(label, rows[0]["step"]) for label, rows in given[0].items()] for given in found] == [
        [("a", 1), ("b", 2), ("c", 1)],
        [("one", 1), ("two", 2)],
    ]
    assert [given[1:] for given in found] == [
        (7, {"a": "entropy_control", "b": "grpo"}),
        (7, {"one": "entropy_control", "two": "grpo"}),
    ]
    for labels in (["one"], ["one", "one"]):
        with refused("2 runs have the labels one"):
            draw_runs(["a", "b"], labels, "figure.png", 7)
