"""The tables of docs/objectives.md are those of the stored comparisons; the clipped steps are those of their runs."""

import re
from itertools import pairwise

import pytest
from helpers.scripts import ROOT
from pandas import read_parquet

PAGE = (ROOT / "docs/objectives.md").read_text()
TABLES = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
MEASURES = ("pass@1 sampled", "pass@1 greedy", "formatting late")
LABELS = {"correction alone": "correction", "correction on tags": "tag_correction", "Dr. GRPO": "dr_grpo"}
CLIP = 0.1  # max_grad_norm of configs/grpo/tiny.yaml


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row below the head, without bold marks and links."""
    plain = re.sub(r"\*\*|\[|\]\([^)]*\)", "", table)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plain.splitlines()[2:]]


@pytest.mark.parametrize(
    ("table", "place", "rated"),
    [
        (TABLES[1], "objectives_one_rate/wrong-mode", False),
        (TABLES[2], "objectives_off_policy/wrong-mode", True),
    ],
    ids=["guesses", "four updates"],
)
def test_a_table_is_that_of_its_stored_page(table: str, place: str, rated: bool) -> None:
    name, base = place.split("/")
    stored = (ROOT / "results" / name / "comparison.md").read_text()
    of_base = stored.partition(f"## From {base}\n")[2].partition("\n## ")[0]
    blocks = [" ".join(block.split()) if "|" not in block else block for block in of_base.split("\n\n")]
    metrics = read_parquet(ROOT / "results" / place / "metrics.parquet")
    norms = metrics[metrics["seed"].between(771, 790)].astype({"grad_norm": float}).groupby("run")["grad_norm"]
    untrained, grpo, *others = rows_of(table)
    first = 2 if rated else 1
    before = re.search(r"pass@1 sampled ([\d.]+) %, pass@1 greedy ([\d.]+) %", of_base)
    assert before and [f"{float(cell):.1f}" for cell in untrained[first : first + 2]] == [*before.groups()]
    formatting = metrics[(metrics["step"] == 1) & (metrics["run"] == "grpo-0.3e-3") & (metrics["seed"] > 770)]
    assert untrained[first + 2] == f"{formatting['formatting'].mean():.2f}"
    for label, *cells in (grpo, *others):
        rate = cells.pop(0) if rated else "0.3e-3"
        run = f"{LABELS.get(label, label.lower())}-{rate}"
        said = f"{'GTPO' if label == 'GRPO' else label} minus GRPO,"
        (found,) = (after for text, after in pairwise(blocks) if said in text)
        for measure, cell in zip(MEASURES, cells, strict=False):
            (line,) = (line for line in found.splitlines() if line.startswith(f"| {measure} |"))
            _, _, mean, _, difference, seeds, *_ = line.split("|")
            assert cell == (mean if label == "GRPO" else difference).strip() and seeds == " 20 ", (label, measure)
        of_run = norms.get_group(run)
        assert len(of_run) == 20 * 200
        shares = [(of_run[of_run > 0] > CLIP).mean(), (of_run == 0).mean()]
        assert cells[3:5] == [f"{100 * share:.0f} %" for share in shares], run


def test_the_sentence_on_the_base_with_a_missing_tag_is_that_of_its_stored_page() -> None:
    stored = (ROOT / "results/objectives_one_rate/comparison.md").read_text()
    of_base = stored.partition("## From missing-50\n")[2].partition("\n## ")[0]
    words = " ".join(PAGE.split())
    before = re.search(r"pass@1 sampled ([\d.]+) %, pass@1 greedy ([\d.]+) %", of_base)
    said = re.search(r"([\d.]+) % solved, ([\d.]+) % greedily: no verdict there", words)
    assert before and said and [f"{float(text):.1f}" for text in said.groups()] == [*before.groups()]
    for label, start in (
        ("GTPO", "GTPO formats"),
        ("correction alone", "correction alone"),
        ("correction on tags", "the tags"),
    ):
        block = re.split(rf"{label} minus GRPO,".replace(" ", r"\s+"), of_base)[1]
        (line, *_) = (line for line in block.splitlines() if line.startswith("| formatting late |"))
        assert f"{start} {line.split('|')[4].strip()}" in words
