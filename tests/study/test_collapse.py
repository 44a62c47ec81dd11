"""The rule that admits a rate, by hand."""

from typing import Any

from gtpo.paper.matrix import load_matrix
from gtpo.paper.results import Results
from study.collapse import admission, table

MATRIX = load_matrix()


def run(accuracy: list[float], formatting: list[float], entropy: list[float]) -> list[dict[str, Any]]:
    """Four quarters of 50 steps each, the window of the trailing mean."""
    quarters = [values for values in zip(accuracy, formatting, entropy, strict=True) for _ in range(50)]
    return [{"step": i, "accuracy": a, "formatting": f, "entropy": e} for i, (a, f, e) in enumerate(quarters, 1)]


def test_the_rule_by_hand() -> None:
    """The base has 49 %: 54 % is learned. 20 points of accuracy or 10 of formatting, with 0.05 nats, are lost."""
    flat = [90.0] * 4
    seeds = {
        301: run([50, 54, 40, 34], flat, [0.4, 0.4, 0.4, 0.46]),  # learns, loses 20
        302: run([50, 53.9, 40, 20], flat, [0.4, 0.4, 0.4, 0.6]),  # does not learn, loses 33.9
        303: run([50, 70, 60, 50], flat, [0.4, 0.4, 0.4, 0.449]),  # learns; loses 20, but entropy stays
        304: run([50, 70, 60, 51], [90, 95, 90, 85.1], [0.4, 0.4, 0.4, 0.6]),  # learns; 19 and 9.9 are not lost
    }
    found = admission(MATRIX, Results({"grpo-1e-3": seeds}, {}))
    row = found["grpo-1e-3"]
    assert (row["learns"], row["lost"], row["admitted"]) == (3, 2, True)
    assert row["accuracy"] == [34.0, 20.0, 50.0, 51.0] and row["entropy"] == [0.06, 0.2, 0.049, 0.2]
    assert list(found) == ["grpo-1e-3"] and table(found)[0].endswith("ADMITTED")
    seeds[302] = run([50, 53, 53, 53], flat, [0.4] * 4)
    row = admission(MATRIX, Results({"grpo-1e-3": seeds}, {}))["grpo-1e-3"]
    assert (row["learns"], row["lost"], row["admitted"]) == (3, 1, False)
    seeds[304] = run([50, 70, 60, 51], [90, 95, 90, 85], [0.4, 0.4, 0.4, 0.6])  # 10 points of formatting
    assert admission(MATRIX, Results({"grpo-1e-3": seeds}, {}))["grpo-1e-3"]["admitted"]
    assert admission(MATRIX, Results({}, {})) == {}
