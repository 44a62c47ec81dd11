"""``python -m study claim``: what a claim reads is trained and evaluated, nothing else, and its margins are printed."""

from typing import Any

import pytest
from helpers.results import results_of

from gtpo.errors import UsageError
from paper.matrix import load_matrix
from study.claims import find_claims, report

MATRIX = load_matrix()


@pytest.mark.slow
def test_only_the_runs_of_the_claim_are_made(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.study("claim", "fig4a_larger_gamma_keeps_entropy", "--seeds", "11", "12", "13") == 0
    names = ("gtpo-late-g8", "gtpo-late-gamma1e-6")
    assert sorted(name for _, name, _ in sandbox.calls()) == sorted(f"{n}-s{s}" for n in names for s in (11, 12, 13))
    assert capsys.readouterr().out.splitlines() == [
        "fig4a_larger_gamma_keeps_entropy: γ = 0.1 keeps entropy slightly higher than γ = 10⁻⁶ (at the end).",
        "  seed 11: +0.000 nats",
        "  seed 12: +0.000 nats",
        "  seed 13: +0.000 nats",
        "  mean: +0.000 ± 0.000 nats, 95 %",
        "  verdict: not counted",
    ]
    assert not (sandbox / "outputs/reproduce/tiny/figures").exists()
    with pytest.raises(UsageError):
        sandbox.study("claim", "fig3_gtpo")


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


def test_the_list_of_a_claim_has_its_runs_alone(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.study("claim", "fig4a_larger_gamma_keeps_entropy", "--seeds", "11", "12", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("gtpo-late-g8", "gtpo-late-gamma1e-6")
    assert [line.split()[0] for line in lines[:4]] == [f"{name}-s{seed}" for seed in (11, 12) for name in names]
    assert lines[5].startswith("4 runs: 0 finished, 0 running, 0 interrupted, 4 missing")


def test_differences_are_printed_without_what_a_claim_allows() -> None:
    """GTPO is 2, 3 and 4 points below GRPO, the claim allows 5: margins of 3, 2 and 1, half width 4.303 / sqrt(3)."""
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
