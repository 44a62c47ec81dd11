"""The tiny model, its tokenizer, and the tiny base: the shipped one, and that of an edited recipe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_json
from helpers.refusals import refused
from helpers.weights import Weights, same_weights
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

from examples import tiny_base as recipe
from examples.tiny_base import save_untrained_tiny
from gtpo.data.arithmetic import arithmetic
from gtpo.models.hub import TINY_BASE
from gtpo.models.source import model_source
from gtpo.prompts import to_completion, to_messages
from rewards import score_format


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def assert_same_files(one: Path, other: Path, *names: str) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def weights(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


# ---- the tiny model ----


def test_tiny_depends_only_on_the_seed(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # must have no effect
    base = TINY_BASE.with_name("base-16f86973")  # that of the fixture
    again = save_untrained_tiny(tmp_path / "again", base=base)
    other = save_untrained_tiny(tmp_path / "other", seed=1, base=base)
    assert same_weights(weights(tiny), weights(again))
    assert not same_weights(weights(tiny), weights(other))
    assert_same_files(tiny, again, "config.json", *OF_TOKENIZER)


def test_special_tokens_are_distinct_and_those_of_the_model(tiny: Path, tokenizer: Any) -> None:
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert len({*ids} - {None}) == 3
    config = read_json(tiny / "config.json")
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == ids
    assert config["vocab_size"] == len(tokenizer)


def test_prompt_is_a_prefix_of_the_conversation(tokenizer: Any) -> None:
    """Otherwise SFT would train on different prompts than GTPO samples from."""
    for row in arithmetic("train", 50, seed=0):
        prompt = to_messages(row.prompt)
        answer = to_completion(row.solution, row.gold)
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        full = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}])["input_ids"]
        completion = tokenizer.encode(answer, add_special_tokens=False)
        assert start[0] == tokenizer.bos_token_id
        assert full == [*start, *completion, tokenizer.eos_token_id]
        assert len(start) < 100 and len(completion) < 63  # of the preset


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tags_survive_decoding_without_special_tokens(tokenizer: Any) -> None:
    text = to_completion("3 + 4 = 7", "7")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert score_format(tokenizer.decode(ids, skip_special_tokens=True)) == 10


# ---- the tiny base ----


def test_the_shipped_base_is_of_this_recipe(here: Path) -> None:
    """After an edit of TINY: `python examples/tiny_base.py gtpo/models/tiny_base`."""
    assert TINY_BASE.name == recipe.directory_name()
    assert read_json(TINY_BASE / "tiny.json") == recipe.TINY
    assert model_source("tiny").base == str(TINY_BASE) and list(here.iterdir()) == []
    assert len(read_json(TINY_BASE / "losses.json")) == recipe.TINY["steps"]


@pytest.mark.slow
def test_the_shipped_base_is_what_its_recipe_trains(tmp_path: Path) -> None:
    """Its first losses, on any CPU; the files that do not depend on the CPU are equal."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    recipe.save_untrained(tmp_path)
    assert_same_files(tmp_path, TINY_BASE, *OF_TOKENIZER)
    trainer = recipe.warm_start(tmp_path)
    trainer.add_callback(Stop())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(read_json(TINY_BASE / "losses.json")[:4], abs=1e-3)


def test_the_recipe_trains_a_whole_base(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "TINY", recipe.TINY | {"steps": 2, "batch_size": 4})
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    first, again = (recipe.train_tiny(tmp_path / name) for name in ("first", "again"))
    assert threads == [2, 2]
    assert read_json(first / "tiny.json") == recipe.TINY
    assert len(read_json(first / "losses.json")) == 2
    assert {path.name for path in TINY_BASE.iterdir()} == {path.name for path in first.iterdir()}
    assert same_weights(weights(first), weights(again))


def test_a_missing_base_is_known_by_name(caplog: pytest.LogCaptureFixture) -> None:
    base = TINY_BASE.with_name("base-16f86973")
    assert model_source(base).base == str(base) and not caplog.messages
    gone = f"/gone/outputs/tiny/{base.name}"
    assert (model_source(gone).base, model_source(gone).preset) == (str(base), "tiny")
    assert gone in caplog.messages[-1]
    with refused("--model '/x/outputs/tiny/base-1' is unknown"):
        model_source("/x/outputs/tiny/base-1")
