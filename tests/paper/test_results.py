"""Reading: metrics and scores come from the right runs, whether on disk, in wandb or condensed."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import entry, rows, write_run

from gtpo.errors import UsageError
from gtpo.paper.results import Results, add_score, condense, read_results, read_wandb
from gtpo.runs.directory import RunDirectory, run_of


def test_metrics_are_read_in_order_without_a_truncated_line(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run"))
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "accur')
    assert run.read_metrics() == rows(3)


@pytest.mark.parametrize(
    ("content", "message"), [(None, r"contains no metrics\.jsonl"), ("", "is empty"), ('{"step": 1, "lo', "is empty")]
)
def test_missing_metrics_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    if content is not None:
        run.metrics.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        run.read_metrics()
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_newer_of_two_runs_with_the_same_name_is_read(tmp_path: Path) -> None:
    for age, directory in ((100, "old"), (50, "new")):
        run = RunDirectory(write_run(tmp_path / directory / "gtpo-g8-s1", steps=2, offset=float(age)))
        os.utime(run.metrics, (1e9 - age, 1e9 - age))
    assert read_results([tmp_path]).metrics["gtpo-g8"] == {1: rows(2, 50.0)}


def test_run_without_a_seed_in_its_name_has_that_of_its_settings(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "sft-llama-gsm8k-paper"))
    run.config.write_text("seed: 3407\n")
    assert list(read_results([tmp_path]).metrics["sft-llama-gsm8k"]) == [3407]


def test_a_run_of_another_model_is_left_out_with_its_scores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The demo's run is called gtpo, as one of SmolLM2."""
    run = RunDirectory(write_run(tmp_path / "gtpo"))
    entry = {"adapter": str(run.adapter), "benchmark": "test", "scores": {}}
    (tmp_path / "results.json").write_text(json.dumps({"results": [entry]}))
    models = {"gtpo": "meta-llama/Llama-3.1-8B-Instruct"}
    for stored, is_read in (("seed: 1", True), ("model: tiny", False), ("model: llama", True)):
        run.config.write_text(f"{stored}\n")
        assert ("gtpo" in read_results([tmp_path], models).metrics) == is_read
        assert ("gtpo" in read_results([tmp_path], models).scores) == is_read
        assert (f"{run.path} is left out: it does not train meta-llama/" in caplog.text) != is_read
        caplog.clear()
        assert "gtpo" in read_results([tmp_path], {"grpo": "qwen"}).metrics


def test_run_that_has_not_logged_a_step_is_skipped(tmp_path: Path) -> None:
    RunDirectory(write_run(tmp_path / "gtpo-g8-s1")).metrics.write_text('{"step": 1, "lo')
    write_run(tmp_path / "gtpo-g8-s2")
    assert list(read_results([tmp_path]).metrics["gtpo-g8"]) == [2]


def test_offline_wandb_run_is_read_as_its_run(tmp_path: Path) -> None:
    offline = Path(write_run(tmp_path / "gtpo-g8-s2")) / "wandb" / "offline-run-20260101_000000-abc"
    offline.mkdir(parents=True)
    assert run_of(offline).read_metrics() == rows(3)
    assert read_results([offline]).metrics == {"gtpo-g8": {2: rows(3)}}


def test_wandb_project_has_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Api:
        def runs(self, project: str) -> list[Any]:
            asked.append(project)
            history = [{"_step": 0, "step": None}, *rows(3)]
            run = SimpleNamespace(scan_history=lambda: history, config={"seed": 7})
            return [SimpleNamespace(name=name, **vars(run)) for name in ("gtpo-g8-s2", "sft")]

    monkeypatch.setattr("wandb.Api", Api)
    assert read_wandb("me/gtpo").metrics == {"gtpo-g8": {2: rows(3)}, "sft": {7: rows(3)}}
    assert asked == ["me/gtpo"]


def test_unknown_wandb_project_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, project: str) -> None:
        raise ValueError("Could not find project <Project me/nothing>")

    monkeypatch.setattr("wandb.Api", type("Api", (), {"runs": refuse}))
    with pytest.raises(UsageError, match="cannot read 'me/nothing' from wandb: Could not find project"):
        read_wandb("me/nothing")


def test_condensed_results_read_back(tmp_path: Path) -> None:
    logged = [{"step": 1, "accuracy": 1 / 3, "kl": float("nan"), "loss": 5.0}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]
    results = Results({"gtpo-g8": {1: logged}}, {})
    score = entry(Path("runs"), "gtpo-g8", 1, "arithmetic") | {"problems": 3, "k": 8, "intervals": {}, "per_problem": 9}
    add_score(results, score)
    condense(results, tmp_path / "new", ["accuracy", "kl"])
    read = read_results([tmp_path / "new"])
    assert read.metrics == {"gtpo-g8": {1: [{"step": 1, "accuracy": 0.33333}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]}}
    del score["per_problem"], score["intervals"]
    assert read.scores == {"gtpo-g8": {"arithmetic": {1: score}}}
