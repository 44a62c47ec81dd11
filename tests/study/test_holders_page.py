"""What README, docs/reproduction.md and the log say of the comparison `holders` is what its stored runs give."""

import re

import numpy as np
from helpers.pages import text_of
from helpers.scripts import ROOT

from paper.results import read_results
from study.comparison import stored_comparison
from study.measures import SeedRuns, measure_of

PAGE = (
    (ROOT / "docs/reproduction.md")
    .read_text()
    .partition("### By credit, or where all agree\n")[2]
    .partition("\n## ")[0]
)
ARMS = {"alone": "correction", "by credit": "credited", "common span": "common", "tags": "tag_correction"}
PLACES = {"formatting 1-150": 2, "pass@1 greedy": 1, "guesses late": 1}  # decimal places, by column


def by_seed(measure: str) -> dict[str, np.ndarray]:
    """Arm -> the mean of the four bases, by seed. (20,)"""
    comparison = stored_comparison("holders")
    found = {}
    for arm in comparison.arms:
        run = arm.run_name("0.3e-3")
        of_bases = []
        for base in comparison.bases:
            results = read_results([comparison.stored(base)])
            taken = measure_of(measure, run, base.benchmark_name)
            of_bases.append([taken.value(SeedRuns(results, seed, 1)) for seed in comparison.seeds])
        found[arm.name] = np.mean(of_bases, axis=0)
    return found


def test_the_table_and_the_sentences_are_those_of_the_runs() -> None:
    rows = {cells[1].strip(): cells[2:5] for line in PAGE.splitlines() if len(cells := line.split("|")) == 6}
    words = " ".join(PAGE.split())
    for column, (measure, places) in enumerate(PLACES.items()):
        of = by_seed(measure)
        for label, arm in ARMS.items():
            assert rows[label][column].strip() == text_of(of[arm] - of["grpo"], places), (measure, label)
        if measure == "formatting 1-150":
            assert all((of[arm] > of["grpo"]).sum() == 20 for arm in ("common", "tag_correction"))
            below = text_of(of["tag_correction"] - of["common"], 2).removeprefix("+")
            assert f"above GRPO in 20 of 20 seeds, {below} below the tags" in words
            readme = (ROOT / "README.md").read_text()
            assert (
                f"again {rows['tags'][0].strip()}" in readme
                and f"needs no tags: {rows['common span'][0].strip()}." in readme
            )
            assert text_of(of["credited"] - of["tag_correction"], 2) in (ROOT / "docs/log.md").read_text()
        if measure == "pass@1 greedy":
            assert f"undecided ({text_of(of['credited'] - of['correction'], 1)})" in words
    marked = {arm: values.mean() for arm, values in by_seed("conflict_fraction 6-100").items()}
    left_out = [100 * (1 - marked[arm] / marked["correction"]) for arm in ("common", "credited")]
    (said,) = re.findall(r"leaves out (\d+) % of the conflict tokens, credit (\d+) %", words)
    assert [f"{share:.0f}" for share in left_out] == [*said]
