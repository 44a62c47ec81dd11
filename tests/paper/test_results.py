"""Reading: metrics and scores come from the right runs, whether on disk, in wandb or condensed."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import entry, rows
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.results import results_of
from helpers.runs import fake_run, write_results

from gtpo.files import fingerprint
from gtpo.runs.directory import RunDirectory
from paper.results import Results, read_results, read_wandb
from study.storage import condense

TABLES = tables_of(__file__)


def logged(results: Results) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Run -> seed -> its rows, without missing values."""
    found: dict[str, Any] = {}
    for (name, seed), frame in results.runs.items():
        records = frame.reset_index().to_dict("records")
        found.setdefault(name, {})[seed] = [
            {key: value for key, value in row.items() if value == value and value is not None} for row in records
        ]
    return found


@pytest.mark.parametrize("content", ["", '{"step": 1, "lo'])
def test_empty_metrics_are_refused(content: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text(content)
    with refused("is empty") as caught:
        run.read_metrics()
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_newer_namesake_is_read_and_both_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for age, directory in ((100, "old"), (50, "new")):
        run = fake_run(tmp_path / directory / "gtpo-g8-s1", rows=rows(2, float(age)))
        os.utime(run.metrics, (1e9 - age, 1e9 - age))
    assert logged(read_results([tmp_path]))["gtpo-g8"] == {1: rows(2, 50.0)}
    both = f"{tmp_path}/old/gtpo-g8-s1 and {tmp_path}/new/gtpo-g8-s1"
    assert caplog.messages == [f"{both} have one name and seed: the newer results are used"]


def test_scores_of_two_runs_with_one_name_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake_run(tmp_path / "a" / "gtpo-g8-s1", rows=rows(2))
    for place in ("a", "b"):
        (tmp_path / place).mkdir(exist_ok=True)
        write_results(tmp_path / place / "evaluation", entry(tmp_path / place, "gtpo-g8", 1, "gsm8k"))
    read_results([tmp_path / "a"])
    assert caplog.messages == []
    read_results([tmp_path])
    assert f"{tmp_path}/a/gtpo-g8-s1 and {tmp_path}/b/gtpo-g8-s1 have one name and seed" in caplog.text


def test_a_name_without_a_seed_takes_the_settings(tmp_path: Path) -> None:
    fake_run(tmp_path / "sft-llama-gsm8k-paper", {"seed": 3407}, rows(3))
    assert read_results([tmp_path]).seeds("sft-llama-gsm8k") == [3407]


def test_a_run_of_another_model_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The demo's run is called gtpo, as one of SmolLM2."""
    run = fake_run(tmp_path / "gtpo", rows=rows(3))
    evaluated(tmp_path, SEED_1 | {"adapter": str(run.adapter)})
    models = {"gtpo": "meta-llama/Llama-3.1-8B-Instruct"}
    for stored, is_read in (("seed: 1", True), ("model: tiny", False), ("model: llama", True)):
        run.config.write_text(f"{stored}\n")
        assert bool(read_results([tmp_path], models).seeds("gtpo")) == is_read
        assert (not read_results([tmp_path], models).scored("gtpo", "gsm8k").empty) == is_read
        assert (f"{run.path} is left out: it does not train meta-llama/" in caplog.text) != is_read
        caplog.clear()
        assert read_results([tmp_path], {"grpo": "qwen"}).seeds("gtpo")


def test_run_that_has_not_logged_a_step_is_skipped(tmp_path: Path) -> None:
    fake_run(tmp_path / "gtpo-g8-s1").metrics.write_text('{"step": 1, "lo')
    fake_run(tmp_path / "gtpo-g8-s2", rows=rows(3))
    assert read_results([tmp_path]).seeds("gtpo-g8") == [2]


def test_wandb_project_has_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Api:
        def runs(self, project: str) -> list[Any]:
            asked.append(project)
            history = [{"_step": 0, "step": None}, {"step": 1, "eval_runtime": 1.0}, *rows(3)]
            run = SimpleNamespace(scan_history=lambda: history, config={"seed": 7})
            return [SimpleNamespace(name=name, **vars(run)) for name in ("gtpo-g8-s2", "sft")]

    monkeypatch.setattr("wandb.Api", Api)
    assert logged(read_wandb("me/gtpo")) == {"gtpo-g8": {2: rows(3)}, "sft": {7: rows(3)}}
    assert asked == ["me/gtpo"]


def test_the_newer_of_two_evaluations_is_read(tmp_path: Path) -> None:
    for age, name, score in ((50, "a", 7.0), (100, "b", 3.0)):
        evaluated(tmp_path / name, SEED_1 | {"score": score}, age=age)
    assert pass_at_1(tmp_path) == {1: 7.0}


def evaluated(directory: Path, *rows: dict[str, Any], age: int = 0) -> None:
    """One ``results.json``; a row is an entry with ``pass@1`` as ``score`` and settings besides the default ones."""
    entries = []
    for row in rows:
        named = {name: row[name] for name in ("adapter", "label", "problems", "model") if name in row}
        settings = {"problems_hash": f"of {row['problems']}", "k": 8, "temperature": 1.0} | row.get("settings", {})
        scores = {"pass": {"1": row["score"]}}
        entries.append({"adapter": None, "benchmark": "gsm8k", "scores": scores, "settings": settings} | named)
    write_results(directory, *entries, age=age)


def pass_at_1(directory: Path) -> dict[int, float]:
    """Of gtpo-g8 on GSM8K, by seed."""
    return read_results([directory]).scored("gtpo-g8", "gsm8k")["pass@1"].to_dict()


SEED_1 = {"adapter": "runs/gtpo-g8-s1/adapter", "label": "gtpo-g8-s1", "problems": 50, "score": 35.0}
SEED_2 = SEED_1 | {"adapter": "runs/gtpo-g8-s2/adapter", "label": "gtpo-g8-s2"}


@pytest.mark.parametrize(
    ("look", "decides"),  # decides: between two evaluations of one run
    TABLES["a_later_evaluation_of_other_problems_or_sampling_does_not_count"],
)
def test_a_later_evaluation_of_other_problems_is_ignored(
    look: dict, decides: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a single run the one with more problems, samples and temperature counts; of two runs what both have."""
    evaluated(tmp_path / "all", SEED_1, SEED_2, age=100)
    evaluated(tmp_path / "look", SEED_1 | {"score": 1.0} | look, age=50)
    assert pass_at_1(tmp_path) == {1: 35.0, 2: 35.0}
    left_out = "scores of gtpo-g8-s1 on gsm8k are left out: problems or sampling are not as in the others"
    assert caplog.messages == [left_out]
    if decides:
        evaluated(tmp_path / "all", SEED_1, age=100)
        assert pass_at_1(tmp_path) == {1: 35.0}


def test_the_majority_of_a_directory_decides_the_evaluation(tmp_path: Path) -> None:
    small = {"problems": 20, "score": 7.0}
    evaluated(tmp_path / "both", SEED_1 | small, SEED_2 | small)
    evaluated(tmp_path / "one", SEED_1)
    assert pass_at_1(tmp_path) == {1: 7.0, 2: 7.0}
    evaluated(tmp_path / "scale", SEED_1 | {"adapter": "other/grpo-g8-s1/adapter"})
    assert read_results([tmp_path]).scored("grpo-g8", "gsm8k")["pass@1"].to_dict() == {1: 35.0}


def test_two_base_models_have_a_row_each(tmp_path: Path) -> None:
    base = {"label": "base-llama", "problems": 50, "score": 9.0}
    evaluated(tmp_path / "runs", SEED_1, SEED_2, base, base | {"label": "base-qwen", "score": 8.0}, age=100)
    evaluated(tmp_path / "look", base | {"problems": 200, "score": 1.0}, age=50)
    found = read_results([tmp_path]).scored("base", "gsm8k")
    assert dict(zip([entry["label"] for entry in found["entry"]], found["pass@1"], strict=True)) == {
        "base-llama": 9.0,
        "base-qwen": 8.0,
    }


def test_checkpoints_have_names_of_their_own(tmp_path: Path) -> None:
    for place, name in (("adapter", "gtpo-g8"), ("best", "gtpo-g8@best"), ("checkpoint-40", "gtpo-g8@40")):
        evaluated(tmp_path, SEED_1 | {"adapter": f"runs/gtpo-g8-s1/{place}"})
        assert read_results([tmp_path]).scored(name, "gsm8k").index.tolist() == [1]
        assert read_results([tmp_path]).names == {name}


def test_scores_of_an_adapter_trained_again_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also those of a base that was replaced. An adapter that is gone, on another machine, counts."""
    adapter = tmp_path / "gtpo-g8-s1" / "adapter"
    base = tmp_path / "base"
    for directory in (adapter, base):
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text("first")
    settings = {"adapter": fingerprint(adapter), "model": fingerprint(base)}
    evaluated(tmp_path / "ev", SEED_1 | {"adapter": str(adapter), "settings": settings, "model": str(base)})
    for directory in (base, adapter):
        assert read_results([tmp_path]).names == {"gtpo-g8"} and not caplog.messages
        (directory / "model.safetensors").write_text("second")
        assert not read_results([tmp_path]).names and str(adapter) in caplog.text
        (directory / "model.safetensors").write_text("first")
        caplog.clear()
    shutil.rmtree(adapter)
    assert read_results([tmp_path]).names == {"gtpo-g8"}


def test_condensed_results_read_back(tmp_path: Path) -> None:
    """Held-out rows are left out, the counts of the problems stay, and a greedy evaluation has a name of its own."""
    steps = [{"step": 1, "accuracy": 1 / 3, "kl": float("nan"), "loss": 5.0}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]
    score = entry(Path("runs"), "gtpo-g8", 1, "arithmetic") | {"problems": 2, "k": 8, "intervals": {}}
    score["per_problem"] = [{"id": "a", "n": 8, "c": 3}, {"id": "b", "n": 8, "c": 0}]
    greedy = score | {"scores": {"pass": {"1": 44.0}, "format": 9.0}, "settings": {"temperature": 0.0}}
    held_out = {"step": 2, "accuracy": 99.0, "eval_runtime": 1.0}
    fake_run(tmp_path / "gtpo-g8-s1", rows=[steps[0] | {"kl": None}, steps[1], held_out])
    write_results(tmp_path, score, greedy)
    found = read_results([tmp_path])
    condense(Results.of({}, found.scores["entry"]), tmp_path / "merged", [])
    assert read_results([tmp_path / "merged"]).scored("gtpo-g8", "arithmetic_greedy")["pass@1"].tolist() == [44.0]
    condense(found, tmp_path / "new", ["accuracy", "kl"])
    read = read_results([tmp_path / "new"])
    assert logged(read) == {"gtpo-g8": {1: [{"step": 1, "accuracy": 0.33333}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]}}
    stored = read.scored("gtpo-g8", "arithmetic")["entry"][1]
    assert stored["counts"] == [[8, 3], [8, 0]] and stored["scores"] == score["scores"] and "intervals" not in stored
    assert read.scored("gtpo-g8", "arithmetic_greedy")[["pass@1", "format"]].loc[1].tolist() == [44.0, 9.0]
    assert read.scored("gtpo-g8", "gsm8k").empty and results_of({}).names == set()
