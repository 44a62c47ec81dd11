"""The values that the pages have beyond the planned comparisons: differences and counts by hand."""

from typing import Any

import pytest
from helpers.results import results_of

from paper.results import Results
from study.findings import findings

STEPS = 300


def constant(**values: float) -> dict[str, list[float]]:
    return {name: [value] * STEPS for name, value in values.items()}


def table(runs: dict[tuple[str, int], dict[str, list[float]]]) -> Results:
    rows: dict[str, Any] = {}
    for (name, seed), columns in runs.items():
        steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows.setdefault(name, {})[seed] = [{"step": i + 1} | row for i, row in enumerate(steps)]
    return results_of(rows)


def test_differences_and_counts_by_hand() -> None:
    calm = constant(accuracy=20.0, grad_norm=0.1)
    falls = [80.0] * 100 + [30.0] * 200
    runs = {
        ("grpo-0.3e-3", 341): constant(formatting=50.0),
        ("gtpo-0.3e-3", 341): constant(formatting=47.0),
        ("grpo-0.3e-3", 342): constant(formatting=50.0),
        ("gtpo-0.3e-3", 342): constant(formatting=52.0),
    }
    lost = {
        ("grpo-1e-3", 301): {"accuracy": falls} | constant(entropy=0.5, completion_length=20.0),
        ("gtpo-1e-3", 301): {"accuracy": falls} | constant(entropy=0.8, completion_length=35.0),
        ("grpo-bits1-1e-3", 301): {"accuracy": falls},
    }
    pooled = {
        ("grpo-headroom-1.2e-3", 311): constant(accuracy=20.0, entropy=0.4, completion_length=35.0),
        ("gtpo-headroom-1.2e-3", 311): constant(accuracy=14.0, entropy=0.4, completion_length=35.0),
    }
    early = {"accuracy": [80.0] * 40 + [30.0] * 260}
    first = {
        ("grpo-1.2e-3", 221): early | constant(grad_norm=0.3),
        ("gtpo-1.2e-3", 221): early | constant(grad_norm=0.2),  # below the alarm's 0.25
        ("grpo-1.2e-3", 222): constant(accuracy=10.0, grad_norm=0.3),
        ("gtpo-1.2e-3", 222): constant(accuracy=14.0, grad_norm=0.3),
    }
    places = dict.fromkeys(("headroom", "smol_comparison"), table(runs)) | {"collapse": table(lost | pooled)}
    for share in (0, 20, 50, 80):
        formatting = {"grpo": 50.0, "correction": 51.0 - 2 * share / 100, "gtpo": 50.0, "dr_grpo": 50.0}
        arms = {(f"{arm}-0.3e-3", 501): calm | constant(formatting=value) for arm, value in formatting.items()}
        places[f"missing-{share}"] = table(arms)
    places |= dict.fromkeys(("low_rate", "zero_advantage", "mode-guesses", "mode-reasons"), table({})) | {
        "first_lost": table(first)
    }
    halves = {"correction": 40.0, "correction_gamma": 60.0, "correction_filter": 30.0, "gtpo": 10.0}
    places["entropy_parts"] = table(
        {(f"{arm}-1e-3", 461): calm | constant(formatting=value) for arm, value in halves.items()}
    )
    found = findings(places)
    assert found["missing_formatting_slope"]["mean"] == pytest.approx(-2.0)
    assert [row["mean"] for row in found["missing_formatting_of_correction"]] == pytest.approx([1.0, 0.6, 0.0, -0.6])
    row = found["early_formatting"][0]
    assert (row["mean"], row["above"], row["means"]) == (-0.5, 1, [50.0, 49.5])
    assert (found["counts"]["lost"], found["counts"]["lost_above_ln_2"], found["counts"]["lost_short"]) == (2, 1, 1)
    assert found["of_correction"]["formatting late"]["mean"] == pytest.approx((1.0 + 0.6 + 0.0 - 0.6) / 4)
    effects = [found[name]["formatting last_third"]["mean"] for name in ("effect_of_filter", "effect_of_gamma")]
    assert effects == [(-10 - 50) / 2, (20 - 20) / 2]
    rate = found["losing_rate"]
    assert (rate["seeds"], rate["mean"], rate["above"]) == (3, pytest.approx((-6 + 0 + 4) / 3), 1)
    assert found["alarms"]["first_lost"] == [1, 4]
