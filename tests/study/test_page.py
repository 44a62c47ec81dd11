"""The page and the README's tables, and the stored results behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
from paper_world import world

from gtpo.files import CONFIGS
from gtpo.paper.figures import draw_effects
from gtpo.paper.matrix import load_matrix
from gtpo.paper.results import Results, read_results
from study.claims import read_claims
from study.mechanism import DIRECTORY as mechanism_directory
from study.mechanism import PAGE as MECHANISM_PAGE
from study.mechanism import page as mechanism_page
from study.mechanism import summaries_in
from study.page import (
    DIRECTORY,
    EFFECTS,
    GENTLE,
    METRICS,
    NOTHING,
    PAGE,
    PAGES,
    README,
    SHIPPED,
    SMOL,
    TESTED,
    _clipped,
    _formatting_lost,
    _highest_end,
    _without_gradient,
    admission,
    arms_of_smol,
    effects_of,
    fill,
    long_runs,
    only,
    page_of,
    summarize,
    tags_of,
    tiny_table,
    what_was_found,
    write_page,
)

ROOT = CONFIGS.parent
MATRIX = load_matrix()
FIGURES = PAGES["figures.template.md"]


def pages_of(summary: dict[str, Any]) -> str:
    return "".join(page_of(summary, template) for template in PAGES)


def test_condensed_results_have_every_metric_of_a_claim() -> None:
    measures = [measure for claims in read_claims().values() for claim in claims for measure in claim.measures]
    assert {measure.name for measure in measures if measure.benchmark is None} <= {*METRICS}


def test_page_of_a_few_runs(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Condensed, checked and rendered from a few runs; a second time from the condensed results alone."""
    (sandbox / "docs").mkdir()
    README.write_text("before\n<!-- found -->\nold\n<!-- end -->\nafter\n")
    assert sandbox.reproduce("fig2", "--seeds", "1", "2") == 0
    capsys.readouterr()
    assert sandbox.reproduce("--page") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.is_file() for path in written)
    assert {PAGE, FIGURES, README, DIRECTORY / "summary.json"} <= set(written)
    first = PAGE.read_text() + FIGURES.read_text()
    stored = read_results([DIRECTORY])
    found = read_results([Path("outputs")])
    assert stored.metrics == found.metrics
    assert stored.scores["gtpo-g8"]["arithmetic"][2]["scores"] == found.scores["gtpo-g8"]["arithmetic"][2]["scores"]
    (sandbox / "outputs").rename(sandbox / "gone")
    write_page(MATRIX)
    assert PAGE.read_text() + FIGURES.read_text() == first
    assert "At the high rate: GTPO ends with higher accuracy than GRPO." in first and "not run" in first
    assert "| LLaMA, GSM8K | GTPO | 30.0 | 13.3 | 80.0 | 42.5 |" in first  # Table 1, k = 64, of the paper
    readme = README.read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "\nold\n" not in readme
    assert "1. **One update.** Not measured." in readme and "](results/tiny/effects.png)" in readme


def scored(**values: list[float]) -> Results:
    """Runs with one score per seed, 1 for pass@k of one seed more than for the one before; 10 more in any format."""
    found = Results({}, {})
    for name, per_seed in values.items():
        for benchmark in ("arithmetic", "arithmetic_hard"):
            found.scores.setdefault(name.replace("_", "-"), {})[benchmark] = {
                seed: {
                    "scores": {
                        f"{kind}{suffix}": {str(2**i): value + more for i in range(7)}
                        for kind in ("pass", "maj")
                        for suffix, more in (("", 0.0), ("_lenient", 10.0))
                    }
                }
                for seed, value in enumerate(per_seed, start=1)
            }
    return found


