"""The page and the README's tables, and the stored results behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
from paper_world import world

from gtpo.files import CONFIGS
from gtpo.paper.matrix import load_matrix
from gtpo.paper.results import Results, read_results
from study.claims import read_claims
from study.collapse import DIRECTORY as COLLAPSE
from study.mechanism import DIRECTORY as mechanism_directory
from study.mechanism import PAGE as MECHANISM_PAGE
from study.mechanism import page as mechanism_page
from study.mechanism import summaries_in
from study.page import (
    DIRECTORY,
    EFFECTS,
    HEADROOM,
    METRICS,
    NOTHING,
    PAGE,
    PAGES,
    README,
    SMOL,
    _clipped,
    _formatting_lost,
    arms_of_smol,
    draw_effects,
    effects_of,
    fill,
    only,
    page_of,
    summarize,
    tags_of,
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
    assert sandbox.study("page") == 0
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
    assert "5. **One update** of GRPO was not measured." in readme


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


def steps(formatting: list[float]) -> list[dict[str, Any]]:
    return [{"step": i, "formatting": value} for i, value in enumerate(formatting)]


def test_shares_and_losses_by_hand() -> None:
    """Steps without a gradient do not count; a loss counts at the stable rate alone."""
    rows = [{"step": i, "grad_norm": norm} for i, norm in enumerate((0.0, 0.05, 0.2, 0.3))]
    assert _clipped(Results({"gtpo-g8": {1: rows}}, {})) == pytest.approx(200 / 3)
    lost = _formatting_lost(
        Results(
            {
                "sft": {1: steps([90, 0])},
                "gtpo-g8": {1: steps([90, 95, 80, 74]), 2: steps([90, 95, 80, 76])},
                "gtpo-late-g8": {1: steps([90, 0])},
            },
            {},
        ),
        1,
    )
    assert lost == {"runs": 2, "of_grpo": 0, "lost": ["gtpo-g8, seed 1"]}
    assert _clipped(Results({}, {})) is None


def test_the_warm_start_is_no_arm_of_the_comparison() -> None:
    names = {run.name for run in arms_of_smol(MATRIX)}
    assert {"grpo", "gtpo", "gtpo-correction", "gtpo-skip"} <= names and "sft-warm-start" not in names


def test_the_first_page_shows_differences_in_points() -> None:
    """One claim allows 5 points below: its margins are the difference and 5."""
    claims = {claim.name: claim for of_figure in read_claims().values() for claim in of_figure}
    shown = [claims[name] for group in EFFECTS.values() for name in group.values()]
    assert all(claim.unit == "points" and (claim.compares_runs or claim.allowed) for claim in shown)
    checked = [{"name": name, "margins": {"1": 6.0, "2": 7.0, "3": 8.0}} for name in claims]
    effects = {effect["claim"]: effect for effect in effects_of(checked)}
    assert len(effects) == 7 and sum(claim.allowed > 0 for claim in shown) == 1
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
    summary = summarize(MATRIX, world(), NOTHING, {})
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
        verdict = claim["verdict"]
        assert line.startswith(f"| {claim['claim']} | {shown} | {verdict}") and line.endswith(f"{claim['why']} |")
        assert (" (margin 5)" in line) == (claim["mean"] - claim["difference"] > 1 and verdict != "not counted")
        assert page.count(line) == 1
    of_paper = summary["claims"]
    for verdict, count in summary["verdicts"].items():
        assert (f" {count}: **{verdict}**" in page) == (count > 0)
        assert count == sum(claim["verdict"] == verdict for claim in of_paper)
    assert sum(summary["verdicts"].values()) == 77
    counted = sum(claim["size"] is not None and not claim["why"] for claim in of_paper)
    assert f"By chance alone up to {round(0.025 * counted, 1)} of them would hold." in " ".join(page.split())
    stable = next(effect for effect in summary["effects"] if effect["claim"] == "fig2_stable_accuracy")
    assert f"{stable['mean']:+.1f} ± {stable['half_width']:.1f} points in training accuracy" in " ".join(page.split())
    assert "| GTPO, G = 12 | 100.0 ± 0.0 |" in page  # 95 and 5 more
    drawn = [name for name in MATRIX["figures"] if MATRIX["figures"][name].get("tiny")]
    assert all(f"results/tiny/{name}.png" in page for name in (*drawn, "effects"))


def test_page_without_any_run() -> None:
    summary = summarize(MATRIX, NOTHING, NOTHING, {})
    page = pages_of(summary)
    assert "Of 77 claims 77: **not run**." in page and "fig3.png" not in page
    assert summary["drawn"] == [] and {effect["mean"] for effect in summary["effects"]} == {None}


def test_fill_needs_both_comments() -> None:
    assert fill("a\n<!-- x -->\nold\n<!-- end -->b", "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end -->b"
    with pytest.raises(ValueError, match="no `<!-- y -->`"):
        fill("a\n<!-- x -->\n<!-- end -->", "y", "new")
    with pytest.raises(ValueError, match="followed by `<!-- end -->`"):
        fill("a\n<!-- end -->\n<!-- x -->\n", "x", "new")


def test_other_seeds_do_not_enter_the_stored_results() -> None:
    """claim --seeds 21 22 23 leaves its runs and scores beside those of the matrix."""
    found = scored(sft=[1.0, 2.0, 3.0])
    found.metrics.update({"sft": {seed: [{"step": seed}] for seed in (1, 2, 3)}, "word": {1: [{"step": 1}]}})
    kept = only(found, [("sft", 1), ("sft", 3), ("word", 1)])
    assert kept.metrics == {"sft": {1: [{"step": 1}], 3: [{"step": 3}]}, "word": {1: [{"step": 1}]}}
    assert kept.scores["sft"].keys() == {"arithmetic", "arithmetic_hard"} and kept.scores.keys() == {"sft"}
    assert all(list(entries) == [1, 3] for entries in kept.scores["sft"].values())


# The stored results


def test_page_has_the_numbers_of_the_stored_results() -> None:
    summary = json.loads((ROOT / DIRECTORY / "summary.json").read_text())
    stored = [read_results([ROOT / path]) for path in (DIRECTORY, SMOL, COLLAPSE, HEADROOM)]
    results, smol, collapse, headroom = stored
    mechanism = summaries_in(ROOT / mechanism_directory)
    assert json.loads(json.dumps(summarize(MATRIX, results, smol, mechanism, collapse, headroom))) == summary
    assert [page_of(summary, template) for template in PAGES] == [(ROOT / page).read_text() for page in PAGES.values()]
    if mechanism:
        assert mechanism_page(mechanism) == (ROOT / MECHANISM_PAGE).read_text()
    readme = (ROOT / README).read_text()
    assert fill(readme, "found", what_was_found((ROOT / PAGE).read_text())) == readme


def test_stored_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / DIRECTORY).iterdir()) < 6e6
