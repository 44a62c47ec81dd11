"""A directory without a run, or a run that is not finished: one sentence, the same in every command.

And a run that was resumed and has not ended again has no final weights.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.runs import fake_run, finish
from helpers.settings import parsed
from pytest import MonkeyPatch

import evaluate
import figures
from gtpo.evaluation import chat
from gtpo.evaluation.records import CompletionSettings, Head, Origin
from gtpo.evaluation.storage import weights_have_changed
from gtpo.evaluation.targets import adapter_source, find_targets
from gtpo.files import fingerprint, remove
from gtpo.models.source import model_source
from gtpo.reports.html import write_report
from gtpo.runs.directory import RunDirectory, find_weights, own_runs, write_manifest

TABLES = tables_of(__file__)
SETTINGS = {"model": "tiny", "gamma": 0.1, "num_generations": 4}  # of GTPO


def foreign_checkpoint(run: str, step: int, name: str = "adapter_config.json") -> None:
    """What TRL's trainer writes: no manifest."""
    directory = Path(run) / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / name).write_text("{}")


@pytest.fixture
def inputs(here: Path) -> None:
    """A working directory with a directory or file of each kind."""
    Path("empty").mkdir()
    Path("file").touch()
    Path("killed").mkdir()
    Path("killed/run.lock").touch()
    for name in ("several/a", "several/sub/b", "early", "full", "outputs/newest"):
        fake_run(Path(name), SETTINGS)
    fake_run(Path("interrupted"), SETTINGS, [{"step": 27}], (9, 27))
    foreign_checkpoint("interrupted", 28)  # killed while it was written
    fake_run(Path("resumed"), SETTINGS, [{"step": 12}], (2, 12), ["adapter-step-2"])
    for step in (2, 4):
        foreign_checkpoint("trl", step)
    foreign_checkpoint("full", 27, "config.json")
    write_manifest(Path("full/checkpoint-27"))
    fake_run(Path("finished"), SETTINGS, steps=(5, 10), saved=["adapter", "best"])


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
    needed: str, kind: str, sentence: str, inputs: None, monkeypatch: MonkeyPatch
) -> None:
    for command in COMMANDS[needed]:
        with refused(f"^{re.escape(sentence)}$"):
            command(kind, monkeypatch)


@pytest.mark.parametrize(("run", "named", "known"), TABLES["checkpoints"])
def test_a_missing_checkpoint_names_those_there(run: str, named: str, known: str, inputs: None) -> None:
    with refused(f"^{run} has no checkpoint {named}: pick one of {known}.$"):
        adapter_source(run, named)


def test_the_checkpoints_that_are_named_can_be_taken(inputs: None) -> None:
    for run, step in (("interrupted", "27"), ("trl", "4")):
        assert adapter_source(run, step).adapter == Path(run) / f"checkpoint-{step}"
    with refused("full trained all weights and has no adapter: evaluate it with --model full/checkpoint-27"):
        adapter_source("full", "27")
    assert model_source("trl/checkpoint-4").adapter == Path("trl/checkpoint-4")
    Path("full/checkpoint-27").rename("full/model")
    full = model_source("full")
    assert (full.adapter, full.base, full.name) == (None, str(Path("full/model").absolute()), "full/model")


# ---- resumed, and not ended again ----


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A finished one."""
    return fake_run(Path("outputs/run"), SETTINGS, [{"step": 2}], (2,), ["adapter", "merged"])


def test_weights_of_a_first_end_are_set_aside(run: RunDirectory) -> None:
    assert run.is_finished and adapter_source("outputs/run").adapter == run.adapter
    run.set_aside(2)
    assert not run.is_finished and own_runs("weights") == []
    earlier = run.earlier_weights()
    assert [path.name for path in earlier] == ["adapter-step-2", "merged-step-2"]
    assert (earlier[0] / "adapter_model.safetensors").read_text() == "weights"
    with refused("not finished .*adapter-step-2 is from before it was resumed.*--checkpoint 2"):
        find_weights(run.path)
    with refused("no finished run"):
        find_targets([], None)
    with refused("not finished .*adapter-step-2 is from before it was resumed.*--model outputs/run/checkpoint-2"):
        model_source(run.path)
    assert adapter_source(str(earlier[0])).label == "run-adapter-step-2"
    run.set_aside(12)  # resumed again: nothing new to set aside
    assert run.earlier_weights() == earlier
    finish(run.adapter)
    assert run.is_finished
    run.set_aside(2)  # a kill left the earlier ones
    assert not run.adapter.exists() and run.earlier_weights() == earlier


def test_a_linked_adapter_is_set_aside_as_a_link(run: RunDirectory) -> None:
    run.adapter.rename("elsewhere")
    run.adapter.symlink_to(Path("elsewhere").resolve())
    run.set_aside(2)
    assert (run.path / "adapter-step-2").is_symlink()
    for earlier in run.earlier_weights():
        remove(earlier)
    assert Path("elsewhere/adapter_config.json").is_file()


def test_scores_of_a_first_end_do_not_count(run: RunDirectory) -> None:
    adapter = CompletionSettings(adapter=fingerprint(run.adapter))
    merged = CompletionSettings(model=str(fingerprint(run.merged)))
    scores = [Head(adapter, Origin("some/model", str(run.adapter))), Head(merged, Origin(str(run.merged)))]
    assert not any(map(weights_have_changed, scores))
    run.set_aside(2)
    assert all(map(weights_have_changed, scores))
    remove(run.path)  # scores are kept where a run is deleted
    assert not weights_have_changed(scores[0])