def test_table_of_scores_has_mean_and_interval_over_seeds_strict_or_lenient() -> None:
    """A method is the mean over its variants, seed by seed; 1, 2, 3 are 2 ± 4.303 / sqrt(3)."""
    runs = {"gtpo-g8": [0.0, 1.0, 2.0], "gtpo-g12": [2.0, 3.0, 4.0], "sft": [5.0, 7.0], "gtpo-late-g8": [1.0, 2.0, 3.0]}
    table = tiny_table(MATRIX, scored(**runs)).splitlines()
    assert "| GTPO, stable |" + " 12.0 ± 2.5 |" * 6 in tiny_table(MATRIX, scored(**runs), "_lenient").splitlines()
    assert table[0].startswith("| | held out, pass@1 | held out, pass@32 |")
    assert table[2:] == [
        "| untrained base |" + " - |" * 6,
        "| SFT |" + " 6.0 |" * 6,
        "| GRPO, stable |" + " - |" * 6,
        "| GTPO, stable |" + " 2.0 ± 2.5 |" * 6,
        "| GRPO, high rate, at its best |" + " - |" * 6,
        "| GTPO, high rate, at its end |" + " - |" * 6,  # G = 12 is missing
    ]


def steps(formatting: list[float]) -> list[dict[str, Any]]:
    return [{"step": i, "formatting": value} for i, value in enumerate(formatting)]


def test_shares_and_ends_by_hand() -> None:
    """Steps without a gradient do not count; the last quarter of 40, 60, 80, 20 is 20; only the regime's runs count."""
    norms = [0.0, 0.05, 0.2, 0.3]
    rows = [
        {"step": i, "accuracy": a, "grad_norm": n} for i, (a, n) in enumerate(zip((40, 60, 80, 20), norms, strict=True))
    ]
    better = [row | {"accuracy": 90.0} for row in rows]
    found = Results(
        {"gtpo-late-g8": {1: rows}, "grpo-late-g8-beta0": {1: rows, 2: rows[:3]}, "gtpo-g8": {1: better}}, {}
    )
    assert _highest_end(found, "late") == 80.0  # of three steps the last one
    assert _highest_end(Results({"gtpo-late-g8": {1: rows}}, {}), "late") == 20.0
    assert _clipped(Results({"gtpo-g8": {1: rows}}, {})) == pytest.approx(200 / 3)
    lost = _formatting_lost(
        Results(
            {
                "sft": {1: rows},
                "gtpo-g8": {1: steps([90, 95, 80, 74]), 2: steps([90, 95, 80, 76])},
                "gtpo-late-g8": {1: steps([90, 0])},
            },
            {},
        ),
        1,
    )
    assert lost == {"runs": 2, "of_grpo": 0, "lost": ["gtpo-g8, seed 1"]}
    assert _without_gradient({1: rows, 2: [row | {"grad_norm": 0.0} for row in rows]}) == 50.0  # of the last one each
    assert _without_gradient({1: [{"step": 1}] * 3}) is None
    assert _clipped(Results({}, {})) is None and _highest_end(Results({}, {}), "late") is None


def rows_of(accuracy: list[float], formatting: list[float], steps: int) -> list[dict[str, Any]]:
    """Metrics that change after each ``steps``."""
    pairs = [pair for pair in zip(accuracy, formatting, strict=True) for _ in range(steps)]
    return [{"step": i, "accuracy": a, "formatting": f} for i, (a, f) in enumerate(pairs)]


def test_the_rule_of_the_long_runs_by_hand() -> None:
    """Windows of 25 steps: a loss counts if the last mean is 20 points below the highest."""
    seeds = {
        2: rows_of(
            [40, 80, 59, 61], [90, 99, 90, 79], 25
        ),  # accuracy falls by 21 and recovers to 19, formatting is lost
        1: rows_of([40, 80, 75, 60], [90, 95, 99, 95], 25),  # accuracy is lost
    }
    found = long_runs(MATRIX, Results({"grpo-long": seeds, "grpo": seeds}, {}))
    assert found == {
        "grpo-long": {
            "seeds": [1, 2],
            "accuracy": [60.0, 61.0],
            "loses_accuracy": 1,
            "accuracy_falls": 2,
            "formatting": [95.0, 79.0],
            "loses_formatting": 1,
            "formatting_falls": 1,
        }
    }
    assert long_runs(MATRIX, NOTHING) == {}


