"""A directory without a run, or a run that is not finished: one sentence, the same in every command.

And a run that was resumed and has not ended again has no final weights.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.files import tables_of, write_json
from helpers.refusals import refused
from helpers.runs import fake_run, finish
from helpers.settings import parsed
from pytest import MonkeyPatch, raises

import evaluate
import figures
from gtpo.errors import UsageError
from gtpo.evaluation import chat
from gtpo.evaluation.storage import weights_have_changed
from gtpo.evaluation.targets import adapter_target, find_targets
from gtpo.files import fingerprint, remove
from gtpo.models.hub import check_model_name
from gtpo.reports.html import write_report
from gtpo.runs.directory import RunDirectory, find_adapter, find_weights, own_runs

TABLES = tables_of(__file__)
SETTINGS = {"model": "tiny", "gamma": 0.1, "num_generations": 4}  # of GTPO


def foreign_checkpoint(run: Path, step: int, name: str = "adapter_config.json") -> Path:
    """What TRL's trainer writes: no manifest."""
    directory = run / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    write_json(directory / name, {"peft_type": "LORA"})
    return directory


@pytest.fixture
def inputs(here: Path) -> Path:
    """A working directory with a directory or file of each kind."""
    (here / "empty").mkdir()
    (here / "file").write_text("text")
    fake_run(here / "several" / "a", SETTINGS)
    fake_run(here / "several" / "sub" / "b", SETTINGS)
    interrupted = fake_run(here / "interrupted", SETTINGS, [{"step": 27}], (9, 27)).path
    foreign_checkpoint(interrupted, 28)  # killed while it was written
    fake_run(here / "early", SETTINGS)
    (here / "killed").mkdir()
    (here / "killed" / "run.lock").touch()
    fake_run(here / "resumed", SETTINGS, [{"step": 12}], (2, 12), ["adapter-step-2"])
    for step in (2, 4):
        foreign_checkpoint(here / "trl", step)
    full = fake_run(here / "full", SETTINGS, [{"step": 27}], (27,)).path
    (full / "checkpoint-27" / "adapter_config.json").rename(full / "checkpoint-27" / "config.json")
    fake_run(here / "outputs" / "newest", SETTINGS)
    return here


def main_of(script: Callable[[], object], *argv: str) -> Callable[[str, MonkeyPatch], object]:
    """The script's main, with a directory behind ``argv``."""

    def run(name: str, monkeypatch: MonkeyPatch) -> object:
        monkeypatch.setattr(sys, "argv", ["script", *argv, name])
        return script()

    return run


def train(flag: str) -> Callable[[str, MonkeyPatch], object]:
    return lambda name, monkeypatch: parsed("--dataset", "arithmetic", flag, name)


ON_ARITHMETIC = ("--benchmarks", "arithmetic", "--k", "2")
COMMANDS = {  # what is needed -> the commands that need it
    "weights": [main_of(evaluate.main, *ON_ARITHMETIC, "--runs"), main_of(chat.main)],
    "metrics": [main_of(figures.main, "--runs"), lambda name, monkeypatch: write_report(name)],
    "settings": [train("--resume")],
    "model": [train("--model"), main_of(evaluate.main, *ON_ARITHMETIC, "--model")],
}
ROWS = [(needed, kind, text) for needed, texts in TABLES["sentences"].items() for kind, text in texts.items()]


@pytest.mark.parametrize(("needed", "kind", "sentence"), ROWS)
def test_one_sentence_in_every_command(
    needed: str, kind: str, sentence: str, inputs: Path, monkeypatch: MonkeyPatch
) -> None:
    for command in COMMANDS[needed]:
        with raises(UsageError) as raised:
            command(kind, monkeypatch)
        assert str(raised.value) == sentence


@pytest.mark.parametrize(("run", "named", "known"), TABLES["checkpoints"])
def test_a_missing_checkpoint_names_those_there(run: str, named: str, known: str, inputs: Path) -> None:
    fake_run(inputs / "finished", SETTINGS, steps=(5, 10), saved=["adapter", "best"])
    with refused(f"^{run} has no checkpoint {named}: pick one of {known}.$"):
        adapter_target(run, named)


def test_the_checkpoints_that_are_named_can_be_taken(inputs: Path) -> None:
    assert adapter_target("interrupted", "27").adapter == Path("interrupted/checkpoint-27")
    assert adapter_target("trl", "4").adapter == Path("trl/checkpoint-4")
    with refused("full trained all weights and has no adapter: evaluate it with --model full/checkpoint-27"):
        adapter_target("full", "27")
    with refused("trl/checkpoint-4 is not a model, and its weights are in trl/checkpoint-4: .* evaluate.py --runs"):
        check_model_name("trl/checkpoint-4")
    (inputs / "full" / "model").mkdir()
    write_json(inputs / "full" / "model" / "config.json", {})
    with refused("full is not a model, and its weights are in full/model: name a model with --model"):
        check_model_name("full")


# ---- resumed, and not ended again ----


def finished(path: Path) -> RunDirectory:
    return fake_run(path, SETTINGS, [{"step": 2}], (2,), ["adapter", "merged"])


def test_weights_of_a_first_end_are_set_aside(here: Path) -> None:
    run = finished(here / "outputs" / "run")
    assert run.is_finished and adapter_target("outputs/run").adapter == Path("outputs/run/adapter")
    run.set_aside(2)
    assert not run.is_finished and own_runs("weights") == []
    assert [path.name for path in run.earlier_weights()] == ["adapter-step-2", "merged-step-2"]
    assert (run.path / "adapter-step-2" / "adapter_model.safetensors").read_text() == "weights"
    with refused("not finished .*adapter-step-2 is from before it was resumed.*--checkpoint 2"):
        find_weights(run.path)
    with raises(UsageError, match="no finished run"):
        find_targets([], None)
    assert find_adapter(str(run.path)) is None
    assert adapter_target("outputs/run/adapter-step-2").label == "run-adapter-step-2"
    run.set_aside(12)  # resumed again: nothing new to set aside
    assert [path.name for path in run.earlier_weights()] == ["adapter-step-2", "merged-step-2"]
    finish(run.adapter)
    assert run.is_finished and adapter_target("outputs/run").adapter == Path("outputs/run/adapter")
    run.set_aside(2)  # a kill left the earlier ones
    assert not run.adapter.exists() and len(run.earlier_weights()) == 2


def test_a_linked_adapter_is_set_aside_as_a_link(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    run.adapter.rename(tmp_path / "elsewhere")
    run.adapter.symlink_to(tmp_path / "elsewhere")
    run.set_aside(2)
    assert (run.path / "adapter-step-2").is_symlink() and (tmp_path / "elsewhere" / "adapter_config.json").is_file()
    for earlier in run.earlier_weights():
        remove(earlier)
    assert (tmp_path / "elsewhere" / "adapter_config.json").is_file()


def test_scores_of_a_first_end_do_not_count(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    of_adapter = {"adapter": str(run.adapter), "settings": {"adapter": fingerprint(run.adapter)}}
    of_merged = {"model": str(run.merged), "settings": {"model": fingerprint(run.merged)}}
    assert not weights_have_changed(of_adapter) and not weights_have_changed(of_merged)
    run.set_aside(2)
    assert weights_have_changed(of_adapter) and weights_have_changed(of_merged)
    remove(run.path)  # scores are kept where a run is deleted
    assert not weights_have_changed(of_adapter)
