"""What a name of a model means: one value, made once from an alias, a Hub id, a directory, a run or an adapter."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.files import write_json
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.settings import parsed
from pytest import MonkeyPatch

from gtpo.errors import UsageError
from gtpo.models.hub import TINY_BASE
from gtpo.models.load import load_policy
from gtpo.models.source import NOTE, is_hub_id, model_source

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
EARLIER = TINY_BASE.with_name("base-16f86973")


def adapter_on(base: str, directory: str, **lora: Any) -> Path:
    """An adapter as PEFT alone stores it, without weights."""
    path = Path(directory)
    path.mkdir(parents=True)
    write_json(path / "adapter_config.json", {"peft_type": "LORA", "r": 4, "base_model_name_or_path": base} | lora)
    return path


@pytest.fixture
def names(here: Path) -> None:
    """A working directory with what a name can mean: each directory has its kind as name."""
    for name in ("model", "smol", "trained/model", "merged/merged"):
        Path(name).mkdir(parents=True)
        write_json(Path(name, "config.json"), {})
    fake_run(Path("run"), {"model": "tiny", "tags": "a b c d"})
    fake_run(Path("trained"), {"model": "model"})
    fake_run(Path("merged"), {"model": "model"})
    for name in ("run/adapter", "run/best", "run/checkpoint-3"):
        adapter_on(str(TINY_BASE), name)
    adapter_on("model", "of_peft")
    adapter_on(LLAMA, "of_hub")


HERE = "{here}/"


@pytest.mark.parametrize(
    ("asked", "checkpoint", "base", "adapter", "name", "preset"),
    [
        ("tiny", "last", str(TINY_BASE), None, "tiny", "tiny"),
        (str(TINY_BASE), "last", str(TINY_BASE), None, str(TINY_BASE), "tiny"),
        (str(EARLIER), "last", str(EARLIER), None, str(EARLIER), "tiny"),
        ("llama", "last", LLAMA, None, "llama", "llama"),
        (LLAMA, "last", LLAMA, None, LLAMA, "llama"),
        ("owner/name", "last", "owner/name", None, "owner/name", "own"),
        ("model", "last", HERE + "model", None, "model", "own"),
        ("./smol", "last", HERE + "smol", None, "./smol", "own"),
        ("run", "last", str(TINY_BASE), "run/adapter", "tiny", "tiny"),
        ("run", "best", str(TINY_BASE), "run/best", "tiny", "tiny"),
        ("run", "3", str(TINY_BASE), "run/checkpoint-3", "tiny", "tiny"),
        ("run/checkpoint-3", "last", str(TINY_BASE), "run/checkpoint-3", "tiny", "tiny"),
        ("trained", "last", HERE + "trained/model", None, "trained/model", "own"),
        ("merged/merged", "last", HERE + "merged/merged", None, "merged/merged", "own"),
        ("of_peft", "last", HERE + "model", "of_peft", HERE + "model", "own"),
        ("of_hub", "last", LLAMA, "of_hub", "llama", "llama"),
    ],
)
def test_what_a_name_means(
    asked: str, checkpoint: str, base: str, adapter: str | None, name: str, preset: str, names: None, here: Path
) -> None:
    found = model_source(asked, checkpoint)
    assert (found.asked, found.base, found.name) == (asked, base.format(here=here), name.format(here=here))
    assert (found.adapter, found.preset) == (adapter and Path(adapter), preset)
    assert found.is_tiny == (preset == "tiny")


@pytest.mark.parametrize(
    ("asked", "checkpoint", "label"),
    [
        ("run", "last", "run"),
        ("run/adapter", "last", "run"),
        ("run", "best", "run@best"),
        ("run", "3", "run@3"),
        ("of_peft", "last", "of_peft"),
    ],
)
def test_the_label_of_an_adapter(asked: str, checkpoint: str, label: str, names: None) -> None:
    assert model_source(asked, checkpoint).label == label


def test_settings_are_those_saved_with_the_weights_or_of_the_run(names: None) -> None:
    for name in ("run", "run/best"):
        assert model_source(name).settings["tags"] == "a b c d"
    assert model_source("merged/merged").settings == {"model": "model"}
    for name in ("of_peft", "model", "tiny", "owner/name"):
        assert model_source(name).settings == {}
    write_json(Path("run/best/tokenizer_config.json"), {NOTE: {"tags": "e f g h"}})
    assert model_source("run/best").settings == {"tags": "e f g h"}


def test_the_tokenizer_is_the_adapters_own_or_that_of_the_base(names: None, here: Path) -> None:
    assert model_source("of_peft").tokenizer == str(here / "model")
    write_json(Path("of_peft/tokenizer_config.json"), {})
    assert model_source("of_peft").tokenizer == "of_peft"


def test_names_of_nothing_are_refused(names: None) -> None:
    for name in ("nothing", "./owner/name", "/no/where"):
        with refused(f"--model '{name}' is unknown"):
            model_source(name)
    with refused("owner/name is not a model or a run"):
        model_source("owner/name", on_hub=False)
    with refused("run has no checkpoint 4: pick one of best, last"):
        model_source("run", "4")
    assert is_hub_id("owner/name") and not is_hub_id("run/adapter")


def test_an_adapter_goes_on_a_base_from_another_place(names: None, here: Path) -> None:
    """A copy of the same name, where the base that it names is gone."""
    shutil.copytree("model", "copies/model")
    adapter = model_source("of_peft")
    with refused("--model copies/model is not what the adapter of_peft was trained from"):
        adapter.on(model_source("copies/model"))  # both are there
    Path("model").rename("gone")
    with refused("of_peft was trained from model, which is not here"):
        model_source("of_peft").check_base()
    moved = model_source("of_peft").on(model_source("copies/model"))
    assert (moved.base, moved.name, moved.adapter) == (str(here / "copies/model"), "copies/model", Path("of_peft"))
    moved.check_base()


def test_one_request_to_the_hub_a_start(monkeypatch: MonkeyPatch) -> None:
    """Of preset, micro-batch, tokenizer and weights; each would wait for ten seconds behind a firewall."""
    asked: list[str] = []

    def head(url: str, timeout: float) -> None:
        asked.append(url)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    settings = parsed("--model", "owner/name", "--dataset", "arithmetic", "--run_name", "x")
    with pytest.raises(UsageError, match="cannot load model 'owner/name'"):
        load_policy(settings, "transformers")
    assert len(asked) == 1