def test_the_rule_of_the_gentle_rates_by_hand() -> None:
    """Windows of 50 steps; the base has 49 %, so 59 % is learned; 20 points below an earlier mean are lost."""
    seeds = {
        101: rows_of([50, 58.9, 50, 50], [90, 95, 90, 90], 50),  # does not learn
        102: rows_of([50, 59, 60, 40], [90, 95, 75, 90], 50),  # learns, loses both
        103: rows_of([50, 70, 65, 60], [90, 95, 75.1, 70], 50),  # learns, loses formatting in two parts
        104: rows_of([10, 80, 80, 80], [99, 99, 79.1, 99], 50),  # learns
    }
    base = {"base": {"arithmetic": {0: {"scores": {"pass": {"1": 49.0}}}}}}
    found = admission(MATRIX, Results({"grpo-1e-3": seeds}, {}), Results({}, base))
    assert found["above"] == 59.0
    row = found["runs"]["grpo-1e-3"]
    assert [row[name] for name in ("learns", "loses_accuracy", "loses_formatting")] == [3, 1, 2]
    assert row["accuracy"] == [50.0, 40.0, 60.0, 80.0] and row["seeds"] == [101, 102, 103, 104]
    assert admission(MATRIX, Results({}, {}), Results({}, base)) == {}


def test_the_warm_start_is_no_arm_of_the_comparison() -> None:
    names = {run.name for run in arms_of_smol(MATRIX)}
    assert {
        "grpo",
        "gtpo",
        "gtpo-correction",
        "gtpo-skip",
        "grpo-long",
        "gtpo-long",
    } <= names and "sft-warm-start" not in names


def test_the_first_page_shows_differences_in_points() -> None:
    """One claim allows 5 points below: its margins are the difference and 5."""
    claims = {claim.name: claim for of_figure in read_claims().values() for claim in of_figure}
    shown = [claims[name] for group in EFFECTS.values() for name in group.values() if "shipped" not in name]
    assert all(claim.unit == "points" and (claim.compares_runs or claim.allowed) for claim in shown)
    names = [*claims, "shipped_fig2_stable_accuracy"]  # with margins that are differences
    checked = [{"name": name, "margins": {"1": 6.0, "2": 7.0, "3": 8.0}} for name in names]
    effects = {effect["claim"]: effect for effect in effects_of(checked)}
    assert len(effects) == 8 and sum(claim.allowed > 0 for claim in shown) == 1
    assert effects["fig2_stable_accuracy"] == {
        "group": "GTPO, tiny",
        "label": "accuracy at the end",
        "claim": "fig2_stable_accuracy",
        "mean": 2.0,
        "half_width": 2.4843,
        "verdict": "no large difference",
    }
    pass_1 = effects["fig2_stable_pass_1"]
    assert pass_1["mean"] == 7.0 - claims["fig2_stable_pass_1"].allowed
    assert effects["shipped_fig2_stable_accuracy"]["mean"] == 7.0
    found = "smol_correction_formatting_at_first"
    assert effects[found]["mean"] == 7.0 and effects[found]["verdict"] == "holds"
    again = effects_of([*checked, {"name": found, "margins": {"1": -6.0, "2": -7.0, "3": -8.0}}])
    assert [effect["mean"] for effect in again if effect["claim"] == found] == [-7.0]  # the later entry: new seeds
    few = effects_of([claim | {"margins": {"1": 6.0}} for claim in checked])
    assert {(effect["mean"], effect["verdict"]) for effect in few} == {(None, "too few seeds")}


def effect(objective: str, target: str, mean: float, half_width: float | None, more: float | None = None) -> Any:
    minus_grpo = None if more is None else [more, 1.0]
    row = {"objective": objective, "target": target, "split": "all groups", "mean": mean, "half_width": half_width}
    return row | {"minus_grpo": minus_grpo}


