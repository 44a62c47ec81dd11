"""A run directory of revision eada378: it can be resumed, evaluated and plotted.

``tests/stored/run_of_eada378`` is a GTPO run of four steps on the untrained tiny model, with a reward that counts
letters. It contains checkpoint-2, as after a kill, and the final adapter. The paths of its model are relative.
"""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.files import read_json, write_lines
from helpers.runs import metrics_of
from helpers.scripts import ROOT, RunScript
from helpers.weights import adapter_of

from examples.tiny_base import save_untrained_tiny
from gtpo.models.hub import TINY_BASE

pytestmark = pytest.mark.slow

STORED = ROOT / "tests" / "stored" / "run_of_eada378"
TIMES = {"step_time", "tokens_per_second"}
REWARD = """
def letters(completions, **columns):
    return [sum(map(str.isalpha, message[-1]["content"])) / 10 for message in completions]
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with the run, its model and its reward."""
    save_untrained_tiny(tmp_path / "tiny-model", base=TINY_BASE.with_name("base-16f86973"))
    (tmp_path / "letters.py").write_text(REWARD)
    shutil.copytree(STORED, tmp_path / "gtpo-s3")
    return tmp_path


def test_it_resumes_to_the_stored_weights_and_metrics(work: Path, run_script: RunScript) -> None:
    run = work / "gtpo-s3"
    shutil.rmtree(run / "adapter")
    write_lines(run / "metrics.jsonl", metrics_of(STORED)[:2])
    run_script(work, "train_gtpo.py", "--resume", "gtpo-s3", "--reward", "format", "letters.py:letters")
    found, expected = (adapter_of(path / "adapter") for path in (run, STORED))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # equal on one machine
    for new, old in zip(metrics_of(run), metrics_of(STORED), strict=True):
        expected_values = {name: value for name, value in old.items() if name not in TIMES}
        assert {name: new[name] for name in expected_values} == pytest.approx(expected_values, abs=1e-4)


def test_it_can_be_evaluated(work: Path, run_script: RunScript) -> None:
    argv = ["--benchmarks", "arithmetic", "--limit", "2", "--k", "2", "--max_new_tokens", "4"]
    run_script(work, "evaluate.py", "--runs", "gtpo-s3", *argv)
    (entry,) = read_json(work / "outputs" / "evaluation" / "results.json")["results"]
    assert entry["label"] == "gtpo-s3" and entry["problems"] == 2
