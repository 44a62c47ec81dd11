"""The figure of docs/method.md: pushes of one group under each objective, and the groups of a stored run."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from conflict_push_figure import draw_push, groups_of, relative_pushes

from gtpo.errors import UsageError
from gtpo.runs.directory import RunDirectory

STORED = ROOT / "tests" / "stored" / "run_of_eada378"


def test_relative_pushes_of_a_group_computed_by_hand() -> None:
    # Both completions begin with 1; A = +1 over 2 tokens, A = -1 over 4, no common end.
    ids, mask = torch.tensor([[1, 2, 0, 0], [1, 3, 4, 5]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    found = relative_pushes(ids, mask, torch.tensor([1.0, -1.0]), 10, "common")
    assert found == {
        "GRPO": pytest.approx(1 / 3),  # (1/2 - 1/4) / (1/2 + 1/4)
        "Dr. GRPO": pytest.approx(0.0),
        "DAPO": pytest.approx(0.0),
        "GTPO": pytest.approx(4 / 3),  # 2 * 1/2 / (1/2 + 1/4)
        "GTPO,\ndr_grpo": pytest.approx(1.0),
    }
    assert relative_pushes(ids, mask, torch.tensor([1.0, 0.0]), 10, "anchored") == {}


def test_a_run_without_completions_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no completions/: name a run of train_gtpo"):
        draw_push(str(tmp_path), str(tmp_path / "push.png"))
    (tmp_path / "completions").symlink_to(STORED / "completions")
    (tmp_path / "config.yaml").write_bytes((STORED / "config.yaml").read_bytes())
    with pytest.raises(UsageError, match="has no tokenizer in adapter/ or model/: name a finished run"):
        draw_push(str(tmp_path), str(tmp_path / "push.png"))


@pytest.mark.parametrize("saved", ["adapter", "model"])
def test_groups_are_those_of_the_tables(saved: str, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / saved)
    (tmp_path / "completions").symlink_to(STORED / "completions")
    (tmp_path / "config.yaml").write_bytes((STORED / "config.yaml").read_bytes())
    run = RunDirectory(tmp_path)
    size = run.read_config()["num_generations"]
    groups = list(groups_of(run))
    assert len(groups) == len(run.completion_tables())
    for ids, mask, advantages in groups:
        assert len(ids) == len(mask) == len(advantages) == size
        assert ids.shape == mask.shape and mask.sum(-1).min() >= 1
