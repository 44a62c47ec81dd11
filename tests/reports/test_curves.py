"""Training curves: the color of a line is the method of its run, its dash the condition, all lines are equally wide."""

import math
from typing import Any

from helpers.files import tables_of
from pytest import mark

from gtpo.reports.curves import arm_of, plot_training
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
