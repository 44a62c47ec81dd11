"""The page on signals: steps of made-up runs by hand, the stored runs against a naive count, and the page itself."""

import math
import sys

import pytest
from helpers.scripts import ROOT
from pyarrow import parquet

sys.path.insert(0, str(ROOT / "benchmarks"))

from first_signal import PAGE, SIGNALS, WINDOW, Signal, first_step, format_table, limit_of, sounds, stored_runs


@pytest.fixture(scope="module")
def found():  # type: ignore[no-untyped-def]
    return sounds(stored_runs(ROOT / "results" / "tiny"))


def test_a_curve_and_the_step_at_which_it_leaves_its_limit() -> None:
    low = Signal("accuracy low", "accuracy", -1)
    curve = low.curve([{"accuracy": 50.0}] * WINDOW + [{}] + [{"accuracy": 25.0}] * 2)  # a step without the metric
    assert curve == pytest.approx([-50.0, -50.0, -49.0, -48.0])
    assert first_step(curve, -49.5) == WINDOW + 2
    assert first_step(curve, -48.0) == math.inf  # the limit itself is kept
    assert low.curve([{"kl": 1.0}] * WINDOW) == []
    assert limit_of(range(1, 21)) == 19  # one of twenty exceeds it
    assert limit_of([3.0, 1.0]) == 3.0


def test_stored_runs_against_a_naive_count(found) -> None:  # type: ignore[no-untyped-def]
    """Entropy high, from the parquet file by loops."""
    rows = parquet.read_table(ROOT / "results" / "tiny" / "metrics.parquet").to_pylist()
    runs: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["run"] not in ("sft", "gtpo-word", "grpo-word"):
            runs.setdefault((row["run"], row["seed"]), []).append(row["entropy"])
    means = {key: [sum(e[i - 25 : i]) / 25 for i in range(25, 161)] for key, e in runs.items()}
    stable = [max(mean) for (name, _), mean in means.items() if "-late" not in name]
    [(limit, steps)] = [value for signal, value in found.items() if signal.name.startswith("entropy high")]
    assert sum(value > limit for value in stable) / len(stable) == pytest.approx(0.05)
    late = [mean for (name, _), mean in means.items() if "-late" in name]
    naive = [next((25 + i for i, value in enumerate(mean) if value > limit), math.inf) for mean in late]
    assert sorted(naive) == sorted(steps.values())


def test_the_page_has_the_table(found) -> None:  # type: ignore[no-untyped-def]
    table = format_table(found)
    assert table in PAGE.read_text(), "run python benchmarks/first_signal.py"
    order = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert sorted(order) == sorted(signal.name for signal in SIGNALS)
    assert [name.split()[0] for name in order[:3]] == ["accuracy", "KL", "entropy"]  # the sentences of the page
    assert order.index("formatting low (%)") == 4
