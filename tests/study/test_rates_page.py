"""What docs/objectives.md says of the comparison `rates` is what its stored runs give."""

import numpy as np
import pytest
from helpers.pages import text_of
from helpers.scripts import ROOT

from study.comparison import stored_comparison
from study.found import every_found
from study.measures import SeedRuns, measure_of

LEAD, _, PAGE = (ROOT / "docs/objectives.md").read_text().partition("## Each at four rates\n")
PAGE = PAGE.partition("\n## ")[0]


@pytest.mark.slow
def test_the_table_and_the_sentences_are_those_of_the_runs() -> None:
    comparison = stored_comparison("rates")
    (found,) = every_found(comparison)
    arms = {arm.name: arm for arm in comparison.arms}
    words = " ".join(PAGE.split())
    rows = {cells[1].strip(): cells[2:-1] for line in PAGE.splitlines() if len(cells := line.split("|")) > 5}

    def values(arm: str, view: str, measure: str = "pass@1 sampled") -> list[float]:
        name = arms[arm].run_name(view)
        each = measure_of(measure, name, found.base.benchmark_name)
        return [each.value(SeedRuns(found.results, seed, comparison.window)) for seed in comparison.seeds]

    def minus(one: list[float], other: list[float]) -> str:
        return text_of([a - b for a, b in zip(one, other, strict=True)])

    of_table = [arm for arm in arms if "unclipped" not in arm]
    for arm in of_table:
        columns = [(rate, "pass@1 sampled") for rate in comparison.every_rate] + [("0.3e-3", "formatting late")]
        for (rate, measure), cell in zip(columns, rows[arms[arm].label], strict=True):
            of_arm, of_grpo = values(arm, rate, measure), values("grpo", rate, measure)
            expected = f"{np.mean(of_arm):.2f}" if arm == "grpo" else minus(of_arm, of_grpo)
            assert cell.strip(" *") == expected, (arm, rate, measure)

    means = {(arm, rate): np.mean(values(arm, rate)) for arm in of_table for rate in comparison.every_rate}
    lead = " ".join(LEAD.split())
    for rate, text in (("0.15e-3", "lie within {:.1f} points"), ("0.6e-3", "at 0.6e-3 within {:.0f}")):
        assert text.format(np.ptp([means[arm, rate] for arm in of_table[:5]])) in lead
    for arm, text in (("grpo", "GRPO moves by {:.0f}"), ("rloo", "RLOO by {:.0f}")):
        assert text.format(np.ptp([means[arm, rate] for rate in comparison.every_rate])) in lead

    chosen = found.chosen["own"]
    assert {name for name, of in chosen.items() if set(of.values()) != {"0.3e-3"}} == {"gtpo", "tag_correction"}
    assert [*chosen["gtpo"].values()] == [*chosen["tag_correction"].values()] == ["0.15e-3"] * 10 + ["0.3e-3"] * 10
    own = found.at("own")
    gtpo, tags = (
        text_of([*own.pair(comparison, arms[arm]).differences("pass@1 sampled").values()])
        for arm in ("gtpo", "tag_correction")
    )
    assert f"GTPO (own minus GRPO's {gtpo}) and tags ({tags}): undecided" in words

    grpo, rloo, half = (values(arm, "0.3e-3") for arm in ("grpo", "rloo", "completion_ratio"))
    kept = (np.mean(half) - np.mean(grpo)) / (np.mean(rloo) - np.mean(grpo))
    assert f"GRPO's advantages with it keep {100 * kept:.0f} %" in words
    slower = [
        minus(values("grpo", "0.15e-3", m), values("grpo", "0.3e-3", m)) for m in ("pass@1 sampled", "formatting late")
    ]
    assert (
        f"solves {slower[0][1:]} more than at 0.3e-3, and formats {slower[1][1:]} worse" in words
        and slower[1][0] == "-"
    )
    unclipped = [minus(values(f"{arm}_unclipped", "0.3e-3"), values(arm, "0.3e-3")) for arm in ("grpo", "rloo")]
    assert f"GRPO {unclipped[0]}, RLOO {unclipped[1]} (*later*)" in words
    tags = minus(values("tag_correction", "0.15e-3", "formatting late"), values("grpo", "0.15e-3", "formatting late"))
    assert f"at 0.15e-3 too, {tags}" in words