def test_policies_whose_tags_an_update_lowers_or_keeps() -> None:
    """Intervals of ± 1: -2 is lower, -0.5 is not; GTPO minus GRPO of 2 is higher, 0.5 is not."""
    mechanism = {
        "smol-base": [effect("GRPO", "tags", -2, 1), effect("GTPO", "tags", 0, 1, 2)],
        "tiny-step-40": [effect("GRPO", "tags", -2, 1), effect("GTPO", "tags", 0, 1, 0.5)],
        "tiny-base": [effect("GRPO", "tags", -0.5, 1), effect("GTPO", "tags", 0, 1, 2)],
        "smol-step-20": [effect("GRPO", "tags", -2, None), effect("GTPO", "tags", 0, None)],  # too few groups
        "smol-step-60": [effect("GRPO", "tags", 0, 1), effect("GTPO", "tags", -2, 1, -2)],
    }
    for rows in mechanism.values():
        rows += [effect("GRPO", "own tags", 2, 1), effect("GRPO, A > 0", "tags", -2, 1)]
    found = tags_of({name: {"rows": rows} for name, rows in mechanism.items()})
    assert found == {
        "policies": 5,
        "gtpo_too": False,  # it lowers them at smol-step-60 alone
        "positive_too": True,
        "lowered": ["SmolLM2 at its start", "the tiny model at step 40"],
        "kept": ["SmolLM2 at its start", "the tiny model at its start"],
        "lowered_and_kept": ["SmolLM2 at its start"],
        "kept_lower": ["SmolLM2 at step 60"],
        "own_lowered": [],
        "own_kept": [],
    }
    mechanism["smol-base"][-1]["mean"] = 0.5
    for name in ("smol-base", "tiny-step-40"):
        mechanism[name][1]["mean"] = -2.0
    found = tags_of({name: {"rows": rows} for name, rows in mechanism.items()})
    assert found["gtpo_too"] and not found["positive_too"]


def test_the_figure_of_the_first_page() -> None:
    effects = [
        {"group": "a", "label": "x", "mean": 3.0, "half_width": 1.0, "verdict": "holds"},
        {"group": "a", "label": "missing", "mean": None, "half_width": None, "verdict": "not run"},
        {"group": "b", "label": "y", "mean": -8.0, "half_width": 2.0, "verdict": "does not hold"},
    ]
    [axis] = draw_effects(effects, 5.0).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a: x", "b: y"]
    bars = [collection.get_segments()[0][:, 0].tolist() for collection in axis.collections]
    assert bars == [[2.0, 4.0], [-10.0, -6.0]]
    assert draw_effects([], 5.0)


def test_page_and_summary_have_the_same_numbers() -> None:
    summary = summarize(MATRIX, world(), NOTHING, NOTHING, NOTHING, {})
    page = pages_of(summary)
    for claim in summary["claims"]:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {claim['claim']} |")]
        digits = {"nats": 3, "steps": 0, "10⁻³": 2}.get(claim["unit"], 1)
        shown = f"{claim['difference']:+.{digits}f} ± {claim['half_width']:.{digits}f} {claim['unit']}"
        if claim["threshold"] is not None:
            assert abs(claim["value"] - claim["threshold"]) == pytest.approx(abs(claim["mean"]), abs=1e-3)
            places = 3 if claim["unit"] == "nats" else 0
            shown = shown.replace(f"{claim['difference']:+.{digits}f}", f"{claim['value']:.{digits}f}")
            shown += f", threshold {claim['threshold']:.{places}f}"
        verdict = "found in these runs" if claim["figure"] == "post_hoc" else claim["verdict"]
        assert line.startswith(f"| {claim['claim']} | {shown} | {verdict}") and line.endswith(f"{claim['why']} |")
        assert (" (margin 5)" in line) == (claim["mean"] - claim["difference"] > 1 and verdict != "not counted")
        assert page.count(line) == 1
    of_paper = [claim for claim in summary["claims"] if claim["figure"] != "post_hoc"]
    for verdict, count in summary["verdicts"].items():
        assert (f" {count}: **{verdict}**" in page) == (count > 0)
        assert count == sum(claim["verdict"] == verdict for claim in of_paper)
    assert sum(summary["verdicts"].values()) == 78
    counted = sum(claim["size"] is not None and not claim["why"] for claim in of_paper)
    assert f"By chance alone up to {round(0.025 * counted, 1)} of them would hold." in " ".join(page.split())
    stable = next(effect for effect in summary["effects"] if effect["claim"] == "fig2_stable_accuracy")
    assert f"{stable['mean']:+.1f} ± {stable['half_width']:.1f} points in training accuracy" in " ".join(page.split())
    assert "| GTPO, G = 12 | 100.0 ± 0.0 |" in page  # 95 and 5 more
    assert "| DAPO | -2.05 ± 0.00 | - |" in page and "| GTPO | -5.00 ± 0.00 | - |" in page  # no push after λ is logged
    drawn = [name for name in MATRIX["figures"] if MATRIX["figures"][name].get("tiny")]
    assert all(f"results/tiny/{name}.png" in page for name in (*drawn, "effects"))


