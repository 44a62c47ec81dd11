"""What docs/gpu.md says of the comparison `prompts` is what its stored runs give."""

import numpy as np
import pytest
from helpers.pages import text_of
from helpers.scripts import ROOT

from study.comparison import stored_comparison
from study.found import every_found

GPU = (ROOT / "docs/gpu.md").read_text()
PAGE = GPU.partition("## More prompts a generation\n")[2].partition("\n## ")[0]
ARMS = {"1, 1": "", "4, 1": "_4", "4, 4": "_4_updates", "8, 1": "_8"}
COLUMNS = (("accuracy 26-50", "early", 1), ("pass@1 sampled", "late", 2), ("accuracy prompts 57-120", "late", 1))


@pytest.mark.slow
def test_the_table_and_the_sentences_are_those_of_the_runs() -> None:
    comparison = stored_comparison("prompts")
    (found,) = every_found(comparison)
    arms = {arm.name: arm for arm in comparison.arms}
    rows = {cells[1].strip(): cells[2:8] for line in PAGE.splitlines() if len(cells := line.split("|")) == 9}

    def difference(one: str, other: str, measure: str, view: str) -> list[float]:
        return list(found.at(view).pair(comparison, arms[one], arms[other]).differences(measure).values())

    for column, (measure, view, places) in enumerate(COLUMNS):
        for label, suffix in ARMS.items():
            for place, arm in enumerate((f"grpo{suffix}", f"gtpo{suffix}")):
                expected = text_of(difference(arm, "grpo", measure, view), places)
                if arm == "grpo":
                    (of_grpo, _) = found.at(view).pair(comparison, arms["gtpo"]).row(measure)["means"]
                    expected = f"{of_grpo:.{places}f}"
                assert rows[label][2 * column + place].strip().strip("*") == expected, (label, arm, measure)
    words = " ".join(PAGE.split())
    updates = [text_of(difference("grpo_4_updates", "grpo_4", m, v), 2)[1:] for m, v, _ in COLUMNS[:2]]
    assert f"by {updates[0]} and {updates[1]} (primary)" in words
    late, early = (text_of(difference("grpo_4", "grpo", "pass@1 greedy", view), 1)[1:] for view in ("late", "early"))
    assert f"four solve {late} less than one at 0.3e-3, {early} more than at 0.6e-3" in words
    solved = {
        suffix: found.at("1.2e-3").pair(comparison, arms[f"grpo{suffix}"]).row("pass@1 sampled")["means"]
        for suffix in ("_4", "_4_updates", "_8")
    }
    one = solved["_4"][0]
    assert (
        f"one prompt solves {one:.1f}, four updates {solved['_4_updates'][1]:.1f}, "
        f"four prompts {solved['_4'][1]:.1f}, eight {solved['_8'][1]:.1f}" in words
    )

    def accuracy(arm: str, view: str, first: int, last: int) -> np.ndarray:
        runs = [found.results.runs[f"{arm}-{view}", seed]["accuracy"] for seed in comparison.seeds]
        return np.array([each.loc[first:last].mean() for each in runs])

    of_hours = []
    for times, column in ((2.1, 1), (1.7, 3)):  # how long a generation of four prompts takes, by the hours of an epoch
        of_one, of_four = (
            float(GPU.partition(f"| {row} |")[2].split("|")[column].split()[0])
            for row in ("llama, gsm8k", "four prompts")
        )
        assert round(4 * of_four / of_one, 1) == times
        for view, first, last in (("early", 26, 50), ("late", 101, 120)):
            four = accuracy("grpo_4", view, round(first / times), round(last / times))
            of_hours.append(text_of([*(four - accuracy("grpo", view, first, last))], 1))
    assert f"accuracy differs by {of_hours[0]}, after those of 101 to 120 by {of_hours[1]}" in words
    assert f"on an H100 (1.7) by {of_hours[2]} and {of_hours[3]}" in words
