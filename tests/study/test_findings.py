"""The values of README.md's findings on tables made by hand; test_page.py recomputes them from the stored runs."""

from helpers.results import results_of

from paper.results import Results
from study.findings import findings

STEPS = 300


def constant(**values: float) -> dict[str, list[float]]:
    return {name: [value] * STEPS for name, value in values.items()}


def table(runs: dict[tuple[str, int], dict[str, list[float]]]) -> Results:
    rows = {}
    for (name, seed), columns in runs.items():
        steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows.setdefault(name, {})[seed] = [{"step": i + 1} | row for i, row in enumerate(steps)]
    return results_of(rows)


def test_differences_and_counts_by_hand() -> None:
    falls = [80.0] * 100 + [30.0] * 200  # ends 50 points down
    collapse = {
        ("grpo-control", 431): constant(formatting=10.0, accuracy=0.0, entropy=0.5),
        ("gtpo-control-correction", 431): constant(formatting=60.0, accuracy=0.0, entropy=0.5),
        ("grpo-control", 432): constant(formatting=15.0, accuracy=0.0, entropy=0.5),
        ("gtpo-control-correction", 432): constant(formatting=12.0, accuracy=0.0, entropy=0.5),
        ("grpo-1e-3", 301): {"accuracy": falls, "entropy": [0.5] * STEPS, "formatting": [90.0] * STEPS},
        ("gtpo-1e-3", 301): {"accuracy": falls, "entropy": [0.8] * STEPS, "formatting": [90.0] * STEPS},
        ("grpo-0.3e-3", 305): constant(accuracy=80.0, entropy=0.8, formatting=90.0),  # loses nothing
        ("grpo-bits1-1e-3", 301): {"accuracy": falls, "entropy": [0.8] * STEPS, "formatting": [90.0] * STEPS},
    }
    headroom = {
        ("grpo-0.3e-3", 341): constant(formatting=50.0),
        ("gtpo-0.3e-3", 341): constant(formatting=47.0),
        ("grpo-0.3e-3", 342): constant(formatting=50.0),
        ("gtpo-0.3e-3", 342): constant(formatting=52.0),
        ("grpo-0.3e-3", 361): constant(formatting=0.0),  # another pair of arms
    }
    found = findings({"collapse": table(collapse), "headroom": table(headroom)})
    row = found["early_formatting"]
    assert (row["seeds"], row["mean"], row["above"]) == (2, -0.5, 1)
    without = found["without_format"]["gtpo-control-correction"]
    assert (without["seeds"], without["grpo"], without["gtpo"]) == (2, 2, 1)
    assert found["entropy_alarm"] == {"lost": 2, "above": 1}