def test_claims_of_other_seeds_stand_in_the_appendix() -> None:
    tested = world()
    tested = Results(
        {name: {40 + seed: rows for seed, rows in seeds.items()} for name, seeds in tested.metrics.items()},
        {
            name: {on: {40 + seed: entry for seed, entry in seeds.items()} for on, seeds in of_run.items()}
            for name, of_run in tested.scores.items()
        },
    )
    page = page_of(summarize(MATRIX, Results({}, {}), tested, NOTHING, NOTHING, {}), "figures.template.md")
    end = "both at their end: GTPO is ahead of GRPO (β = 0) in pass@1 on held-out problems. (3 seeds) |"
    assert f"| At the high rate, {end}" in page


def test_page_without_any_run() -> None:
    summary = summarize(MATRIX, Results({}, {}), Results({}, {}), Results({}, {}), NOTHING, {})
    page = pages_of(summary)
    assert "Of 78 claims 78: **not run**." in page and "fig3.png" not in page
    assert summary["drawn"] == [] and {effect["mean"] for effect in summary["effects"]} == {None}


def test_fill_needs_both_comments() -> None:
    assert fill("a\n<!-- x -->\nold\n<!-- end -->b", "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end -->b"
    with pytest.raises(ValueError, match="no `<!-- y -->`"):
        fill("a\n<!-- x -->\n<!-- end -->", "y", "new")
    with pytest.raises(ValueError, match="followed by `<!-- end -->`"):
        fill("a\n<!-- end -->\n<!-- x -->\n", "x", "new")


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """reproduce.py claim --seeds 21 22 23 leaves its runs and scores beside those of the matrix."""
    found = scored(sft=[1.0, 2.0, 3.0])
    found.metrics.update({"sft": {seed: [{"step": seed}] for seed in (1, 2, 3)}, "word": {1: [{"step": 1}]}})
    kept = only(found, [("sft", 1), ("sft", 3), ("word", 1)])
    assert kept.metrics == {"sft": {1: [{"step": 1}], 3: [{"step": 3}]}, "word": {1: [{"step": 1}]}}
    assert kept.scores["sft"].keys() == {"arithmetic", "arithmetic_hard"} and kept.scores.keys() == {"sft"}
    assert all(list(entries) == [1, 3] for entries in kept.scores["sft"].values())


# The stored results


def test_page_has_the_numbers_of_the_stored_results() -> None:
    results, shipped = read_results([ROOT / DIRECTORY]), read_results([ROOT / SHIPPED])
    summary = json.loads((ROOT / DIRECTORY / "summary.json").read_text())
    tested, smol, gentle = (read_results([ROOT / path]) for path in (TESTED, SMOL, GENTLE))
    mechanism = summaries_in(ROOT / mechanism_directory)
    assert json.loads(json.dumps(summarize(MATRIX, results, tested, smol, gentle, mechanism, shipped))) == summary
    assert [page_of(summary, template) for template in PAGES] == [(ROOT / page).read_text() for page in PAGES.values()]
    if mechanism:
        assert mechanism_page(mechanism) == (ROOT / MECHANISM_PAGE).read_text()
    assert "| GRPO, β = 0 | 1, 2, 3 | 0, 0 | 0, 2 |" in (ROOT / PAGE).read_text()  # lost, and recovered, of 300 steps
    readme = (ROOT / README).read_text()
    assert fill(readme, "found", what_was_found((ROOT / PAGE).read_text())) == readme


def test_stored_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / DIRECTORY).iterdir()) < 6e6
