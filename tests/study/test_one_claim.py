"""``python -m study claim``: what a claim reads is trained and evaluated, nothing else, and its margins are printed."""

from typing import Any

import pytest
from helpers.refusals import refused
from helpers.results import results_of

from paper.matrix import load_matrix
from study.claims import find_claims, report

MATRIX = load_matrix()


@pytest.mark.slow
def test_only_what_reads_scores_is_evaluated(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """sft on held-out problems for one claim, GTPO on both benchmarks, and the second claim alone reads no scores."""
    names = ("fig2_stable_ahead_of_sft", "table1_stable_maj_64", "fig5a_kl_costs_accuracy")
    assert sandbox.study("claim", *names, "--seeds", "5") == 0
    calls = sandbox.calls()
    grpo = {f"grpo-g{g}-beta{beta}" for g in (8, 12) for beta in ("0", "1e-6")}
    trained = {"gtpo-g8", "gtpo-g12", "sft", "grpo-g8-beta0.04"} | grpo
    assert {call[1] for call in calls if call[0] != "evaluate"} == {f"{name}-s5" for name in trained}
    assert sorted(call for call in calls if call[0] == "evaluate") == [
        ["evaluate", "arithmetic", "last", 3],
        ["evaluate", "arithmetic_hard", "last", 6],
    ]
    printed = capsys.readouterr().out
    assert printed.count("verdict: too few seeds") == 3 and "mean:" not in printed
    assert "  seed 5: +0.0 points" in printed
    assert sandbox.study("claim", *names, "--seeds", "5") == 0
    assert sandbox.calls() == []


def test_differences_are_printed_without_what_a_claim_allows() -> None:
    """GTPO is 2, 3 and 4 points below GRPO, the claim allows 5: margins of 3, 2 and 1, half width 4.303 / sqrt(3)."""
    with refused("fig3_gtpo"):
        find_claims(["fig3_gtpo"])
    (claim,) = find_claims(["fig2_stable_accuracy"])
    curves = {
        name: {seed: [{"step": 1, "accuracy": 50.0 - (1 + seed) * name.startswith("gtpo")}] for seed in (1, 2, 3)}
        for name in claim.runs
    }
    assert report(MATRIX, [claim], results_of(curves), [1, 2, 3]).splitlines()[1:] == [
        "  seed 1: -2.0 points",
        "  seed 2: -3.0 points",
        "  seed 3: -4.0 points",
        "  mean: -3.0 ± 2.5 points, 95 %",
        "  verdict: undecided (the claim allows a difference of -5 points)",
    ]
