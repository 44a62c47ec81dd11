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
    places = dict.fromkeys(("headroom", "smol_comparison"), table(runs)) | {"collapse": table(lost)}
    for share in (0, 20, 50, 80):
        formatting = {"grpo": 50.0, "correction": 51.0 - 2 * share / 100, "gtpo": 50.0, "dr_grpo": 50.0}
        arms = {(f"{arm}-0.3e-3", 501): constant(formatting=value) for arm, value in formatting.items()}
        places[f"missing-{share}"] = table(arms)
    places |= dict.fromkeys(("entropy_parts", "first_lost", "low_rate"), table({}))
    found = findings(places)
    assert found["missing_formatting_slope"]["mean"] == pytest.approx(-2.0)
    assert [row["mean"] for row in found["missing_formatting_of_correction"]] == pytest.approx([1.0, 0.6, 0.0, -0.6])
    row = found["early_formatting"][0]
    assert (row["mean"], row["above"], row["means"]) == (-0.5, 1, [50.0, 49.5])
    assert (found["counts"]["lost"], found["counts"]["lost_above_ln_2"], found["counts"]["lost_short"]) == (2, 1, 1)
