"""What an arm reaches over its learning rate, seed by seed, and the picture of it."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from helpers.results import results_of

from paper.results import Results
from study.comparison import Comparison
from study.rate_curve import draw_rate_curves, rate_curve

REACHED = {"0.1": [50.0, 52.0, 60.0], "0.2": [60.0, 62.0, 54.0]}  # rate -> accuracy of seeds 1 to 3 in step 4


def comparison_of(**keys: object) -> Comparison:
    given = {
        "arms": ["grpo", "gtpo"],
        "seeds": ["1-3"],
        "rates": ["0.1", "0.2"],
        "rates_of": {"gtpo": ["0.2"]},
        "choices": {"own": {"by": "pass@1 sampled"}},
        "views": ["own", "0.1"],
        "steps": 4,
    }
    return Comparison.of("", given | keys)


def results(without: tuple[str, int] | None = None) -> Results:
    """Accuracy rises from 0; by hand, the last quarter of four steps is the last one."""
    metrics = {}
    for name, values in {f"{arm}-{rate}": REACHED[rate] for arm in ("grpo", "gtpo") for rate in REACHED}.items():
        metrics[name] = {
            seed: [{"step": step, "accuracy": 0.0, "formatting": 95.0} for step in (1, 2, 3)]
            + [{"step": 4, "accuracy": value, "formatting": 90.0 + seed}]
            for seed, value in enumerate(values, 1)
            if (name, seed) != without
        }
    return results_of(metrics, {})


def test_a_row_for_each_seed_with_a_value_at_each_rate_of_the_arm() -> None:
    comparison = comparison_of()
    grpo, gtpo = comparison.arms
    base = comparison.bases[0]
    assert rate_curve(comparison, results(), base, grpo, "accuracy late") == [[50, 60], [52, 62], [60, 54]]
    assert rate_curve(comparison, results(), base, grpo, "formatting late") == [[91, 91], [92, 92], [93, 93]]
    assert rate_curve(comparison, results(), base, gtpo, "accuracy late") == [[60], [62], [54]]


def test_a_seed_without_a_run_at_one_rate_has_no_row() -> None:
    comparison = comparison_of()
    found = results(without=("grpo-0.2", 2))
    assert rate_curve(comparison, found, comparison.bases[0], comparison.arms[0], "accuracy late") == [
        [50, 60],
        [60, 54],
    ]


def test_an_arm_without_runs_is_left_out_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(
        "study.rate_curve.plot_mean", lambda axis, label, x, curves, style: drawn.append((label, curves))
    )
    comparison = comparison_of(arms=["grpo", "gtpo", "rloo"])
    path = tmp_path / "rates.png"
    draw_rate_curves(comparison, [(comparison.bases[0], results())], path)
    accuracy, formatting = drawn[:2], drawn[2:]  # no scores: nothing in the panel between
    assert accuracy == [("GRPO", [[50, 60], [52, 62], [60, 54]]), ("GTPO", [[60], [62], [54]])]
    assert [label for label, _ in formatting] == ["GRPO", "GTPO"]
    assert plt.imread(path).shape[1] == pytest.approx(900, abs=2)
