"""Scores in wandb: offline, with the id of the training run, as a table and a summary."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_callbacks import wandb_file

from gtpo.wandb_runs import log_evaluations


def entry(label: str, adapter: Path | None, checkpoint: str | None, pass_1: float) -> dict[str, Any]:
    return {
        "label": label,
        "benchmark": "gsm8k",
        "adapter": adapter and str(adapter),
        "checkpoint": checkpoint,
        "problems": 40,
        "k": 8,
        "scores": {"pass": {"1": pass_1, "8": 75.0}, "format": 97.5},
        "intervals": {"pass": {"1": [30.0, 50.0], "8": [60.0, 90.0]}},
    }


def test_offline_scores_are_in_the_run_that_they_belong_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "gtpo-s1"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "wandb_id").write_text("abcd1234")
    entries = [
        entry("gtpo-s1", run / "adapter", "last", 37.5),
        entry("gtpo-s1@best", run / "best", "best", 40.0),
        entry("base-tiny", None, None, 12.5),
    ]
    (tmp_path / "evaluation" / "base-tiny").mkdir(parents=True)
    assert log_evaluations(entries, tmp_path / "evaluation") == [run, tmp_path / "evaluation" / "base-tiny"]

    stored = wandb_file(run / "wandb")
    [started] = [record.run for record in stored if record.WhichOneof("record_type") == "run"]
    assert (started.run_id, started.display_name) == ("abcd1234", "gtpo-s1")
    summary = {
        item.key: json.loads(item.value_json)
        for record in stored
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    scores = {"pass@1": 37.5, "pass@8": 75.0, "format": 97.5}
    expected = {f"evaluation/gsm8k/{name}": value for name, value in scores.items()}
    expected |= {f"evaluation/gsm8k@best/{name}": value for name, value in (scores | {"pass@1": 40.0}).items()}
    assert expected.items() <= summary.items()
    [table] = run.glob("wandb/offline-run-*/files/media/table/evaluation/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == [
        *("benchmark", "checkpoint", "problems", "samples", "score", "k", "percent", "low", "high")
    ]
    assert content["data"] == [
        ["gsm8k", "last", 40, 8, "pass", 1, 37.5, 30, 50],
        ["gsm8k", "last", 40, 8, "pass", 8, 75, 60, 90],
        ["gsm8k", "last", 40, 8, "format", None, 97.5, None, None],
        ["gsm8k", "best", 40, 8, "pass", 1, 40, 30, 50],
        ["gsm8k", "best", 40, 8, "pass", 8, 75, 60, 90],
        ["gsm8k", "best", 40, 8, "format", None, 97.5, None, None],
    ]
    base = tmp_path / "evaluation" / "base-tiny"
    [started] = [record.run for record in wandb_file(base / "wandb") if record.WhichOneof("record_type") == "run"]
    assert started.run_id == (base / "wandb_id").read_text() != "abcd1234"
