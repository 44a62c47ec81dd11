"""What docs/objectives.md says of the comparison `rates` is what its stored runs give."""

import numpy as np
import pytest
from helpers.scripts import ROOT

from gtpo.reports.curves import half_width_of
from study.comparison import Arm, stored_comparison
from study.found import every_found

PAGE = (ROOT / "docs/objectives.md").read_text().partition("## Each at four rates\n")[2].partition("\n## ")[0]
MEASURES = ("pass@1 sampled", "pass@1 greedy", "formatting late")  # at the rate that the other half chooses


def text_of(values: list[float]) -> str:
    assert len(values) == 20
    return f"{np.mean(values):+.2f} ± {half_width_of(float(np.std(values, ddof=1)), 20):.2f}"


@pytest.mark.slow
def test_the_table_and_the_sentences_are_those_of_the_runs() -> None:
    comparison = stored_comparison("rates")
    (found,) = every_found(comparison)
    grpo, gtpo, *_ = comparison.arms
    rows = {
        cells[1].strip(): [cell.strip(" *") for cell in cells[2:-1]]
        for line in PAGE.splitlines()
        if len(cells := line.split("|")) > 5
    }

    def expected(arm: Arm, view: str, measure: str) -> str:
        pair = found.at(view).pair(comparison, gtpo if arm is grpo else arm)
        if arm is grpo:
            return f"{pair.row(measure)['means'][0]:.2f}"
        return text_of(list(pair.differences(measure).values()))

    for arm in comparison.arms:
        rates = comparison.rates_for(arm)
        cells = [expected(arm, rate, MEASURES[0]) if rate in rates else "" for rate in comparison.every_rate]
        if len(rates) > 1:
            chosen = found.chosen["own"][arm.name]
            cells.append(" and ".join(dict.fromkeys(chosen[seed] for seed in comparison.seeds)))
            cells += [expected(arm, "own", measure) for measure in MEASURES]
        assert rows[arm.label][: len(cells)] == cells, arm.label
