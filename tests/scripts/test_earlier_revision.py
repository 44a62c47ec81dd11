"""A run directory of revision 6eadd26, from before the package existed: it can be resumed, evaluated and plotted.

``tests/data/run_of_6eadd26`` is a GTPO run of three steps on the untrained tiny model. It contains checkpoint-2, as
after a kill, and the final adapter.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, Ended, user_environment
from safetensors.torch import load_file

from gtpo import tiny as tiny_module
from gtpo.arithmetic import arithmetic
from gtpo.prompts import to_completion
from gtpo.tiny import build_tiny

STORED = ROOT / "tests" / "data" / "run_of_6eadd26"
TIMES = {"step_time", "tokens_per_second"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the run and its model: the tiny model had another shape, and a tokenizer of plain solutions."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    monkeypatch.setattr(tiny_module, "TINY", tiny_module.TINY | shape)
    rows = arithmetic("train", 2000, seed=0)
    targets = [(row["question"], to_completion(row["reasoning"], row["gold"])) for row in rows]
    monkeypatch.setattr(tiny_module, "_imperfect_targets", lambda size: targets)
    build_tiny(tmp_path / "tiny-model")
    shutil.copytree(STORED, tmp_path / "gtpo-old-s3")
    with open(tmp_path / "gtpo-old-s3" / "config.yaml", "a") as config:
        config.write("generation_bf16: false\n")  # a setting of later revisions that was removed again
    return tmp_path


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_resumes_to_the_stored_weights_and_metrics(work: Path, run_script: Callable[..., Ended]) -> None:
    run = work / "gtpo-old-s3"
    shutil.rmtree(run / "adapter")
    (run / "metrics.jsonl").write_text("".join((STORED / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]))
    # The run sampled by Transformers' own loop, which this setting, without an effect of its own, selects.
    sampler = ["--generation_kwargs", '{"guidance_scale": 1.0}']
    done = run_script(work, "train_gtpo.py", "--resume", "gtpo-old-s3", *sampler)
    assert done.code == 0, done.stderr[-2000:]
    found, expected = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (run, STORED))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0)  # equal on one machine
    for new, old in zip(metrics(run), metrics(STORED), strict=True):
        assert new.keys() - {"accuracy_lenient"} == old.keys()  # a later metric
        expected_values = {k: v for k, v in old.items() if k not in TIMES}
        assert {k: new[k] for k in expected_values} == pytest.approx(expected_values, abs=1e-4)


def test_it_can_be_evaluated(work: Path, run_script: Callable[..., Ended]) -> None:
    argv = ["--benchmarks", "arithmetic", "--limit", "2", "--k", "2", "--max_new_tokens", "4"]
    done = run_script(work, "evaluate.py", "--adapter", "gtpo-old-s3", *argv)
    assert done.code == 0, done.stderr[-2000:]
    (entry,) = json.loads((work / "outputs" / "evaluation" / "results.json").read_text())["results"]
    assert entry["label"] == "gtpo-old-s3" and entry["problems"] == 2


def test_it_can_be_plotted(work: Path, run_script: Callable[..., Ended]) -> None:
    done = run_script(work, "figures.py", "--runs", "gtpo-old-s3", "--output", "curves.png")
    assert done.code == 0 and (work / "curves.png").stat().st_size > 10_000
    argv = [sys.executable, "-m", "gtpo.report", "gtpo-old-s3"]
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    report = subprocess.run(argv, cwd=work, env=environment, capture_output=True, text=True)
    assert report.returncode == 0, report.stderr[-2000:]
    page = (work / "gtpo-old-s3" / "report.html").read_text()
    assert page.count("<svg") == 1 and page.count("A group of step ") == 3
