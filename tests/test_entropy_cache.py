"""Initial entropies kept for later runs: what belongs to the key, hits, and files that cannot be used."""

import copy
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import make_trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from gtpo.entropy_cache import keep_record, path_of, policy_digest, read_record

KEY: dict[str, Any] = {"policy": "abc", "temperature": 1.0, "seed": 3407}
RECORD = {"initial_entropy": 0.5, "prompts": 2, "temperature": 1.0, "per_prompt": [0.25, 0.75]}


def adapted(base: Path, rank: int = 4, module: str = "q_proj") -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=[module]))


@pytest.fixture(scope="module")
def policy(tiny: Path) -> Any:
    return adapted(tiny)


def test_the_digest_is_that_of_the_base_until_the_adapter_changes_it(tiny: Path, policy: Any) -> None:
    before = policy_digest(policy)
    assert policy_digest(adapted(tiny, rank=8)) == before  # other rank, other random A
    assert policy_digest(adapted(tiny, module="v_proj")) == before
    changed = copy.deepcopy(policy)
    [weight, *_] = [value for name, value in changed.named_parameters() if ".lora_B." in name]
    with torch.no_grad():
        weight[0, 0] = 1e-3
    assert policy_digest(changed) not in (before, None)


def test_the_digest_covers_every_weight_and_its_dtype(policy: Any) -> None:
    before = policy_digest(policy)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        changed.get_base_model().model.norm.weight[-1] += 1e-6
    assert policy_digest(changed) != before
    assert policy_digest(copy.deepcopy(policy).to(torch.bfloat16)) != before


def test_the_digest_is_the_sha256_of_names_shapes_and_bytes() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    data = b"weight torch.float32 [1, 2] " + layer.weight.detach().numpy().tobytes()
    assert policy_digest(layer) == hashlib.sha256(data).hexdigest()


def test_a_sharded_policy_has_no_digest(policy: Any) -> None:
    sharded = copy.deepcopy(policy)
    sharded.get_base_model().model.norm.weight.ds_id = 0  # DeepSpeed ZeRO-3
    assert policy_digest(sharded) is None


def test_a_record_is_found_under_exactly_its_key(tmp_path: Path) -> None:
    keep_record(tmp_path / "new", KEY, RECORD)
    assert read_record(tmp_path / "new", KEY) == RECORD
    for name in KEY:
        assert read_record(tmp_path / "new", KEY | {name: "other"}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"key": ',
        "[]",
        json.dumps({"key": KEY | {"seed": 1}, "record": RECORD}),
        json.dumps({"key": KEY, "record": {"initial_entropy": 0.5}}),
        json.dumps({"key": KEY, "record": RECORD | {"per_prompt": []}}),
        json.dumps({"key": KEY, "record": RECORD | {"per_prompt": [0.25, float("nan")]}}),
        json.dumps({"key": KEY, "record": RECORD | {"initial_entropy": 0.1}}),
    ],
    ids=["empty", "cut off", "a list", "another key", "no values", "no prompts", "NaN", "another mean"],
)
def test_a_file_that_cannot_be_used_is_measured_again(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(tmp_path, KEY).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_record(tmp_path, KEY) is None
    assert caplog.messages == [f"{path_of(tmp_path, KEY)} is not the record of this policy: measured again"]


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    keep_record(tmp_path / "file", KEY, RECORD)
    assert "not kept for the next run" in caplog.text


def measured(tiny: Path, directory: Path, **settings: Any) -> tuple[float, int]:
    """The initial entropy of a new run, and how often its policy was sampled."""
    gtpo = {"initial_entropy": None, "initial_entropy_dir": str(directory.parent / "kept")}
    trainer, calls = make_trainer("gtpo", tiny, directory, gtpo=gtpo, **settings), []
    sample = trainer._sampled_entropies
    trainer._sampled_entropies = lambda prompts: calls.append(1) or sample(prompts)
    return trainer._read_or_measure_initial_entropy(), len(calls)


def test_a_second_run_of_the_same_base_does_not_measure_again(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value, calls = measured(tiny, tmp_path / "a")
    assert calls == 1
    caplog.clear()
    assert measured(tiny, tmp_path / "b") == (value, 0)
    [kept] = (tmp_path / "kept").iterdir()
    assert f"of an earlier run ({kept})" in caplog.text
    first, second = ((tmp_path / name / "initial_entropy.json").read_bytes() for name in "ab")
    assert first == second
    kept.write_text(kept.read_text()[:-40])
    assert measured(tiny, tmp_path / "c") == (value, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"max_completion_length": 16},
        {"seed": 1},
        {"bf16": True},
        {"chat_template_kwargs": {"x": 1}, "repetition_penalty": 1.1},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_other_settings_are_measured(settings: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    assert measured(tiny, tmp_path / "a")[1] == 1
    assert measured(tiny, tmp_path / "b", **settings)[1] == 1


def test_another_number_of_completions_at_once_is_measured(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sampled from one stream of random numbers."""
    measured(tiny, tmp_path / "a")
    monkeypatch.setattr("gtpo.trainer.CPU_SAMPLING_BATCH", 50)
    assert measured(tiny, tmp_path / "b")[1] == 1


def test_other_end_tokens_are_measured(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    prompts = list(trainer.train_dataset["prompt"])
    keys = [trainer._initial_entropy_key(prompts)]
    trainer.eos_token_ids = [*trainer.eos_token_ids, 5]
    keys.append(trainer._initial_entropy_key(prompts))
    assert path_of(tmp_path, keys[0]) != path_of(tmp_path, keys[1])


def test_other_prompts_are_measured(tiny: Path, tmp_path: Path) -> None:
    measured(tiny, tmp_path / "a")
    gtpo = {"initial_entropy": None, "initial_entropy_dir": str(tmp_path / "kept")}
    trainer = make_trainer("gtpo", tiny, tmp_path / "b", gtpo=gtpo)
    prompts = list(trainer.train_dataset["prompt"])
    assert read_record(tmp_path / "kept", trainer._initial_entropy_key(prompts)) is not None
    assert read_record(tmp_path / "kept", trainer._initial_entropy_key([*prompts[:-1], "another"])) is None
