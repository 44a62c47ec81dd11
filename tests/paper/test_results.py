"""Reading: metrics and scores come from the right runs, whether on disk, in wandb or condensed."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.runs import fake_run, write_results
from pandas import Series

from gtpo.files import fingerprint
from paper.results import Results, read_results, read_wandb
from study.storage import condense

TABLES = tables_of(__file__)


ROWS = [{"step": 1, "accuracy": 2.0}, {"step": 2, "accuracy": 4.0}]
SEED_1 = {"adapter": "runs/gtpo-g8-s1/adapter", "label": "gtpo-g8-s1", "problems": 50, "score": 35.0}
SEED_2 = SEED_1 | {"adapter": "runs/gtpo-g8-s2/adapter", "label": "gtpo-g8-s2"}


def logged(results: Results) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Run and seed -> its rows, without missing values."""
    return {
        run: [row.dropna().to_dict() for _, row in frame.reset_index().iterrows()]
        for run, frame in results.runs.items()
    }


def evaluated(directory: Path, *rows: dict[str, Any], age: int = 0) -> None:
    """One ``results.json``; a row is an entry with ``pass@1`` as ``score`` and settings besides the default ones."""
    entries = []
    for row in rows:
        settings = {"problems_hash": f"of {row['problems']}", "k": 8, "temperature": 1.0} | row.get("settings", {})
        scores = {"pass": {"1": row["score"]}}
        entries.append(
            {"model": "some/model", "adapter": None, "benchmark": "gsm8k", "scores": scores}
            | row
            | {"settings": settings}
        )
    write_results(directory, *entries, age=age)


def pass_at_1(directory: Path, run: str = "gtpo-g8") -> dict[int, float]:
    """On GSM8K, by seed."""
    return read_results([directory]).scored(run, "gsm8k").get("pass@1", Series()).to_dict()


def test_the_newer_namesake_is_read_and_both_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of metrics, and of scores alone."""
    for age, directory in ((100, "old"), (50, "new")):
        run = fake_run(tmp_path / "runs" / directory / "gtpo-g8-s1", rows=[{"step": 1, "accuracy": age}])
        os.utime(run.metrics, (1e9 - age, 1e9 - age))
        evaluated(tmp_path / directory, SEED_1 | {"score": age, "adapter": f"{directory}/gtpo-g8-s1/adapter"}, age=age)
    assert read_results([tmp_path / "runs"]).curve("gtpo-g8", 1, "accuracy").tolist() == [50]
    both = f"{tmp_path}/runs/old/gtpo-g8-s1 and {tmp_path}/runs/new/gtpo-g8-s1"
    assert caplog.messages == [f"{both} have one name and seed: the newer results are used"]
    scored = read_results([tmp_path / "old", tmp_path / "new"]).scored("gtpo-g8", "gsm8k")
    assert scored["pass@1"].tolist() == [50] and "old/gtpo-g8-s1 and new/gtpo-g8-s1 have one name" in caplog.text


def test_a_name_without_a_seed_takes_the_settings(tmp_path: Path) -> None:
    fake_run(tmp_path / "sft-llama-gsm8k-paper", {"seed": 3407}, ROWS)
    assert read_results([tmp_path]).seeds("sft-llama-gsm8k") == [3407]


def test_a_run_of_another_model_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The demo's run is called gtpo, as one of SmolLM2."""
    run = fake_run(tmp_path / "gtpo", rows=ROWS)
    evaluated(tmp_path, SEED_1 | {"adapter": str(run.adapter)})
    models = {"gtpo": "meta-llama/Llama-3.1-8B-Instruct"}
    for stored, names in (("seed: 1", {"gtpo"}), ("model: llama", {"gtpo"}), ("model: tiny", set())):
        assert not caplog.messages
        run.config.write_text(f"{stored}\n")
        found = read_results([tmp_path], models)
        assert found.names == names
    assert f"{run.path} is left out: it does not train meta-llama/" in caplog.text


def test_run_that_has_not_logged_a_step_is_skipped(tmp_path: Path) -> None:
    fake_run(tmp_path / "gtpo-g8-s1").metrics.write_text('{"step": 1, "lo')
    fake_run(tmp_path / "gtpo-g8-s2", rows=ROWS)
    assert read_results([tmp_path]).seeds("gtpo-g8") == [2]


def test_wandb_project_has_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [{"_step": 0, "step": None}, {"step": 1, "eval_runtime": 1.0}, *ROWS]
    runs = [
        SimpleNamespace(name=name, scan_history=lambda: history, config={"seed": 7}) for name in ("gtpo-g8-s2", "sft")
    ]
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(runs={"me/gtpo": runs}.__getitem__))
    assert logged(read_wandb("me/gtpo")) == {("gtpo-g8", 2): ROWS, ("sft", 7): ROWS}


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


def test_two_base_models_have_a_row_each(tmp_path: Path) -> None:
    llama = {"label": "base-llama", "problems": 50, "score": 9.0}
    qwen = llama | {"label": "base-qwen", "score": 8.0}
    evaluated(tmp_path / "runs", SEED_1, SEED_2, llama, qwen, age=100)
    evaluated(tmp_path / "look", llama | {"problems": 200, "score": 1.0}, age=50)
    found = read_results([tmp_path]).scored("base", "gsm8k")
    assert {entry["label"]: entry["score"] for entry in found["entry"]} == {"base-llama": 9.0, "base-qwen": 8.0}


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
    assert pass_at_1(tmp_path) == {1: 35.0} and not caplog.messages
    for directory in (base, adapter):
        caplog.clear()
        (directory / "model.safetensors").write_text("second")
        assert pass_at_1(tmp_path) == {} and str(adapter) in caplog.text
        (directory / "model.safetensors").write_text("first")
    shutil.rmtree(adapter)
    assert pass_at_1(tmp_path) == {1: 35.0}


def test_condensed_results_read_back(tmp_path: Path) -> None:
    """Held-out rows are left out, the counts of the problems stay, and a greedy evaluation has a name of its own."""
    steps = [{"step": 1, "accuracy": 1 / 3, "kl": None, "loss": 5.0}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]
    fake_run(tmp_path / "gtpo-g8-s1", rows=[*steps, {"step": 2, "accuracy": 99.0, "eval_runtime": 1.0}])
    counted = {"intervals": {}, "per_problem": [{"id": "a", "n": 8, "c": 3}, {"id": "b", "n": 8, "c": 0}]}
    greedy = SEED_1 | {"score": 44.0, "settings": {"temperature": 0.0}}
    evaluated(tmp_path / "evaluation", SEED_1 | counted, greedy)
    condense(read_results([tmp_path]), tmp_path / "new", ["accuracy", "kl"])
    read = read_results([tmp_path / "new"])
    assert logged(read) == {("gtpo-g8", 1): [{"step": 1, "accuracy": 0.33333}, {"step": 2, "accuracy": 2.0, "kl": 0.5}]}
    [stored] = read.scored("gtpo-g8", "gsm8k")["entry"]
    assert stored["counts"] == [[8, 3], [8, 0]] and "intervals" not in stored
    assert read.scored("gtpo-g8", "gsm8k")["pass@1"].to_dict() == {1: 35.0}
    assert read.scored("gtpo-g8", "gsm8k_greedy")["pass@1"].to_dict() == {1: 44.0}
