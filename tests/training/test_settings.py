"""Every setting of TRL's GRPOConfig and SFTConfig changes something here, or is refused by name."""

import inspect
import re
from collections.abc import Collection
from pydoc import locate
from typing import Any

import pytest
import torch
from helpers.canned import weight_changes
from helpers.files import tables_of
from helpers.refusals import refused
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import fields_of
from gtpo.forward.vllm_lora import OF_VLLM
from gtpo.training import refusals

TABLES = tables_of(__file__)
OBJECTIVE = {*refusals._VALUES["supported"]}  # test_refusals.py refuses their other values
RENAMED = {old: new for old, new in TABLES["renamed"].items() if new in fields_of([GRPOConfig])}
READERS = {place: [RENAMED.get(name, name) for name in names] for place, names in TABLES["readers"].items()}
CONFIGS = {"grpo": GRPOConfig, "sft": SFTConfig}


def test_every_field_reaches_something_or_is_refused() -> None:
    of_vllm = {*TABLES["of_vllm"]}
    assert of_vllm | {"vllm_mode"} == {f"vllm_{name}" for name in OF_VLLM}
    acts = of_vllm.union(TABLES["weights"], TABLES["weights_of"], TABLES["always"], RENAMED, *READERS.values())
    refused_ = OBJECTIVE.union(refusals._UNUSED["grpo"], ["auto_find_batch_size"])  # GRPOConfig refuses the latter
    fields = {*fields_of([GRPOConfig])}
    assert fields - acts - refused_ == set() == (acts | refused_) - fields
    assert acts & refused_ <= {"scale_rewards", "loss_type", "multi_objective_aggregation"}  # some of their values


def test_every_field_of_sft_reaches_something_or_is_refused() -> None:
    fields = {*fields_of([SFTConfig])}
    acts = fields & {"do_train", "do_eval"}.union(RENAMED, *READERS.values(), *TABLES["sft"].values())
    refused_ = {*refusals._UNUSED["sft"], "resume_from_checkpoint"}  # the latter by the command line
    assert fields - acts - refused_ == set() == acts & refused_


@pytest.mark.parametrize(("place", "names"), [*READERS.items(), *TABLES["sft"].items()])
def test_a_setting_is_read_where_it_acts(place: str, names: Collection[str]) -> None:
    found: Any = locate(place)
    function = getattr(found, "fget", None) or getattr(found, "func", found)  # of a property
    source = inspect.getsource(inspect.unwrap(function))
    assert [name for name in names if not re.search(rf"\.{name}\b|\b{name}=", source)] == []


OTHER = {  # than the default, of each setting that is refused
    "train_sampling_strategy": "sequential",
    "length_column_name": "tokens",
    "label_names": ["answer"],
    "include_num_input_tokens_seen": "all",
    "include_for_metrics": ["loss"],
    "resume_from_checkpoint": "checkpoint-4",
    "liger_kernel_config": {"rope": True},
    "dataset_text_field": "question",
    "chat_template_path": "Qwen/Qwen3-0.6B",
}


@pytest.mark.parametrize(
    ("trainer", "name"),
    [(trainer, name) for trainer, unused in refusals._UNUSED.items() for name in unused],
)
def test_a_setting_that_reaches_nothing_is_refused_by_name(trainer: str, name: str) -> None:
    default = fields_of([CONFIGS[trainer]])[name].default
    value = OTHER.get(name, not default if isinstance(default, bool) else 7)
    with refused(rf"^{name} = .* has no effect, or a wrong one: \w"):
        refusals.check_unused(CONFIGS[trainer](use_cpu=True, bf16=False, **{name: value}), trainer)


def test_the_defaults_of_unsloths_config_are_accepted() -> None:
    class UnslothGRPOConfig(GRPOConfig):
        def __init__(self, data_seed: int | None = 3407, eval_accumulation_steps: int = 2, **more: Any):
            super().__init__(data_seed=data_seed, eval_accumulation_steps=eval_accumulation_steps, **more)

    settings = {"use_cpu": True, "bf16": False, "loss_type": "grpo", "use_bias_correction_kl": False}
    refusals.check_grpo_settings(UnslothGRPOConfig(**settings))
    with refused("data_seed = 7"):
        refusals.check_grpo_settings(UnslothGRPOConfig(data_seed=7, **settings))


CASES = {name: [settings, {}] for name, settings in TABLES["weights"].items()} | TABLES["weights_of"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_a_setting_of_the_loss_changes_the_weights(name: str, case: Any, build: Any) -> None:
    assert name in case[0]
    found, without = (weight_changes(build("grpo", **{"max_steps": 2} | settings)) for settings in case)
    assert not torch.equal(found, without)
