"""What spread and how many seeds the pages let expect: computed again from the stored pairs."""

from statistics import stdev

import pytest
from helpers.scripts import ROOT

from gtpo.reports.curves import half_width_of
from study.comparison import known_comparison, read_experiments
from study.found import found_of


def deviation(base: str, measure: str) -> float:
    """Over the pairs of GTPO and GRPO in the comparison that the entry of a base names, from this base."""
    comparison = known_comparison(read_experiments()["bases"][base]["spread"]["of"])
    [found] = [found_of(comparison, each) for each in comparison.bases if each.name == base]
    [gtpo] = [arm for arm in comparison.arms if arm.name == "gtpo"]
    return stdev(found.pair(comparison, gtpo).differences(measure).values())


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("base", ["wrong-mode", "missing-0", "missing-20", "missing-50", "missing-80", "smol"])
def test_the_spread_of_each_base(base: str) -> None:
    spread = read_experiments()["bases"][base]["spread"]
    for measure in spread.keys() - {"of"}:
        assert spread[measure] == round(deviation(base, measure), 2)


def test_the_table_of_seeds() -> None:
    """The fewest pairs, five at least, whose interval is not wider."""
    bases = read_experiments()["bases"]
    spreads = [bases[name]["spread"]["pass@1 sampled"] for name in ("wrong-mode", "missing-0", "smol")]  # the columns
    page = (ROOT / "docs/use_in_your_code.md").read_text()
    for points in (2, 1, 0.5):
        cells = [next(n for n in range(5, 1000) if half_width_of(spread, n) <= points) for spread in spreads]
        line = f"| ± {points} | {' | '.join(map(str, cells))} |"
        assert f"{line}\n" in page, line
